"""A run folder with chosen records, to be varied by each test."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from petatron.config.saved_config import saved_yaml
from petatron.train.report.log_records import event_record, validation_record
from petatron.train.report.metric_writers import JsonlWriter
from petatron.validate import load_config
from tests.unit.train.report.records import log_record

START_S = 1_787_000_000.0


def train(iteration: int, loss: float | None = None, *, train_iters: int = 100, **changes: Any) -> dict[str, Any]:
    """A log point; ten seconds per step, a thousand tokens per step."""
    values = {
        "iteration": iteration,
        "train_iters": train_iters,
        "lm_loss": 2 + 5 / iteration if loss is None else loss,
        "time": START_S + 10.0 * iteration,
        "elapsed_ms_per_iteration": 10_000.0,
        "consumed_tokens": 1000 * iteration,
    }
    return log_record(**(values | changes)).as_record()


def valid(iteration: int, loss: float, *, split: Any = "valid") -> dict[str, Any]:
    return validation_record(iteration=iteration, lm_loss=loss, consumed_samples=8 * iteration, split=split)


def event(message: str, iteration: int, **facts: Any) -> dict[str, Any]:
    return event_record(message, iteration=iteration, **facts)


def finished_run(train_iters: int = 100, step: int = 5) -> list[dict[str, Any]]:
    """A run from start to end: curves, evaluations, a start record and a saved checkpoint."""
    facts = {
        "environment": {"petatron": "0.1.0", "torch": "2.13.0"},
        "origins": {"optim.lr": "--lr", "model.num_layers": "preset tiny-llama"},
    }
    records = [event("19,824 parameters on one device (1 rank), cpu", 0, **facts), train(1, train_iters=train_iters)]
    for iteration in range(step, train_iters + 1, step):
        records.append(train(iteration, train_iters=train_iters, grad_norm=1 + math.sin(iteration)))
        if iteration % (4 * step) == 0:
            records.append(valid(iteration, 2.5 + 5 / iteration))
    return [*records, event(f"saved checkpoint of iteration {train_iters} to there", train_iters)]


def write_run(folder: Path, records: Iterable[Mapping[str, Any]], *flags: str, raw: bytes = b"") -> Path:
    """Writes records as a run does, then `raw` bytes, and the settings that flags give."""
    writer = JsonlWriter(folder / "metrics.jsonl")
    for record in records:
        writer.write(record)
    writer.close()
    if raw:
        with (folder / "metrics.jsonl").open("ab") as file:
            file.write(raw)
    (folder / "config.yaml").write_text(_config(flags))
    return folder


@functools.cache
def _config(flags: tuple[str, ...]) -> str:
    given = ["--mock-data", "--lr", "1e-3", "--train-iters", "100", *flags]
    return saved_yaml(load_config(given, preset="tiny-llama"))


def lines(records: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)
