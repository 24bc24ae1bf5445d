"""Writers of a run's records: `metrics.jsonl` and a console always, TensorBoard and W&B when configured.

`metrics.jsonl` is append-only. Each record is one line, handed to the kernel in one write as soon as it exists, so a
killed process loses nothing it has reported. A resumed run repeats iterations that were logged but not saved; it marks
that with an event ("resumed at iteration N"), and a reader that wants one curve drops earlier lines with a larger
iteration. Nothing is ever rewritten, since rewriting is how histories get lost.

The tags in TensorBoard and W&B are Megatron's, so that runs of both can be overlaid.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from petatron.base.errors import ConfigError, Problem, TrainError
from petatron.base.safe_files import reopen_file
from petatron.base.terminal_escape import raw_output
from petatron.config.schema.log import LogConfig
from petatron.config.schema.objective_and_dataset_names import LM_LOSS
from petatron.history.metrics_file import METRICS_FILE
from petatron.train.report.console import build_console_writer
from petatron.train.report.earlier_loss_curves import read_history
from petatron.train.report.format_records import format_record, loss_values
from petatron.train.report.log_records import MetricRecord, MetricWriter

SCHEMA_VERSION = 1

_TRAIN_TAGS = {
    "lr": "learning-rate",
    "decoupled_lr": "decoupled-learning-rate",
    "global_batch_size": "batch-size",
    "loss_scale": "loss-scale",
    "grad_norm": "grad-norm",
    "params_norm": "params-norm",
    "num_zeros": "num-zeros",
    "tflops_per_device": "throughput",
    "tokens_per_second_per_device": "tokens-per-second-per-device",
    "mfu": "mfu",
    "memory_bytes": "memory-bytes",
    "skipped": "skipped-iterations",
    "nan": "nan-iterations",
    "consumed_samples": "consumed-samples",
    "consumed_tokens": "consumed-tokens",
}
_RESULT_TAGS = (LM_LOSS, f"{LM_LOSS} validation")


def build_writers(
    config: LogConfig,
    directory: Path,
    rank: int,
    *,
    config_values: Mapping[str, Any] | None = None,
    on_gpu: bool = True,
    resumed_iteration: int = 0,
    console: bool = True,
) -> list[MetricWriter]:
    """Opens all writers of this rank: rank 0 reports for the run, the others have none.

    `config_values` is the resolved configuration, the hyper-parameters of TensorBoard and W&B. Without a GPU the log line has no
    throughput of one. A run that resumes shows the curves up to its iteration from the start. A run of Python code has no `console`.
    """
    if rank != 0:
        return []
    writers: list[MetricWriter] = [JsonlWriter(directory / METRICS_FILE)]
    if config.tensorboard_dir is not None:
        writers.append(TensorBoardWriter(config.tensorboard_dir, config_values=config_values))
    if config.wandb_project is not None:
        writers.append(
            WandbWriter(
                config.wandb_project,
                name=config.wandb_exp_name,
                entity=config.wandb_entity,
                directory=directory if config.wandb_save_dir is None else Path(config.wandb_save_dir),
                config_values=config_values,
            )
        )
    if not console:
        return writers
    # Last: a live view takes over the terminal, and errors of the other writers should still be readable there.
    writers.append(
        build_console_writer(
            config.live,
            throughput=config.log_throughput and on_gpu,
            read_history=partial(read_history, directory / METRICS_FILE, up_to_iteration=resumed_iteration),
        )
    )
    return writers


class JsonlWriter:
    """Writes one JSON object per line; numbers JSON cannot represent become the strings "nan", "inf" and "-inf"."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = reopen_file(path, os.O_APPEND)
        except OSError as error:
            raise TrainError(
                f"Cannot write {path}: {error.strerror}. Metrics are always kept; remove it if it is a link, or choose a writable "
                "--log-dir."
            ) from error
        self._end_torn_line()

    def _end_torn_line(self) -> None:
        # After a power cut the last line may be incomplete; the next record must not be appended to it.
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")

    def write(self, record: MetricRecord) -> None:
        line = json.dumps(_json_safe({"schema": SCHEMA_VERSION, **record}), allow_nan=False) + "\n"
        try:
            os.write(self._file, line.encode())
        except OSError as error:
            raise TrainError(f"Cannot write metrics: {error.strerror}. Make room in the --log-dir folder.") from error

    def close(self) -> None:
        if self._file >= 0:
            os.fsync(self._file)
            os.close(self._file)
            self._file = -1


def _json_safe(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_safe(item) for item in value]
    return value


def tagged_scalars(record: MetricRecord) -> dict[str, float]:
    """Returns the scalars of a record under Megatron's tags; unknown values are omitted."""
    if record["kind"] == "train":
        scalars = {tag: record.get(name) for name, tag in _TRAIN_TAGS.items()}
        scalars["iteration-time"] = record["elapsed_ms_per_iteration"] / 1000  # seconds, as in Megatron
        for layer, health in (record.get("router_health") or {}).items():
            scalars |= {f"moe/layer_{layer}/{name}": value for name, value in health.items()}
        scalars |= loss_values(record.get("lm_loss"), record.get("named_losses"))
        scalars |= record.get("objective_metrics") or {}
        return {tag: float(value) for tag, value in scalars.items() if value is not None}
    if record["kind"] == "valid":
        split, named = "test" if record["split"] == "test" else "validation", record.get("named_losses")
        split += f"/{record['dataset']}" if record.get("dataset") else ""
        values = loss_values(record["lm_loss"], named) | (record.get("objective_metrics") or {})
        values |= {f"loss with {title}": loss for title, loss in record.get("loss_by_weights", {}).items()}
        tagged = {f"{name} {split}": float(value) for name, value in values.items() if value is not None}
        return tagged if named else tagged | {f"{LM_LOSS} {split} ppl": float(record["lm_loss_ppl"])}
    if record["kind"] == "event":
        return dict(record.get("scalars", {}))
    if record["kind"] == "eval":
        return {f"eval/{record['task']}/{name}": float(metric["value"]) for name, metric in record["metrics"].items()}
    return {}


class TensorBoardWriter:
    """Scalars by iteration; events, text samples and the summary as text; hyper-parameters with the final losses."""

    def __init__(self, directory: str, *, config_values: Mapping[str, Any] | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing_library("--tensorboard-dir", directory, "tensorboard") from error
        self._writer = SummaryWriter(log_dir=directory)
        if config_values:
            self._write_hyper_parameters(config_values)

    def _write_hyper_parameters(self, values: Mapping[str, Any]) -> None:
        """Writes them into this run; `add_hparams` would make another one in a folder of its own."""
        from torch.utils.tensorboard import summary

        plain = {name: value if type(value) in (bool, int, float) else str(value) for name, value in values.items()}
        for part in summary.hparams(plain, dict.fromkeys(_RESULT_TAGS, 0.0)):
            self._writer._get_file_writer().add_summary(part)

    def write(self, record: MetricRecord) -> None:
        iteration = record["iteration"]
        for tag, value in tagged_scalars(record).items():
            self._writer.add_scalar(tag, value, iteration)
        if record["kind"] == "sample":
            for number, sample in enumerate(record["samples"], start=1):
                text = _indented(f"{sample['prompt']}\n=> {sample['text']}")
                self._writer.add_text(f"sample/{number}", text, iteration)
        elif record["kind"] == "event":
            self._writer.add_text("event", str(record["message"]), iteration)
        elif record["kind"] == "summary":
            self._writer.add_text("summary", _indented(format_record(record)), iteration)

    def close(self) -> None:
        self._writer.close()


def _indented(text: str) -> str:
    """Returns text that Markdown shows as it is."""
    return "".join(f"    {line}\n" for line in text.split("\n"))


class WandbWriter:
    """A W&B run: steps are iterations, hyper-parameters its config, the closing summary its summary."""

    def __init__(
        self,
        project: str,
        *,
        name: str | None,
        directory: Path,
        entity: str | None = None,
        config_values: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing_library("--wandb-project", project, "wandb") from error
        self._wandb = wandb
        values = dict(config_values or {})
        with raw_output():
            self._run = wandb.init(project=project, entity=entity, name=name, dir=str(directory), config=values)

    def write(self, record: MetricRecord) -> None:
        values: dict[str, Any] = dict(tagged_scalars(record))
        if record["kind"] == "sample":
            rows = [[record["iteration"], sample["prompt"], sample["text"]] for sample in record["samples"]]
            values["samples"] = self._wandb.Table(columns=["iteration", "prompt", "text"], data=rows)
        elif record["kind"] == "summary":
            left_out = ("kind", "time", "next_commands")
            known = {key: value for key, value in record.items() if key not in left_out and value is not None}
            self._run.summary.update({f"run/{key}": value for key, value in known.items()})
        if values:
            self._run.log(values, step=record["iteration"])

    def close(self) -> None:
        with raw_output():
            self._run.finish()


def _missing_library(flag: str, value: str, library: str) -> ConfigError:
    rule = f"needs {library}, which is not installed"
    return ConfigError([Problem(flag, value, rule, "Install it: pip install 'petatron[log]'.")])
