"""The registry of optional stateful components: those that a run's settings ask for, and those that imported modules register.

A kind of component is a function that builds it for a run, or returns None where the run does not ask for it. `TrainState` builds them all,
so `petatron train`, `petatron.restore` and `Run` save, restore and evaluate them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from petatron.base.errors import Problem, raise_problems
from petatron.checkpoint.stateful_components import Stateful
from petatron.config import RunConfig
from petatron.optim.mixed_precision import MixedPrecisionOptimizer
from petatron.parallel.parallel_model import ParallelModel
from petatron.train.state.external_data_state import build_external_data_state
from petatron.train.state.weight_average import build_weight_average, weight_average_problems

ComponentBuilder = Callable[[RunConfig, ParallelModel, MixedPrecisionOptimizer], Stateful | None]


@dataclass(frozen=True, slots=True)
class ComponentKind:
    """How a component is built, and which settings it cannot go with."""

    build: ComponentBuilder
    problems: Callable[[RunConfig], Sequence[Problem]] = lambda run: ()


_KINDS: list[ComponentKind] = [
    ComponentKind(build_weight_average, weight_average_problems),
    ComponentKind(build_external_data_state),
]


def register_component(build: ComponentBuilder) -> None:
    """Registers state of your own, for modules of `--import`: `build(run, model, optimizer)` returns a `Stateful`, or None.

    >>> register_component(lambda run, model, optimizer: None)
    """
    _KINDS.append(ComponentKind(build))


def check_components(run: RunConfig) -> None:
    """Raises `ConfigError` with every setting that a component of the run cannot go with."""
    problems = [problem for kind in _KINDS for problem in kind.problems(run)]
    raise_problems(problems)


def build_components(run: RunConfig, model: ParallelModel, optimizer: MixedPrecisionOptimizer) -> list[Stateful]:
    """Returns the components that a run's settings and imported modules ask for."""
    check_components(run)
    built = (kind.build(run, model, optimizer) for kind in _KINDS)
    return [component for component in built if component is not None]
