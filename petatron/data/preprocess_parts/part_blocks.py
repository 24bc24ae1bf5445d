"""Reads the blocks of parts, one part after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from petatron.data.inputs.input_slice import InputSlice, ReadOptions
from petatron.data.inputs.line_blocks import LineBlock
from petatron.data.preprocess_parts.parts_folder import TokenizingJob


@dataclass(frozen=True, slots=True)
class PartBlock:
    """A block of the slice at a place among those of its part; no block stands for the end of the part."""

    part: int
    slices: tuple[InputSlice, ...]
    place: int
    block: LineBlock | None
    bytes_read: int
    """Bytes of the part that have been read, about."""


def part_blocks(
    job: TokenizingJob, parts: Iterable[int], options: ReadOptions, *, max_documents: int | None = None
) -> Iterator[PartBlock]:
    """Yields the blocks of parts and their ends; of a single part at most `max_documents` lines."""
    for part in parts:
        ranges = job.slices(part)
        files = [item.file for item in ranges]
        slices = tuple(InputSlice(job.files[item.file], options, start=item.start, end=item.end) for item in ranges)
        start, size, left = job.cuts[part].position, job.part_bytes(part), max_documents
        for place, part_slice in enumerate(slices):
            if left == 0:
                break
            before = job.bytes_before[files[place]] - start
            for block in part_slice.blocks(left):
                left = None if left is None else left - block.num_lines - len(block.refused)
                position = min(max(before + block.file_position, 0), size)
                yield PartBlock(part, slices, place, block, position)
        yield PartBlock(part, slices, len(slices), None, size)
