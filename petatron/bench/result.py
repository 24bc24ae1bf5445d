"""What a bench returns: a table for people and the same as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BenchResult:
    """`rows` is what a person reads (what, value); `values` is the same and more as JSON."""

    rows: tuple[tuple[str, str], ...]
    values: Mapping[str, object]
