"""Whether a model, in its layout, can continue text."""

from __future__ import annotations

from collections.abc import Iterator

from petatron.base.errors import ConfigError, DataError, Problem
from petatron.infer.draft.drafter import num_depths
from petatron.infer.engine_options import EngineOptions
from petatron.layers.spec.generation_state import PagedState
from petatron.parallel.parallel_model import ParallelModel


def check_model(model: ParallelModel, options: EngineOptions) -> None:
    """Raises `ConfigError` for layouts that only training needs, and `DataError` for layers without a generation state."""
    problems: list[Problem] = []
    if model.mesh.cp.size > 1:
        rule = "splits sequences, which generation keeps whole"
        problems.append(Problem("--context-parallel-size", str(model.mesh.cp.size), rule, "Load the model with 1."))
    if model.plan.virtual > 1:
        rule = "cuts a rank's layers into several stages, which only training needs"
        fix = "Load the model without it; --pp may stay."
        problems.append(Problem("--num-virtual-stages-per-pipeline-rank", str(model.plan.virtual), rule, fix))
    if options.fp8_weights and model.fully_sharded:
        rule = "quantises whole weights, and this model's are sharded over data-parallel ranks"
        problems.append(Problem("--fp8-weights", "", rule, "Load it without a --data-parallel-sharding-strategy."))
    problems += _speculation_problems(model, options.speculative_tokens)
    if problems:
        raise ConfigError(problems)
    mixed = sorted(
        {b.title or b.name for layer in set(model.spec.layers) for b in layer.branches if not b.can_generate}
    )
    if mixed:
        raise DataError(
            f"This model does not continue text: its {', '.join(mixed)} layers have no state to generate with."
        )


def _speculation_problems(model: ParallelModel, count: int) -> Iterator[Problem]:
    if count == 0:
        return
    flag, value = "--speculative-tokens", str(count)
    if count < 0:
        yield Problem(flag, value, "is below 0", "Leave it out for no drafts.")
    states = [b.generation_state(model.mesh.tp.size) for layer in set(model.spec.layers) for b in layer.branches]
    if any(state is not None and not isinstance(state, PagedState) for state in states):
        rule = "takes rejected tokens back, and this model's recurrent layers cannot: their state has no token apart"
        yield Problem(flag, value, rule, "Leave it out.")
    elif num_depths(model) == 0:
        rule = "drafts with multi-token prediction, and this model was trained without --mtp-num-layers"
        yield Problem(flag, value, rule, "Leave it out, or use a model that has depths.")
    if model.mesh.pp.size > 1:
        rule = f"needs embedding and output head on one stage, and --pipeline-model-parallel-size {model.mesh.pp.size} separates them"
        yield Problem(flag, value, rule, "Load the model with --pp 1, perhaps with more --tp.")
