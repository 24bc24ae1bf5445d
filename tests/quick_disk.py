"""Files of tests need not outlive a power cut, and waiting for the disk takes longer than many tests compute.

Tests of crashes (`tests/crash`) flush as users' runs do.
"""

from __future__ import annotations

import os

_FLUSHES = {name: getattr(os, name) for name in ("fsync", "fdatasync") if hasattr(os, name)}


def skip_flushes() -> None:
    """Whoever flushes a file that is not open still gets its error."""
    for name in _FLUSHES:
        setattr(os, name, _check_descriptor)


def flush_again() -> None:
    for name, flush in _FLUSHES.items():
        setattr(os, name, flush)


def _check_descriptor(descriptor: int) -> None:
    os.fstat(descriptor)
