"""The result of a bench: a table and the same as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BenchResult:
    """`rows` is the printed table (label, value); `values` is the same and more as JSON."""

    rows: tuple[tuple[str, str], ...]
    values: Mapping[str, object]
