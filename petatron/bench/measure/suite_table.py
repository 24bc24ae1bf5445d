"""The table of `petatron bench suite`: rows from the JSON of `bench train`, as Markdown, and back.

docs/benchmarks.md has the same table between two comments, of which the first names the device that was measured. What is written there is
parsed and formatted again without a change, so `update_table` can put new rows among those of a file. It refuses rows of another
device: a table has one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from petatron.base.errors import DataError
from petatron.bench.peers import OURS

BEGIN, END = "<!-- bench suite: begin -->", "<!-- bench suite: end -->"
_BEGIN = re.compile(r"^<!-- bench suite: begin(?:, on (?P<device>[^\n]*?))? -->$", re.MULTILINE)
_OTHER_CHARACTERS = re.compile(r"[^\w .,()@/+-]|-(?=-)")
HEADER = ("", "Petatron", "peer", "speed", "memory", "device idle", "max loss difference")
_UNKNOWN, _NO_MEMORY = "–", "out of memory"
_OURS = re.compile(r"(?P<speed>[\d,]+) tok/s(?: \((?P<mfu>[\d.]+) % MFU\))?(?:, (?P<memory>[\d.]+) GB)?")
_PEER_NAME = re.compile(r"(?P<name>[^: ]+)(?: (?P<version>[^:]+))?")
_PEER = re.compile(r"[^:]+: (?P<speed>[\d,]+) tok/s(?:, (?P<memory>[\d.]+) GB)?")


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
    peer_version: str | None = None

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
            name = self.peer if self.peer_version is None else f"{self.peer} {self.peer_version}"
            peer = f"{name}: {_speed_text(self.peer_tokens_per_s, None, self.peer_memory_gb)}"
        ratios = (_ratio(self.speed_ratio), _ratio(self.memory_ratio))
        return (self.label, ours, peer, *ratios, _percent(self.idle_share, 0), _percent(self.loss_difference, 3))


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


def row_from_bench(label: str, values: Mapping[str, Any]) -> SuiteRow:
    """Returns the row of a model from the JSON of `petatron bench train`."""
    contenders = dict(values["contenders"])
    ours = contenders.pop(OURS)
    peer, theirs = next(iter(contenders.items()), (None, {}))
    ratio = values["ratio"].get(peer, {})
    breakdown = ours.get("breakdown")
    return SuiteRow(
        label=label,
        tokens_per_s=ours.get("tokens_per_s"),
        mfu=None if values.get("fp8_recipe") else ours.get("mfu_full"),  # the peak it divides by is that of bf16
        memory_gb=_gigabytes(ours.get("peak_bytes")),
        peer=peer,
        peer_tokens_per_s=theirs.get("tokens_per_s"),
        peer_memory_gb=_gigabytes(theirs.get("peak_bytes")),
        speed_ratio=ratio.get("speed"),
        idle_share=breakdown["ms"]["idle"] / breakdown["step_ms"] if breakdown and breakdown["step_ms"] else None,
        loss_difference=ratio.get("largest_loss_difference"),
        peer_version=theirs.get("version"),
    )


def rows_from_json(content: object) -> list[SuiteRow] | None:
    """Returns the rows of a suite.json; None if it is something else."""
    if not isinstance(content, list):
        return None
    rows: list[SuiteRow] = []
    texts, names = {"label", "peer", "peer_version", "failure"}, {field.name for field in fields(SuiteRow)}
    for row in content:
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
    |  | Petatron | peer | speed | memory | device idle | max loss difference |
    |---|---|---|---|---|---|---|
    | a model | 1,234 tok/s | hf: 1,138 tok/s | 1.08x | – | – | – |
    """
    header, *lines = (f"| {' | '.join(cells)} |" for cells in (HEADER, *(row.cells() for row in rows)))
    return "\n".join([header, "|---" * len(HEADER) + "|", *lines])


def parse_table(text: str) -> list[SuiteRow]:
    """Parses a table that `format_table` wrote; raises `DataError` on any other."""
    lines = [line.strip() for line in text.strip().splitlines()]
    if lines[:2] != format_table([]).splitlines():
        fix = "Write it anew with --into FILE --replace."
        raise DataError(f"This is no table of petatron bench suite: its header is another. {fix}")
    return [_parse_row([cell.strip() for cell in line.strip("|").split("|")]) for line in lines[2:]]


def _parse_row(cells: Sequence[str]) -> SuiteRow:
    if len(cells) != len(HEADER):
        raise DataError(f"A row of the table has {len(cells)} cells in place of {len(HEADER)}: {cells[0]}")
    label, ours, peer, speed, _, idle, losses = cells
    our, other = _OURS.fullmatch(ours), _PEER.fullmatch(peer)
    name = None if peer == _UNKNOWN else _PEER_NAME.match(peer)
    if our is None and ours != _NO_MEMORY:
        return SuiteRow(label=label, failure=ours)
    mfu = _number(our["mfu"]) if our else None
    return SuiteRow(
        label=label,
        tokens_per_s=_number(our["speed"]) if our else None,
        mfu=None if mfu is None else mfu / 100,
        memory_gb=_number(our["memory"]) if our else None,
        peer=name["name"] if name else None,
        peer_tokens_per_s=_number(other["speed"]) if other else None,
        peer_memory_gb=_number(other["memory"]) if other else None,
        speed_ratio=_number(speed.removesuffix("x")),
        idle_share=_share(idle),
        loss_difference=_share(losses),
        peer_version=name["version"] if name else None,
    )


def _number(text: str | None) -> float | None:
    return None if text is None or text == _UNKNOWN else float(text.replace(",", ""))


def _share(text: str) -> float | None:
    value = _number(text.removesuffix(" %"))
    return None if value is None else value / 100


@dataclass(frozen=True, slots=True)
class TablePlace:
    """Where a text has a table: its two comments included. device: which the first one names."""

    begin: int
    end: int
    device: str | None
    content: str


def find_table(text: str, *, source: str) -> TablePlace:
    """Finds the two comments of the table in a text."""
    begins, ends = [*_BEGIN.finditer(text)], [*re.finditer(f"^{re.escape(END)}$", text, re.MULTILINE)]
    if len(begins) != 1 or len(ends) != 1 or ends[0].start() < begins[0].end():
        raise DataError(f"{source} has no place for the table: put {BEGIN} and {END} there, each on a line of its own.")
    begin, end = begins[0], ends[0]
    return TablePlace(begin.start(), end.end(), begin["device"], text[begin.end() : end.start()].strip())


def measured_device(models: Mapping[str, Any]) -> str | None:
    """Returns the device of all measurements in a suite.json; None where none of them says it."""
    benches = [model.get("bench") for model in models.values() if isinstance(model, dict)]
    devices = [bench.get("device") for bench in benches if isinstance(bench, dict)]
    known = [device["name"] for device in devices if isinstance(device, dict) and isinstance(device.get("name"), str)]
    names = {_comment_text(name) for name in known}
    if len(names) > 1:
        listed = ", ".join(sorted(names))
        raise DataError(
            f"These rows are of several devices, and a table is of one: {listed}. Give --table files of one device."
        )
    return next(iter(names), None)


def _comment_text(name: str) -> str:
    """Returns a name without what would end the comment that has it."""
    return _OTHER_CHARACTERS.sub("", name).strip()


def merge_rows(before: Sequence[SuiteRow], after: Sequence[SuiteRow]) -> list[SuiteRow]:
    """Puts later rows in the place of those with the same label, and new ones at the end; a failure takes no row's place."""
    merged = {row.label: row for row in before}
    merged |= {row.label: row for row in after if row.label not in merged or row.failure is None}
    return [*merged.values()]


def update_table(text: str, rows: Sequence[SuiteRow], *, device: str | None, replace: bool, source: str) -> str:
    """Returns the text with these rows in its table: among those of the same device, or with `replace` in place of all."""
    place = find_table(text, source=source)
    if device is None:
        rule = "None of these rows says on which device it was measured"
        raise DataError(f"{rule}, so {source} stays as it is. Measure again.")
    name = _comment_text(device)
    if not replace and place.content and place.device != name:
        there = f"a table of {place.device}" if place.device else "a table that names no device"
        raise DataError(
            f"{source} has {there}, and these rows are of {name}: the table stays as it is. Write them into another file, or give "
            "--replace to put them in the place of that table."
        )
    before = [] if replace or not place.content else parse_table(place.content)
    begin = BEGIN.replace(" -->", f", on {name} -->")
    return f"{text[: place.begin]}{begin}\n\n{format_table(merge_rows(before, rows))}\n\n{END}{text[place.end :]}"
