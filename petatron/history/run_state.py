"""Tells from a run's files whether it is running, finished, stopped or failed."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Literal

import numpy as np

from petatron.base.terminal_escape import printable
from petatron.history.metrics_file import RunMetrics

RunState = Literal["running", "finished", "stopped", "failed", "empty"]
LOCK_FILE = ".lock"
_LOCKS = Path("/proc/locks")
_COMPLETE = "complete"
_MAX_REASON_CHARS = 300
_STOPPED = "stopping at iteration"
_QUIET_S = 120.0
"""A run that has been silent for this long, and for several log intervals, is no longer running."""
_QUIET_INTERVALS = 4


def run_state(metrics: RunMetrics, *, locked: bool, now_s: float) -> tuple[RunState, str]:
    """Returns the state and the reason for it.

    A run that fails cannot be trusted to record it, so failed means: it neither came to its end nor was stopped, and is silent.
    """
    if locked:
        return "running", "a process holds the lock of its folder"
    if not metrics.columns["iteration"].size and not metrics.events and not metrics.evaluations:
        return "empty", "nothing was recorded"
    outcome = None if metrics.summary is None else metrics.summary.get("outcome")
    if isinstance(outcome, str) and outcome != _COMPLETE:
        return "stopped", printable(outcome, max_chars=_MAX_REASON_CHARS)
    planned = metrics.last("train_iters")
    if planned is not None and metrics.iteration >= planned:
        return "finished", f"all {int(planned):,} iterations were trained"
    stops = [event for event in metrics.events if event.message.startswith(_STOPPED)]
    if stops and stops[-1].iteration >= metrics.iteration:
        return "stopped", printable(stops[-1].message, max_chars=_MAX_REASON_CHARS)
    age_s = now_s - metrics.last_time
    if math.isfinite(age_s) and age_s < _longest_silence_s(metrics):
        return "running", f"its last record is {max(0.0, age_s):.0f} s old"
    return "failed", "its records end without a reason: it was killed, or it failed"


def _longest_silence_s(metrics: RunMetrics) -> float:
    """Evaluation and saving take time too, so several log intervals may pass without a record."""
    iterations, step_ms = metrics.columns["iteration"], metrics.last("elapsed_ms_per_iteration")
    if iterations.size < 2 or step_ms is None:
        return _QUIET_S
    interval = float(np.median(np.diff(iterations[-8:])))
    return max(_QUIET_S, _QUIET_INTERVALS * interval * step_ms / 1000)


def is_locked(folder: Path) -> bool:
    """Whether a process of this machine holds the lock of a run folder.

    The kernel's list is read: taking the lock to see whether it is free would turn away a run that starts at that moment.
    """
    try:
        status = os.stat(folder / LOCK_FILE, follow_symlinks=False)
        rows = [line.split() for line in _LOCKS.read_text().splitlines()]
    except (OSError, ValueError):
        return False
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    return any("FLOCK" in row and "WRITE" in row and device in row for row in rows)
