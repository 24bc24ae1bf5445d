"""`Objective`: what a run minimises instead of the model's own loss, of one's own making (`--objective NAME`).

An objective sees the logits of whole sequences and returns losses per token. It never knows the layout: with tensor parallelism the
logits are gathered and each rank takes its part of their gradient, with pipelines it runs on the last stage, and sums, masks and the
mean over the global batch are the same as for any loss (`LossSpec`). It may read other models, which are frozen: a teacher, a
reference. They run first, on the same mesh, and what is wanted of them becomes arrays of the batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from petatron.base.errors import ConfigError, Problem
from petatron.config.imports import IMPORT_FLAG, import_installed_plugins
from petatron.config.named_settings import parse_named_settings
from petatron.config.schema.fields import closest_matches
from petatron.config.schema.run import RunConfig
from petatron.models.batch import Batch
from petatron.models.stage_inputs_outputs import LossSpec

_FLAG, _SETTINGS_FLAG = "--objective", "--objective-settings"


@dataclass(frozen=True, slots=True)
class ModelRole:
    """A frozen model that an objective reads: its folder, and the outputs that are wanted of it for each micro-batch.

    >>> ModelRole("runs/large").array("teacher", "logits")
    'teacher.logits'
    """

    folder: str
    outputs: tuple[str, ...] = ("logits",)

    def array(self, role: str, output: str) -> str:
        """The name of the batch's array with an output: `teacher.logits`."""
        return f"{role}.{output}"


class Objective(ABC):
    """The losses of a run. Subclasses are frozen dataclasses whose fields are its settings (`--objective-settings NAME=VALUE`).

    >>> import torch
    >>> @dataclass(frozen=True)
    ... class Entropy(Objective):
    ...     weight: float = 1.0
    ...     @property
    ...     def losses(self):
    ...         return (LossSpec("entropy", weight=self.weight),)
    ...     def token_losses(self, logits, batch):
    ...         return {"entropy": torch.distributions.Categorical(logits=logits).entropy()}
    >>> register_objective("entropy", Entropy)
    >>> parse_objective("entropy", ["weight=0.5"]).losses[0].weight
    0.5
    """

    @property
    @abstractmethod
    def losses(self) -> tuple[LossSpec, ...]:
        """The losses by name, each with its mask in the batch and its weight in the sum."""

    @property
    def models(self) -> Mapping[str, ModelRole]:
        """The frozen models that it reads, by role."""
        return {}

    @abstractmethod
    def token_losses(self, logits: Tensor, batch: Batch) -> Mapping[str, Tensor]:
        """Returns each loss of every token [B, S], from logits [B, S, vocabulary] in float32 or wider.

        The batch has tokens, labels and loss_mask [B, S], and the outputs of `models` as `role.output`. Under context parallelism all
        of them are this rank's part of the sequence: a loss may mix vocabulary entries, and not positions.
        """


_KINDS: dict[str, type[Objective]] = {}


def register_objective(name: str, kind: type[Objective]) -> None:
    """Makes `--objective name` train with an objective, a frozen dataclass; the name must be new, or have the same class.

    >>> register_objective("nothing", Objective)
    >>> register_objective("nothing", Objective)
    """
    if _KINDS.setdefault(name, kind) is not kind:
        raise ConfigError([Problem(_FLAG, name, "is registered already", "Register it under another name.")])


def build_objective(run: RunConfig) -> Objective | None:
    """Returns the objective of a run; None: the model's own losses."""
    train = run.train
    if train.objective is None:
        if train.objective_settings:
            rule = "are settings of an objective, and none is given"
            raise ConfigError([Problem(_SETTINGS_FLAG, " ".join(train.objective_settings), rule, f"Add {_FLAG}.")])
        return None
    return parse_objective(train.objective, train.objective_settings)


def parse_objective(name: str, settings: Sequence[str]) -> Objective:
    """Returns a registered objective with its settings; raises `ConfigError` with every problem."""
    if name not in _KINDS:
        import_installed_plugins()
    kind = _KINDS.get(name)
    if kind is None:
        close = closest_matches(name, _KINDS, count=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        known = ", ".join(sorted(_KINDS)) or "none"
        fix = f"{hint}Known: {known}; add {IMPORT_FLAG} MODULE, the file or package that registers it."
        raise ConfigError([Problem(_FLAG, name, "is not a registered objective", fix)])
    return kind(**parse_named_settings(kind, settings, _SETTINGS_FLAG, f"{_FLAG} {name}"))
