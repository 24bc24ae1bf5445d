"""Cuts inputs into parts of about equal size, each of which can be tokenized by itself.

A part begins at a cut: a file and an offset in it, in bytes, or in row groups of a parquet file. It ends where the next part begins, so
it is a slice of one large file, or many small ones. Only JSON lines and paragraphs that are not compressed, and parquet, are cut within a
file. Offsets in text are nominal: the slice moves them to where a line, or a paragraph, begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from petatron.data.inputs.arrow_rows import row_groups
from petatron.data.inputs.input_file import InputFile

PART_BYTES = 1 << 28
_CUT_FORMATS = ("jsonl", "text")


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a part begins; `position` is about how many bytes of all inputs come before it."""

    file: int
    offset: int
    position: int


@dataclass(frozen=True, slots=True)
class SliceRange:
    """A slice of a part: a file, and where `InputSlice` begins and ends in it."""

    file: int
    start: int
    end: int | None


def cut_inputs(files: Sequence[InputFile], part_bytes: int) -> tuple[Cut, ...]:
    """Returns where the parts begin, the first at the beginning of the first file."""
    cuts = [Cut(0, 0, 0)]
    size = before = 0
    for number, file in enumerate(files):
        within = list(_cuts_within(file, number, before, part_bytes))
        file_bytes = part_bytes if file.size is None else file.size
        if size and (within or size + file_bytes > part_bytes):
            cuts.append(Cut(number, 0, before))
            size = 0
        cuts += within
        size = part_bytes if within else size + file_bytes
        before += file.size or 0
    return tuple(cuts)


def _cuts_within(file: InputFile, number: int, before: int, part_bytes: int) -> Iterator[Cut]:
    if file.size is None or file.size <= part_bytes or not file.can_seek:
        return
    count = -(-file.size // part_bytes)
    if file.format == "parquet":
        sizes = [group_bytes for _, group_bytes in row_groups(file)]
        for group in _first_groups(sizes, count):
            yield Cut(number, group, before + file.size * sum(sizes[:group]) // max(sum(sizes), 1))
    elif file.format in _CUT_FORMATS and not file.is_compressed():
        for offset in (part * file.size // count for part in range(1, count)):
            yield Cut(number, offset, before + offset)


def _first_groups(sizes: Sequence[int], count: int) -> list[int]:
    """Returns the numbers of row groups that begin another of about `count` parts.

    >>> _first_groups([5, 5, 5, 5], 2), _first_groups([10, 1, 1], 3), _first_groups([4], 3)
    ([2], [1], [])
    """
    total, before, part = sum(sizes), 0, 0
    groups = []
    for number, size in enumerate(sizes):
        if number and before * count // max(total, 1) > part:
            groups.append(number)
            part = before * count // max(total, 1)
        before += size
    return groups


def part_slices(cuts: Sequence[Cut], part: int, num_files: int) -> Iterator[SliceRange]:
    """Yields the slices of a part, in order."""
    first = cuts[part]
    last = cuts[part + 1] if part + 1 < len(cuts) else Cut(num_files, 0, 0)
    for number in range(first.file, min(last.file + 1, num_files)):
        end = last.offset if number == last.file else None
        if end != 0:
            yield SliceRange(number, first.offset if number == first.file else 0, end)
