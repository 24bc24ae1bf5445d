"""Formats records as text: Megatron's log lines, validation results, samples, and the closing summary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from petatron.config.schema.objective_and_dataset_names import LM_LOSS
from petatron.evaluate.comparison_table import format_estimate
from petatron.evaluate.confidence_interval import Estimate, perplexity
from petatron.train.report.closing_summary import summary_lines
from petatron.train.report.log_records import LogRecord, MetricRecord, format_duration, format_percent

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
    named = {**loss_values(record.lm_loss, record.named_losses), **(record.objective_metrics or {})}
    parts += [f" {name}: {mean:.6E}" for name, mean in named.items() if mean is not None]
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


def loss_values(total: float | None, named: Mapping[str, float | None] | None) -> dict[str, float | None]:
    """Returns the losses of a record by the names that logs have for them: the total too, where there are several.

    >>> loss_values(3.0, None), loss_values(0.7, {"preference loss": 0.7}), loss_values(3.0, {"lm loss": 2.0, "mtp 1 loss": 10.0})
    ({'lm loss': 3.0}, {'preference loss': 0.7}, {'total loss': 3.0, 'lm loss': 2.0, 'mtp 1 loss': 10.0})
    """
    if not named:
        return {LM_LOSS: total}
    return dict(named) if len(named) == 1 else {"total loss": total, **named}


def _router_log_fields(layers: Sequence[Mapping[str, float]]) -> list[str]:
    """Summarizes all layers; each layer's metrics are in the other writers."""

    def mean(name: str) -> float:
        return sum(layer[name] for layer in layers) / len(layers)

    return [
        f" load balancing loss: {mean('extra_loss'):.6E}",
        f" expert load max/mean: {max(layer['load_max_over_mean'] for layer in layers):.2f}",
        f" router entropy: {mean('entropy'):.3f}",
        f" router z: {mean('z'):.3f}",
        f" dropped tokens: {format_percent(mean('dropped'))}",
    ]


def validation_line(record: MetricRecord) -> str:
    """Three lines: the result framed by dashes, as Megatron prints it; each one of several losses, of metrics, and of other weights."""
    dataset, named_losses = record.get("dataset"), record.get("named_losses")
    where = f" on {dataset}" if dataset else " on test set" if record["split"] == "test" else ""
    values = {f"{name} value": value for name, value in loss_values(record["lm_loss"], named_losses).items()}
    if not named_losses:
        values[f"{LM_LOSS} PPL"] = perplexity(record["lm_loss"])
    values |= record.get("objective_metrics") or {}
    values |= {f"loss with {title} value": value for title, value in (record.get("loss_by_weights") or {}).items()}
    fields = "".join(f"{name}: {value:.6E} | " for name, value in values.items())
    line = f" validation loss at iteration {record['iteration']}{where} | {fields}"
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
    metrics = "".join(f"{name}: {_with_interval(metric)} | " for name, metric in record["metrics"].items())
    return f" {record['task']} at iteration {record['iteration']} | {metrics}"


def _with_interval(metric: Mapping[str, Any]) -> str:
    value, low, high = (None if metric[key] is None else float(metric[key]) for key in ("value", "low", "high"))
    return format_estimate(Estimate(math.nan if value is None else value, low, high))


def format_record(record: MetricRecord, *, throughput: bool = True) -> str:
    """Formats a record for a console."""
    if record["kind"] == "train":
        return megatron_log_line(LogRecord.from_record(record), throughput=throughput)
    formats = {"valid": validation_line, "sample": sample_lines, "eval": task_line, "summary": summary_lines}
    return formats[record["kind"]](record) if record["kind"] in formats else str(record["message"])


def is_for_consoles(record: MetricRecord) -> bool:
    """Whether a record is for people who watch; details are for the log alone."""
    return not record.get("detail", False)
