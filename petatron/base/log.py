"""Logging: one stdlib logger tree named `petatron`, quiet on every rank but rank 0.

Library code uses `get_logger(__name__)` and never prints; the command line calls `configure_logging` once.
"""

from __future__ import annotations

import logging
import sys

from petatron.base.terminal_escape import printable_lines


def get_logger(name: str) -> logging.Logger:
    return logging.getLogger(name if name.startswith("petatron") else f"petatron.{name}")


class EscapedFormatter(logging.Formatter):
    """Escapes control characters in foreign text, also in a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))


def configure_logging(*, rank: int = 0) -> None:
    """Logs info and above of rank 0 to stderr, and errors of the other ranks with their rank."""
    root = logging.getLogger("petatron")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(EscapedFormatter("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s"))
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(logging.INFO if rank == 0 else logging.ERROR)
