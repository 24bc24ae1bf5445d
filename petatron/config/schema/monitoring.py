"""The settings of a run's monitoring: checks of results, garbage collection, timers, energy, memory."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from petatron.config.schema.numeric_bounds import IterationCount, SmallCount
from petatron.config.schema.setting_metadata import Feature, UsedWhen, settings_section, used_with

_FilePath = Annotated[str, "path"]
_PROFILES = used_with("log.profile")
_SAVES = used_with("checkpoint.save", reason="there is no --save")
_ON_DEVICE = UsedWhen(lambda run: run.train.device != "cpu", "the CPU computes")
_RERUNS = UsedWhen(lambda run: run.train.rerun_mode != "disabled", "it is for --rerun-mode")
_COLLECTS, _STRAGGLERS = used_with("train.manual_gc"), used_with("log.log_straggler")
_TIMES = UsedWhen(
    lambda run: run.log.timing_log_level > 0, "--timing-log-level 0 times iterations alone, which are always logged"
)


@settings_section
class StepCheckSettings:
    """Checks of a step's results, and memory between steps."""

    feature: ClassVar = Feature("checks of steps", role="training")
    rerun_mode: Literal["disabled", "validate_results", "report_stats"] = "disabled"
    """validate_results: an iteration whose loss or gradients are not finite, or suspicious by the checks below, runs again, to tell a
    transient error of the hardware; report_stats: every iteration runs twice, and those that differ are counted. Reads the loss in
    every step, which costs speed."""
    check_for_spiky_loss: Annotated[bool, _RERUNS] = False
    """With `--rerun-mode validate_results`: a loss ten times the largest of the last 100 iterations is suspicious."""
    check_for_large_grads: Annotated[bool, _RERUNS] = False
    """With `--rerun-mode validate_results`: gradients ten times as large as any of the last 100 iterations are suspicious."""
    error_injection_rate: Annotated[SmallCount, "at least 0", _RERUNS] = 0
    """Tests `--rerun-mode`: one in this many iterations counts as wrong; 0 means never. No trained number changes."""
    error_injection_type: Annotated[
        Literal["correct_result", "transient_error", "persistent_error"], used_with("train.error_injection_rate")
    ] = "transient_error"
    """What `--error-injection-rate` pretends: a right result, an error that is gone in the second run, or one in both."""
    check_weight_hash_across_dp_replicas_interval: Annotated[IterationCount, "at least 1"] | None = None
    """Iterations between checks that ranks that hold the same weights hold the same bits; a difference stops the run."""
    manual_gc: bool = False
    """Let Python collect garbage every `--manual-gc-interval` iterations on all ranks at once, instead of whenever it likes."""
    manual_gc_interval: Annotated[IterationCount, _COLLECTS] = 0
    """Iterations between collections of `--manual-gc`; 0 means none in training."""
    manual_gc_eval: Annotated[bool, _COLLECTS] = True
    """With `--manual-gc`, collect before and after every evaluation too."""
    empty_unused_memory_level: Annotated[SmallCount, "below 3", _ON_DEVICE] = 0
    """Return unused memory to the device in every iteration: 1 before the update, 2 also after it; 0 never. Costs speed."""


@settings_section
class StepLogSettings:
    """What is measured beside the metrics of every run."""

    feature: ClassVar = Feature("measurements of steps", role="training")
    log_progress: Annotated[bool, _SAVES] = False
    """Keep progress.txt in the `--save` folder: a line for each start and each checkpoint, with throughput and tokens so far."""
    timing_log_level: Annotated[SmallCount, "below 3"] = 0
    """Time the phases of a step and log them at every log line: 1 batches, passes, update, evaluation and saving; 2 also forward and
    backward. Waits for the device around each phase, which costs speed; 0 times nothing but iterations."""
    timing_log_option: Annotated[Literal["max", "minmax", "all"], _TIMES] = "minmax"
    """What `--timing-log-level` logs of the times of all ranks: the largest, the smallest and the largest, or each."""
    log_timers_to_tensorboard: Annotated[bool, _TIMES] = False
    """Send the largest of the times of `--timing-log-level` to TensorBoard and W&B too."""
    log_straggler: bool = False
    """Log at every log line which ranks compute slowest and fastest. Waits for the device after each pass, which costs speed."""
    straggler_minmax_count: Annotated[SmallCount, "at least 1", _STRAGGLERS] = 1
    """How many of the slowest and of the fastest ranks `--log-straggler` names."""
    log_energy: Annotated[bool, _ON_DEVICE] = False
    """Log the energy per iteration and the power of the GPUs, measured by NVML (pip install nvidia-ml-py)."""
    record_memory_history: Annotated[bool, _ON_DEVICE] = False
    """Record every allocation of the device, and write `--memory-snapshot-path` at every log line, for pytorch.org/memory_viz."""
    memory_snapshot_path: Annotated[_FilePath, used_with("log.record_memory_history")] = "snapshot.pickle"
    """File that `--record-memory-history` writes, on rank 0."""
    record_shapes: Annotated[bool, _PROFILES] = False
    """Record the shapes of tensors in the traces too."""
    pytorch_profiler_collect_callstack: Annotated[bool, _PROFILES] = False
    """Record the Python stack of every operation in the traces too."""
