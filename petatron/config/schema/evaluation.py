"""The settings of evaluation: when a run evaluates, on which data, and on how many batches."""

from __future__ import annotations

from typing import Annotated, ClassVar

from petatron.config.schema.numeric_bounds import BatchSize, IterationCount
from petatron.config.schema.setting_metadata import Feature, settings_section

_FilePath = Annotated[str, "path"]


@settings_section
class EvaluationSettings:
    """Evaluations of a run."""

    feature: ClassVar = Feature("evaluation", role="training")
    eval_interval: Annotated[IterationCount, "at least 1"] | None = None
    """Iterations between evaluations on the validation split; unset means none until the end."""
    eval_iters: Annotated[IterationCount, "at least 0"] = 100
    """Batches per evaluation; 0 means no evaluation."""
    full_validation: bool = False
    """Evaluate every validation set whole, once, whatever `--eval-iters` is for it; less than one sample a rank of the rest is left out."""
    skip_train: Annotated[bool, "one start"] = False
    """Train nothing: evaluate the validation and test sets with the weights as they are loaded, and end."""
    eval_global_batch_size: Annotated[BatchSize, "at least 1"] | None = None
    """Samples per batch of an evaluation over all ranks; unset means `--global-batch-size`."""
    eval_micro_batch_size: Annotated[BatchSize, "at least 1"] | None = None
    """Samples per forward pass of an evaluation on one rank; unset means `--micro-batch-size`."""
    start_eval_at_iter: Annotated[IterationCount, "at least 0"] | None = None
    """Iteration before which `--eval-interval` evaluates nothing."""
    eval_tasks: _FilePath | None = None
    """YAML list of tasks (see evaluation.md) that measure the model every `--eval-tasks-interval` iterations, and at the end."""
    eval_tasks_interval: Annotated[IterationCount, "at least 1"] | None = None
    """Iterations between runs of `--eval-tasks`; unset means `--eval-interval`."""
