"""Counts the records that make no sample, by kind, and names them: some in the log, and as many as are kept in a list."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from petatron.base.log import get_logger
from petatron.data.image_text.record_error import RecordError
from petatron.data.images.image_error import ImageError

_KEPT = 10_000
_LOGGED = 3


@dataclass(frozen=True, slots=True)
class LeftOutRecord:
    """A record that makes no sample: its number, where it is, and why."""

    number: int
    title: str
    kind: str
    reason: str

    def __str__(self) -> str:
        return f"{self.title}: {self.reason}"


def reason_of(error: ImageError | RecordError) -> str:
    """Returns why, in words that name the image."""
    return f"{error.name} {error.reason}" if isinstance(error, ImageError) else error.reason


class RecordReport:
    """What happened to records since a dataset was opened. Safe from several threads."""

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.Lock()
        self._counts: Counter[str] = Counter()
        self._left_out: dict[tuple[int, str], LeftOutRecord] = {}
        self.num_truncated = 0

    @property
    def counts(self) -> dict[str, int]:
        """How many records were left out for each kind of reason; one that comes again in another epoch counts once."""
        with self._lock:
            return dict(self._counts)

    @property
    def left_out(self) -> list[LeftOutRecord]:
        with self._lock:
            return list(self._left_out.values())

    def add(self, record: LeftOutRecord) -> None:
        """Counts a record, and logs the first few of a kind and then those whose count is a power of ten."""
        with self._lock:
            key = (record.number, record.kind)
            if key in self._left_out:
                return
            self._counts[record.kind] += 1
            count = self._counts[record.kind]
            if len(self._left_out) < _KEPT:
                self._left_out[key] = record
        if count <= _LOGGED or _is_power_of_ten(count):
            get_logger(__name__).warning(
                "%s: %s is left out, and the next record takes its place: %s (%s: %d so far)",
                self._name,
                record.title,
                record.reason,
                record.kind,
                count,
            )

    def count_truncated(self) -> None:
        """Counts a sample whose text was cut, or whose last images were left out."""
        with self._lock:
            self.num_truncated += 1
            count = self.num_truncated
        if _is_power_of_ten(count):
            get_logger(__name__).info(
                "%s: samples of too many tokens or patches, which have been cut: %d so far", self._name, count
            )


def _is_power_of_ten(count: int) -> bool:
    return str(count).strip("0") == "1"


def summary(records: Sequence[LeftOutRecord], *, named: int = 2) -> str:
    """Returns the counts of each kind, with the first of each.

    >>> summary([LeftOutRecord(4, "line 5", "missing", "b.png is missing")])
    '1 missing (line 5: b.png is missing)'
    """
    by_kind: dict[str, list[LeftOutRecord]] = {}
    for record in records:
        by_kind.setdefault(record.kind, []).append(record)
    texts = []
    for kind, of_kind in sorted(by_kind.items(), key=lambda item: -len(item[1])):
        more = "; ..." if len(of_kind) > named else ""
        texts.append(f"{len(of_kind):,} {kind} ({'; '.join(map(str, of_kind[:named]))}{more})")
    return ", ".join(texts)
