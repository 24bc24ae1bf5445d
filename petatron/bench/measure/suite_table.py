"""The table of `petatron bench suite`: rows from the JSON of `bench train`, as Markdown, and back.

README.md has the same table between two comments. What is written there is parsed and formatted again without a change, so that a
file and a measurement can be compared, and `replace_table` puts a new one in its place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from petatron.base.errors import DataError
from petatron.bench.peers import OURS

BEGIN, END = "<!-- bench suite: begin -->", "<!-- bench suite: end -->"
HEADER = ("", "Petatron", "peer", "speed", "memory", "device idle", "losses apart")
_UNKNOWN, _NO_MEMORY = "–", "out of memory"
_OURS = re.compile(r"(?P<speed>[\d,]+) tok/s(?: \((?P<mfu>[\d.]+) % MFU\))?(?:, (?P<memory>[\d.]+) GB)?")
_PEER = re.compile(r"(?P<name>[^:]+): (?P<speed>[\d,]+) tok/s(?:, (?P<memory>[\d.]+) GB)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteRow:
    """One model: ours, the peer's, and how they compare. None is what was not measured, or has no meaning there.

    idle_share: the part of a profiled step in which no kernel of ours runs. loss_difference: the largest over ten steps, as a share
    of the first loss. failure: why there are no numbers.
    """

    label: str
    tokens_per_s: float | None = None
    mfu: float | None = None
    memory_gb: float | None = None
    peer: str | None = None
    peer_tokens_per_s: float | None = None
    peer_memory_gb: float | None = None
    speed_ratio: float | None = None
    idle_share: float | None = None
    loss_difference: float | None = None
    failure: str | None = None

    @property
    def memory_ratio(self) -> float | None:
        """Of the numbers that the table shows: parsing it gives the same ratio."""
        if not (self.memory_gb and self.peer_memory_gb):
            return None
        return round(self.memory_gb, 1) / round(self.peer_memory_gb, 1)

    def cells(self) -> tuple[str, ...]:
        """Formats the cells of the row."""
        if self.failure is not None:
            return (self.label, self.failure, *[_UNKNOWN] * (len(HEADER) - 2))
        ours = _speed_text(self.tokens_per_s, self.mfu, self.memory_gb)
        peer = _UNKNOWN
        if self.peer is not None:
            peer = f"{self.peer}: {_speed_text(self.peer_tokens_per_s, None, self.peer_memory_gb)}"
        ratios = [_ratio(self.speed_ratio), _ratio(self.memory_ratio)]
        return (
            self.label,
            ours,
            peer,
            *ratios,
            _percent(self.idle_share, 0),
            _percent(self.loss_difference, 3),
        )


def _speed_text(speed: float | None, mfu: float | None, memory_gb: float | None) -> str:
    if speed is None:
        return _NO_MEMORY
    used = "" if mfu is None else f" ({mfu:.1%} MFU)".replace("%", " %")
    return f"{speed:,.0f} tok/s{used}" + ("" if memory_gb is None else f", {memory_gb:.1f} GB")


def _ratio(value: float | None) -> str:
    """Two decimals: where the device is the limit, a measurement is repeated to about half a percent."""
    return _UNKNOWN if value is None else f"{value:.2f}x"


def _percent(share: float | None, digits: int) -> str:
    return _UNKNOWN if share is None else f"{100 * share:.{digits}f} %"


def row_from_bench(label: str, found: Mapping[str, Any]) -> SuiteRow:
    """Returns the row of a model from the JSON of `petatron bench train`."""
    contenders = dict(found["contenders"])
    ours = contenders.pop(OURS)
    peer, theirs = next(iter(contenders.items()), (None, {}))
    ratio = found["ratio"].get(peer, {})
    breakdown = ours.get("breakdown")
    return SuiteRow(
        label=label,
        tokens_per_s=ours.get("tokens_per_s"),
        mfu=None if found.get("fp8_recipe") else ours.get("mfu_full"),  # the peak it divides by is that of bf16
        memory_gb=_gigabytes(ours.get("peak_bytes")),
        peer=peer,
        peer_tokens_per_s=theirs.get("tokens_per_s"),
        peer_memory_gb=_gigabytes(theirs.get("peak_bytes")),
        speed_ratio=ratio.get("speed"),
        idle_share=breakdown["ms"]["idle"] / breakdown["step_ms"] if breakdown and breakdown["step_ms"] else None,
        loss_difference=ratio.get("largest_loss_difference"),
    )


def rows_from_json(found: object) -> list[SuiteRow] | None:
    """Returns the rows of a suite.json; None if it is something else."""
    if not isinstance(found, list):
        return None
    rows: list[SuiteRow] = []
    texts, names = {"label", "peer", "failure"}, {field.name for field in fields(SuiteRow)}
    for row in found:
        if not isinstance(row, dict) or not names.issuperset(row) or not isinstance(row.get("label"), str):
            return None
        for name, value in row.items():
            kinds = (str,) if name in texts else (int, float)
            if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
                return None
        rows.append(SuiteRow(**row))
    return rows


def _gigabytes(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / 1e9


def format_table(rows: Sequence[SuiteRow]) -> str:
    """Formats rows as a Markdown table.

    >>> print(format_table([SuiteRow(label="a model", tokens_per_s=1234.5, speed_ratio=1.0849, peer="hf", peer_tokens_per_s=1138.0)]))
    |  | Petatron | peer | speed | memory | device idle | losses apart |
    |---|---|---|---|---|---|---|
    | a model | 1,234 tok/s | hf: 1,138 tok/s | 1.08x | – | – | – |
    """
    lines = [HEADER, ("---",) * len(HEADER), *(row.cells() for row in rows)]
    separators = [" | ", "|", *[" | "] * len(rows)]
    ends = [("| ", " |"), ("|", "|"), *[("| ", " |")] * len(rows)]
    return "\n".join(
        first + separator.join(cells) + last for cells, separator, (first, last) in zip(lines, separators, ends)
    )


def parse_table(text: str) -> list[SuiteRow]:
    """Parses a table that `format_table` wrote; raises `DataError` on any other."""
    lines = [line.strip() for line in text.strip().splitlines()]
    if lines[:2] != format_table([]).splitlines():
        raise DataError("This is no table of petatron bench suite: its header is another. Write it anew with --into.")
    return [_parse_row([cell.strip() for cell in line.strip("|").split("|")]) for line in lines[2:]]


def _parse_row(cells: Sequence[str]) -> SuiteRow:
    if len(cells) != len(HEADER):
        raise DataError(f"A row of the table has {len(cells)} cells in place of {len(HEADER)}: {cells[0]}")
    label, ours, peer, speed, _, idle, losses = cells
    own, other = _OURS.fullmatch(ours), _PEER.fullmatch(peer)
    if own is None and ours != _NO_MEMORY:
        return SuiteRow(label=label, failure=ours)
    mfu = _number(own["mfu"]) if own else None
    return SuiteRow(
        label=label,
        tokens_per_s=_number(own["speed"]) if own else None,
        mfu=None if mfu is None else mfu / 100,
        memory_gb=_number(own["memory"]) if own else None,
        peer=other["name"] if other else None if peer == _UNKNOWN else peer.partition(":")[0],
        peer_tokens_per_s=_number(other["speed"]) if other else None,
        peer_memory_gb=_number(other["memory"]) if other else None,
        speed_ratio=_number(speed.removesuffix("x")),
        idle_share=_share(idle),
        loss_difference=_share(losses),
    )


def _number(text: str | None) -> float | None:
    return None if text is None or text == _UNKNOWN else float(text.replace(",", ""))


def _share(text: str) -> float | None:
    value = _number(text.removesuffix(" %"))
    return None if value is None else value / 100


def find_table(text: str, *, source: str) -> tuple[int, int]:
    """Returns where the table between the two comments begins and ends in a text."""
    begin, end = text.find(BEGIN), text.find(END)
    if begin < 0 or end < begin or text.count(BEGIN) > 1 or text.count(END) > 1:
        raise DataError(f"{source} has no place for the table: put {BEGIN} and {END} there, each on a line of its own.")
    return begin + len(BEGIN), end


def replace_table(text: str, rows: Sequence[SuiteRow], *, source: str) -> str:
    """Returns the text with these rows in place of the table between the two comments."""
    begin, end = find_table(text, source=source)
    return f"{text[:begin]}\n\n{format_table(rows)}\n\n{text[end:]}"
