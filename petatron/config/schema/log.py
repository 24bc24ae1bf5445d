"""The settings of logs: console, TensorBoard, Weights & Biases, samples, profiles, timeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from petatron.config.schema.monitoring import StepLogSettings
from petatron.config.schema.numeric_bounds import (
    Factor,
    IterationCount,
    RankCount,
    SmallCount,
)
from petatron.config.schema.setting_metadata import Feature, used_with
from petatron.config.schema.setting_types import (
    FilePath,
)

_SAMPLES, _PROFILES = used_with("log.sample_prompts"), used_with("log.profile")
_WANDB = used_with("log.wandb_project")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig(StepLogSettings):
    """What a run tells."""

    feature: ClassVar = Feature("log", role="training")
    log_interval: Annotated[IterationCount, "at least 1"] = 100
    """Iterations between log lines; the first iteration is always logged."""
    log_throughput: bool = True
    """Report TFLOP/s per device in the log line."""
    log_params_norm: bool = False
    """Report the norm of all parameters."""
    log_num_zeros_in_grad: bool = False
    """Report how many gradient elements are zero."""
    log_dir: FilePath | None = None
    """Folder for metrics.jsonl and the resolved config. Derived: the `--save` folder, else runs/<time>."""
    tensorboard_dir: FilePath | None = None
    """Write TensorBoard events here (extra: log)."""
    wandb_project: str | None = None
    """Send metrics to this Weights & Biases project (extra: log)."""
    wandb_exp_name: str | None = None
    """Name of the W&B run."""
    wandb_entity: Annotated[str, _WANDB] | None = None
    """User or team of the W&B run; unset means the account's default."""
    wandb_save_dir: Annotated[FilePath, _WANDB] | None = None
    """Folder for W&B's own files; unset means the log folder."""
    sample_prompts: FilePath | None = None
    """File of prompts, one per line, that the model continues every `--sample-interval` iterations, to see it learn: texts, or JSON objects
    with `messages`, which it answers."""
    sample_interval: Annotated[IterationCount, "at least 1"] | None = None
    """Iterations between text samples; needs `--sample-prompts`."""
    sample_tokens: Annotated[SmallCount, "at least 1", _SAMPLES] = 40
    """New tokens per text sample."""
    sample_temperature: Annotated[Factor, "at least 0", _SAMPLES] = 0.0
    """Temperature of text samples: 0 takes the likeliest token; above 0 tokens are drawn with the same seed every time."""
    live: Literal["auto", "on", "off"] = "auto"
    """Live terminal view; auto shows it when stderr is a terminal and rich is installed."""
    pipeline_timeline: FilePath | None = None
    """File to write the measured timeline of one step to; `petatron plan schedule --measured` draws it."""
    pipeline_timeline_step: Annotated[IterationCount, "at least 1", used_with("log.pipeline_timeline")] = 3
    """Which iteration `--pipeline-timeline` measures."""
    profile: bool = False
    """Write a Chrome trace of some iterations (PyTorch's profiler), to be opened in Perfetto or chrome://tracing."""
    profile_step_start: Annotated[IterationCount, "at least 1", _PROFILES] = 10
    """First iteration that `--profile` traces."""
    profile_step_end: Annotated[IterationCount, _PROFILES] = 12
    """Iteration before which `--profile` stops."""
    profile_ranks: tuple[Annotated[RankCount, _PROFILES], ...] = (0,)
    """Ranks that `--profile` traces."""
    profile_dir: Annotated[FilePath, _PROFILES] | None = None
    """Folder for the traces, made if need be in one that exists; unset: `profile` in the TensorBoard, log or save folder, or runs."""
