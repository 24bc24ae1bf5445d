"""The report of a rank that failed, for its launcher.

When a rank fails it writes its error to the file named by TORCHELASTIC_ERROR_FILE, in torch elastic's format, and prints nothing
itself: its launcher (torchrun, or `mesh/launch/local_launcher.py`) shows one report instead of N interleaved tracebacks. Its peers
then fail too, because their connections break. Such echoes are marked and dated two seconds later, since torchrun compares whole
seconds and would otherwise pick any of them as the first cause.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path

from petatron.base.safe_files import write_atomic

ECHO_DELAY_S = 2


def write_error_file(
    path: str, *, message: str, text: str, echo: bool, report: Mapping[str, object] | None = None
) -> bool:
    """Writes a report for the launcher in torch elastic's format, atomically; `report` is of `mesh/diagnose/failure_report.py`."""
    now = time.time()
    details = {
        "py_callstack": text,
        "timestamp": str(int(now) + (ECHO_DELAY_S if echo else 0)),
        "time": now,
        "echo": echo,
        "communication": report,
    }
    try:
        write_atomic(Path(path), json.dumps({"message": {"message": message, "extraInfo": details}}))
    except OSError:
        return False
    return True


def is_echo(error: BaseException) -> bool:
    """Whether a communication call broke, which nearly always means that another rank failed first."""
    if getattr(error, "echo", False):
        return True
    if error.__cause__ is not None and is_echo(error.__cause__):
        return True
    if any(kind.__name__ == "DistError" for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and re.search(r"/gloo/|by peer|Broken pipe", str(error)) is not None
