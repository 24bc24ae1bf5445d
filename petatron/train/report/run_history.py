"""The loss curves that earlier starts of a run have left in `metrics.jsonl`.

A resumed run repeats the iterations that were logged but not saved, so a later record drops the earlier ones of its iteration and
after. Lines that cannot be understood, such as one that a power cut has torn, are passed over.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from petatron.base.untrusted_files import open_regular_file

Curve = Literal["train", "valid"]
_MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RunHistory:
    """Points (iteration, loss) by iteration; test losses are none of them."""

    train: list[tuple[int, float]] = field(default_factory=list)
    valid: list[tuple[int, float]] = field(default_factory=list)


def read_history(path: Path, *, up_to_iteration: int, curves: Collection[Curve] = ("train", "valid")) -> RunHistory:
    """Reads the curves up to an iteration; they are empty if there is no such file, or none that can be read.

    >>> read_history(Path("/none/metrics.jsonl"), up_to_iteration=5)
    RunHistory(train=[], valid=[])
    """
    history = RunHistory()
    try:
        for record in _records(path, curves):
            points = history.train if record["kind"] == "train" else history.valid
            iteration, loss = record["iteration"], float(record["lm_loss"])
            while points and points[-1][0] >= iteration:
                points.pop()
            if iteration <= up_to_iteration and math.isfinite(loss):
                points.append((iteration, loss))
    except OSError:
        return RunHistory()
    return history


def _records(path: Path, curves: Collection[Curve]) -> Iterator[dict[str, Any]]:
    marks = [f'"kind": "{curve}"'.encode() for curve in curves]
    with open_regular_file(path) as file:
        while line := file.readline(_MAX_LINE_BYTES):
            if not any(mark in line for mark in marks):
                continue
            try:
                record = json.loads(line)
                sound = type(record["iteration"]) is int and record["kind"] in curves
                float(record["lm_loss"])
            except (ValueError, TypeError, KeyError, RecursionError):
                continue
            if sound and record.get("split", "valid") == "valid":
                yield record
