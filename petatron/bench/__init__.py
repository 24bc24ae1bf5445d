"""One module per bench of `petatron bench`, and what they share: timing, the machine, peers, reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The result of a bench: `rows` is the printed table (label, value); `values` is the same and more as JSON."""

    rows: tuple[tuple[str, str], ...]
    values: Mapping[str, object]
