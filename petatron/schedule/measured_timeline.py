"""Reads and writes measured timelines: every rank's actions of one step, as JSON that people and scripts can read."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from petatron.base.errors import DataError
from petatron.base.untrusted_files import read_limited_json
from petatron.schedule.actions import Action, ActionKind, TimedAction

_MAX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class MeasuredTimeline:
    """The schedule of a run, and each rank's actions with their start and end, in seconds of one common clock."""

    name: str
    ranks: tuple[tuple[TimedAction, ...], ...]


def write_measured(path: Path | str, schedule_name: str, ranks: Sequence[Sequence[TimedAction]]) -> None:
    """Writes the measured actions of all ranks of one pipeline; raises DataError where the file cannot be written."""
    content = {
        "name": schedule_name,
        "unit": "seconds",
        "ranks": [[timed_action_to_json(timed) for timed in rank] for rank in ranks],
    }
    try:
        Path(path).write_text(json.dumps(content) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(f"Cannot write {path}: {error.strerror}. Choose a file in a writable folder.") from error


def read_measured(path: Path | str) -> MeasuredTimeline:
    """Reads a file of `write_measured`; raises DataError with the reason if it is missing or something else."""
    try:
        content = read_limited_json(Path(path), _MAX_BYTES)
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}. Give the file a run wrote its timeline to.") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}). Give the file a run wrote its timeline to.") from error
    try:
        ranks = tuple(tuple(timed_action_from_json(record) for record in rank) for rank in content["ranks"])
        name = str(content["name"])
    except KeyError as error:
        raise DataError(f"{path} is no measured timeline: {error} is missing. {_EXPECTED}") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise DataError(f"{path} is no measured timeline: {error}. {_EXPECTED}") from error
    if not any(ranks):
        raise DataError(f"{path} has no actions. {_EXPECTED}")
    return MeasuredTimeline(name, ranks)


_EXPECTED = 'It holds {"name", "ranks": [[{"kind", "stage", "micro_batch", "start", "end"}, ...], ...]}.'


def timed_action_to_json(timed: TimedAction) -> dict[str, str | int | float]:
    """Converts a timed action to JSON values."""
    action = timed.action
    return {**action._asdict(), "kind": str(action.kind), "start": timed.start, "end": timed.end}


def timed_action_from_json(record: dict[str, str | int | float]) -> TimedAction:
    """Converts a record to a timed action; raises ValueError if it cannot be one."""
    action = Action(ActionKind(record["kind"]), int(record["stage"]), int(record["micro_batch"]))
    start, end = float(record["start"]), float(record["end"])
    if not (math.isfinite(start) and math.isfinite(end) and start <= end):
        raise ValueError(f"{action} goes from {start} to {end}")
    return TimedAction(action, start, end)
