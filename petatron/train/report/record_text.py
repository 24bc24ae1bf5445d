"""Records as text: Megatron's log lines, validation results, samples, and the closing summary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from petatron.evaluate.comparison_table import format_estimate
from petatron.evaluate.estimate import Estimate, perplexity
from petatron.train.report.closing_summary import summary_lines
from petatron.train.report.metrics import LogRecord, MetricRecord, format_duration, format_percent

TIME_LIMIT = "--exit-duration-in-mins"
_CONTINUED = " => "


def megatron_log_line(record: LogRecord, *, throughput: bool = True) -> str:
    """Returns the iteration line: Megatron's fields, then ours."""
    now = datetime.fromtimestamp(record.time).strftime("%Y-%m-%d %H:%M:%S.%f")
    parts = [
        f" [{now}] iteration {record.iteration:8d}/{record.train_iters:8d}",
        f" consumed samples: {record.consumed_samples:12d}",
        f" elapsed time per iteration (ms): {record.elapsed_ms_per_iteration:.1f}",
    ]
    if throughput:
        parts.append(f" throughput per GPU (TFLOP/s/GPU): {record.tflops_per_device:.1f}")
    parts.append(f" learning rate: {record.lr:.6E}")
    if record.decoupled_lr is not None:
        parts.append(f" decoupled learning rate: {record.decoupled_lr:.6E}")
    parts.append(f" global batch size: {record.global_batch_size:5d}")
    if record.lm_loss is not None:
        parts.append(f" {'total loss' if record.named_losses else 'lm loss'}: {record.lm_loss:.6E}")
    parts += [f" {name}: {mean:.6E}" for name, mean in (record.named_losses or {}).items() if mean is not None]
    parts.append(f" loss scale: {record.loss_scale:.1f}")
    if record.grad_norm is not None:
        parts.append(f" grad norm: {record.grad_norm:.3f}")
    if record.num_zeros is not None:
        parts.append(f" num zeros: {record.num_zeros}")
    if record.params_norm is not None:
        parts.append(f" params norm: {record.params_norm:.3f}")
    if record.router_health:
        parts += _router_log_fields(list(record.router_health.values()))
    parts += [
        f" number of skipped iterations: {record.skipped:3d}",
        f" number of nan iterations: {record.nan:3d}",
        f" tokens/s/device: {record.tokens_per_second_per_device:.1f}",
        f" MFU: {format_percent(record.mfu)}",
        f" memory (GB): {record.memory_bytes / 1e9:.2f}",
        f" ETA: {format_duration(record.eta_s)}" + (f" ({TIME_LIMIT})" if record.eta_is_time_limit else ""),
    ]
    return " |".join(parts) + " |"


def _router_log_fields(layers: Sequence[Mapping[str, float]]) -> list[str]:
    """Summarises all layers; each layer's metrics are in the other sinks."""

    def mean(name: str) -> float:
        return sum(layer[name] for layer in layers) / len(layers)

    return [
        f" load balancing loss: {mean('extra_loss'):.6E}",
        f" expert load max/mean: {max(layer['load_max_over_mean'] for layer in layers):.2f}",
        f" router entropy: {mean('entropy'):.3f}",
        f" router z: {mean('z'):.3f}",
        f" dropped tokens: {format_percent(mean('dropped'))}",
    ]


def validation_line(
    *,
    iteration: int,
    lm_loss: float,
    split: str = "valid",
    named_losses: Mapping[str, float] | None = None,
    loss_by_weights: Mapping[str, float] | None = None,
) -> str:
    """Three lines: the result framed by dashes, as Megatron prints it; of several losses, and of other weights, each one's value."""
    where = f"iteration {iteration}" + (" on test set" if split == "test" else "")
    values = {"lm loss value": lm_loss, "lm loss PPL": perplexity(lm_loss)}
    if named_losses is not None:
        values = {"total loss value": lm_loss, **{f"{name} value": value for name, value in named_losses.items()}}
    values |= {f"loss with {title} value": value for title, value in (loss_by_weights or {}).items()}
    line = f" validation loss at {where} | " + "".join(f"{name}: {value:.6E} | " for name, value in values.items())
    frame = "-" * (len(line) + 1)
    return f"{frame}\n{line}\n{frame}"


def sample_lines(record: MetricRecord) -> str:
    """Formats text samples: each prompt with its continuation, behind a bar, since both may have several lines."""
    lines = [f"samples at iteration {record['iteration']}"]
    for sample in record["samples"]:
        first, *others = f"{sample['prompt']}{_CONTINUED}{sample['text']}".split("\n")
        lines += [f"  > {first}", *(f"  | {line}" for line in others)]
    return "\n".join(lines)


def task_line(record: MetricRecord) -> str:
    """Formats the metrics of a task of `--eval-tasks`, with their intervals."""
    fields = [f"{name}: {_with_interval(metric)}" for name, metric in record["metrics"].items()]
    return f" {record['task']} at iteration {record['iteration']} | " + "".join(f"{each} | " for each in fields)


def _with_interval(metric: Mapping[str, Any]) -> str:
    value, low, high = (
        None if each is None else float(each) for each in (metric[key] for key in ("value", "low", "high"))
    )
    return format_estimate(Estimate(math.nan if value is None else value, low, high))


def format_record(record: MetricRecord, *, throughput: bool = True) -> str:
    """Formats a record for a console."""
    if record["kind"] == "train":
        return megatron_log_line(LogRecord.from_record(record), throughput=throughput)
    if record["kind"] == "valid":
        return validation_line(
            iteration=record["iteration"],
            lm_loss=record["lm_loss"],
            split=record["split"],
            named_losses=record.get("named_losses"),
            loss_by_weights=record.get("loss_by_weights"),
        )
    if record["kind"] == "sample":
        return sample_lines(record)
    if record["kind"] == "eval":
        return task_line(record)
    return summary_lines(record) if record["kind"] == "summary" else str(record["message"])


def is_for_consoles(record: MetricRecord) -> bool:
    """Whether a record is for people who watch; details are for the log alone."""
    return not record.get("detail", False)
