"""Whether a model, in its layout, can continue text."""

from __future__ import annotations

from petatron.base.errors import ConfigError, DataError, Problem
from petatron.infer.engine_options import EngineOptions
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
    if problems:
        raise ConfigError(problems)
    mixed = sorted(
        {b.title or b.name for layer in set(model.spec.layers) for b in layer.branches if not b.can_generate}
    )
    if mixed:
        raise DataError(
            f"This model does not continue text: its {', '.join(mixed)} layers have no state to generate with."
        )
