"""Fills this run's chunks from another run's boxes: first a plan that can raise, then the reads.

Files are read in blocks of 8 MiB, each once and checked against its digest; elements are copied from the block to their targets.
So a load needs memory for a few blocks, however large the tensors are, and reads only the blocks it needs. A block contains
consecutive elements of an entry, which are a handful of boxes (`sharding/flat_shard.py`).

Each thread reads a part of the file from its beginning to its end, through a descriptor of its own: the system reads ahead of every
descriptor that is read in order, in large pages. Threads that share one look to it like random access, which takes twice the CPU
time, and so do pages that are asked for in advance (`posix_fadvise`). Where other processes want the CPU, that is most of a load.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from petatron.base import untrusted_files
from petatron.base.errors import CheckpointError
from petatron.checkpoint.files.block_digest import matches_digest
from petatron.checkpoint.files.digested_file_io import BLOCK_BYTES, StoredFile, read_into
from petatron.checkpoint.files.manifest import StoredBox, StoredTensor
from petatron.checkpoint.files.map_box_to_entry import addressed_shape, entry_box, to_entry_layout
from petatron.checkpoint.files.safetensors_file import DTYPE_CODES, DTYPES, TensorInfo, read_header
from petatron.checkpoint.files.step_folder import check_size, damaged_error, digest_mismatch_error
from petatron.checkpoint.load.dequantize import PACKED_DTYPE, PackedRead, apply_scale, read_scale, unpacked_shape
from petatron.checkpoint.tensor_chunk import Chunk
from petatron.sharding.boxes import Box, overlap
from petatron.sharding.flat_shard import range_boxes

_FLOAT_CODES = {code for dtype, code in DTYPE_CODES.items() if dtype.is_floating_point}
_MAX_SHOWN = 5
_THREADS = 4
_MAX_IOVECS = 500  # systems take about a thousand in one call


@dataclass(frozen=True, slots=True, eq=False)
class BoxRead:
    """Copies the intersection of a stored box and a chunk."""

    chunk: Chunk
    stored: StoredBox
    box: Box


@dataclass(frozen=True, slots=True, eq=False)
class ReadPlan:
    """A rank's reads, and the keys that a non-strict load leaves unfilled."""

    reads: tuple[BoxRead, ...]
    missing_keys: tuple[str, ...]


LookupResult = tuple[str, StoredTensor | None]
"""The key of the tensor that fills a chunk, and that tensor with the boxes that overlap the chunk; None if it is not there."""


def plan_reads(
    source: Path,
    chunks: Sequence[Chunk],
    lookups: Sequence[LookupResult],
    *,
    strict: bool,
    unexpected_keys: Sequence[str] = (),
    may_lack_key: Callable[[str], bool] | None = None,
) -> ReadPlan:
    """Plans every read of this rank from what the checkpoint has for each chunk.

    A strict load requires the same keys on both sides, but for those of `may_lack_key`; `unexpected_keys` are those of the checkpoint that
    no rank requests.
    """
    reads: list[BoxRead] = []
    problems: list[str] = []
    asked = [(chunk, *answer) for chunk, answer in zip(chunks, lookups, strict=True) if chunk.tensor.numel()]
    missing = sorted({key for _, key, stored in asked if stored is None})
    if strict:
        problems += [f"{key} is not in the checkpoint" for key in missing if not (may_lack_key and may_lack_key(key))]
        problems += [f"{key} is in the checkpoint, but not in this run" for key in unexpected_keys]
    for chunk, _, stored in asked:
        if stored is None:
            continue
        ours = chunk.logical_shape, chunk.tensor.dtype
        if stored.shape != ours[0]:
            problems.append(f"{chunk.key} has shape {list(stored.shape)} there and {list(ours[0])} in this run")
        elif _incompatible_dtypes(stored.dtype, ours[1]):
            problems.append(f"{chunk.key} holds {stored.dtype} there and {ours[1]} in this run")
        else:
            common = ((box, overlap(chunk.box, box.box)) for box in stored.boxes)
            reads += [BoxRead(chunk, box, part) for box, part in common if part is not None]
    if problems:
        raise _mismatch_error(source, problems)
    return ReadPlan(tuple(reads), tuple(missing))


def _incompatible_dtypes(stored: str, dtype: torch.dtype) -> bool:
    """Floating point may be converted to another precision; any other dtype must match."""
    code = DTYPE_CODES.get(dtype)
    return stored != code and not (stored in _FLOAT_CODES and code in _FLOAT_CODES)


def _mismatch_error(source: Path, problems: Sequence[str]) -> CheckpointError:
    unique = list(dict.fromkeys(problems))
    lines = [f"  {problem}" for problem in unique[:_MAX_SHOWN]]
    if len(unique) > _MAX_SHOWN:
        lines.append(f"  and {len(unique) - _MAX_SHOWN} more")
    fix = (
        "Use the model and optimizer flags it was saved with (petatron checkpoint inspect shows them); --no-load-optim leaves the "
        "optimizer's state, but all weights must fit."
    )
    return CheckpointError("\n".join([f"{source} does not fit this run:", *lines, fix]))


@dataclass(frozen=True, eq=False)
class _BoxCopy:
    """A box of an entry and its target tensor, both in the entry's layout. What blocks need of it is computed once for all of them."""

    info: TensorInfo
    box: Box
    target: Tensor

    @cached_property
    def byte_range(self) -> tuple[int, int]:
        """Returns the bytes of the file from the first to the last element."""
        first = last = 0
        for size, at, length in zip(self.info.shape, self.box.start, self.box.shape):
            first, last = first * size + at, last * size + at + length - 1
        itemsize = DTYPES[self.info.dtype].itemsize
        return self.info.begin + first * itemsize, self.info.begin + (last + 1) * itemsize

    @cached_property
    def target_bytes(self) -> memoryview | None:
        """Returns the target's bytes if they map one to one to the byte range."""
        target = self.target
        whole_rows = self.box.shape[1:] == self.info.shape[1:]
        alike = target.dtype == DTYPES[self.info.dtype] and target.device.type == "cpu" and target.is_contiguous()
        return memoryview(target.reshape(-1).view(torch.uint8).numpy()) if whole_rows and alike else None


def execute_reads(source: Path, plan: ReadPlan, files: Mapping[str, StoredFile]) -> None:
    """Executes the reads of a plan, block by block, converting dtypes."""
    by_file: dict[str, list[BoxRead]] = {}
    for read in plan.reads:
        by_file.setdefault(read.stored.file, []).append(read)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="checkpoint-read") as pool:
        spare = threading.local()
        for file, reads in by_file.items():
            _read_file(source / file, reads, files.get(file), pool, spare)


def _read_file(
    path: Path,
    reads: Sequence[BoxRead],
    expected: StoredFile | None,
    pool: ThreadPoolExecutor,
    thread_buffers: threading.local,
) -> None:
    slots = read_checked_header(path, expected)
    targets = [_target(path, read, slots) for read in reads]
    # Bytes of four-bit elements are read apart, and dequantized once all are there.
    packed = {
        number: PackedRead.of(read.stored.scale, target.info, target.box, target.target)
        for number, (read, target) in enumerate(zip(reads, targets, strict=True))
        if read.stored.scale is not None and read.stored.scale.mxfp4
    }
    fills = [
        _BoxCopy(packed[number].info, packed[number].box, packed[number].values) if number in packed else target
        for number, target in enumerate(targets)
    ]
    try:
        header_end = min((slot.begin for slot in slots.values()), default=0)
        blocks = list(_read_blocks(fills, expected, header_end))
        failed = threading.Event()
        tasks = [
            pool.submit(_read_in_order, path, part, thread_buffers, failed)
            for part in _contiguous_parts(blocks, _THREADS)
        ]
        wait(tasks)
        for task in tasks:
            task.result()
    except OSError as error:
        raise damaged_error(path, f"cannot be read: {error.strerror or error}") from error
    for number, (read, fill) in enumerate(zip(reads, fills, strict=True)):
        if number in packed:
            packed.pop(number).dequantize(path.parent)
        elif read.stored.scale is not None:
            scale = read_scale(path.parent, read.stored.scale)
            apply_scale(fill.target, fill.box, scale, read.stored.scale.block)


def _target(path: Path, read: BoxRead, infos: Mapping[str, TensorInfo]) -> _BoxCopy:
    """Returns the box of an entry that a read needs, and where it goes; raises if the file has it otherwise."""
    stored, info = read.stored, infos.get(read.stored.entry_name)
    if info is None:
        raise damaged_error(path, f"lacks {stored.entry_name}")
    in_four_bits = stored.scale is not None and stored.scale.mxfp4
    shape = unpacked_shape(info.shape) if in_four_bits else info.shape
    entry_shape = addressed_shape(shape, stored)
    box = entry_box(read.box, stored.box.start, stored)
    if len(box.shape) != len(entry_shape) or any(stop > size for stop, size in zip(box.stop, entry_shape)):
        raise damaged_error(path, f"has {stored.entry_name} in another shape, {list(info.shape)}")
    dtype = read.chunk.tensor.dtype
    if info.dtype != PACKED_DTYPE if in_four_bits else _incompatible_dtypes(info.dtype, dtype):
        raise damaged_error(path, f"has {stored.entry_name} in {info.dtype}, which is not what was saved")
    part = read.chunk.tensor.detach()[read.box.slices_in(read.chunk.box)]
    return _BoxCopy(
        replace(info, shape=entry_shape),
        box,
        to_entry_layout(part, len(entry_shape) - bool(stored.interleaved), stored),
    )


def read_checked_header(path: Path, expected: StoredFile | None) -> dict[str, TensorInfo]:
    """Returns the tensors of a file of a checkpoint."""
    if expected is not None:
        check_size(path, expected)
    with untrusted_files.reading_untrusted(path, damaged_error):
        try:
            return read_header(path, aligned=expected is not None)
        except ValueError as error:
            raise damaged_error(path, f"is damaged: {error}") from error


@dataclass(frozen=True, slots=True, eq=False)
class _ReadBlock:
    """A byte range to read, its digest if there is one, and the copies that use it."""

    begin: int
    end: int
    digest: str | None
    copies: Sequence[_BoxCopy]


def _read_blocks(copies: Sequence[_BoxCopy], expected: StoredFile | None, header_end: int) -> Iterator[_ReadBlock]:
    """Yields the byte ranges to read.

    Files with digests are read on the grid of their blocks, and the header is checked with the data. Others are split so that no
    element spans two ranges.
    """
    if expected is not None:
        wanted: dict[int, list[_BoxCopy]] = {number: [] for number in range(max(1, -(-header_end // BLOCK_BYTES)))}
        for fill in copies:
            begin, end = fill.byte_range
            for number in range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
                wanted.setdefault(number, []).append(fill)
        for number, block_copies in sorted(wanted.items()):
            begin = number * BLOCK_BYTES
            yield _ReadBlock(
                begin, min(begin + BLOCK_BYTES, expected.size_bytes), expected.block_digests[number], block_copies
            )
        return
    for fill in copies:
        begin, end = fill.byte_range
        for at in range(begin, end, BLOCK_BYTES):
            yield _ReadBlock(at, min(at + BLOCK_BYTES, end), None, [fill])


def _contiguous_parts(blocks: Sequence[_ReadBlock], count: int) -> Iterator[Sequence[_ReadBlock]]:
    """Splits blocks into at most `count` parts of consecutive ones, none empty."""
    count = min(count, len(blocks))
    for number in range(count):
        yield blocks[number * len(blocks) // count : (number + 1) * len(blocks) // count]


def _read_in_order(
    path: Path, blocks: Sequence[_ReadBlock], thread_buffers: threading.local, failed: threading.Event
) -> None:
    """Reads blocks one after the other through a descriptor of its own, until this or another thread fails."""
    try:
        with untrusted_files.open_regular_file(path, buffering=0) as file:
            for block in blocks:
                if failed.is_set():
                    return
                _read_block(path, file.fileno(), block, thread_buffers)
    except BaseException:
        failed.set()
        raise


def _read_block(path: Path, descriptor: int, block: _ReadBlock, thread_buffers: threading.local) -> None:
    if not hasattr(thread_buffers, "buffer"):
        thread_buffers.buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8)  # one per thread, for all its blocks
    direct = _direct_buffers(block, memoryview(thread_buffers.buffer.numpy()))
    parts = direct or [memoryview(thread_buffers.buffer.numpy())[: block.end - block.begin]]
    if read_into(descriptor, parts, block.begin) != block.end - block.begin:
        raise damaged_error(path, "ends before all of it was read")
    if block.digest is not None and not matches_digest(parts, block.digest):
        raise digest_mismatch_error(path)
    if direct is None:
        for fill in block.copies:
            _copy_elements(thread_buffers.buffer, block, fill)


def _direct_buffers(block: _ReadBlock, scratch: memoryview) -> list[memoryview] | None:
    """Returns the targets a block can be read into directly, with scratch for unneeded bytes; None if copies are needed."""
    parts: list[memoryview] = []
    at = block.begin
    for fill in sorted(block.copies, key=lambda fill: fill.byte_range):
        memory = fill.target_bytes
        begin, end = fill.byte_range
        low, high = max(begin, block.begin), min(end, block.end)
        if memory is None or low < at or len(parts) > _MAX_IOVECS:
            return None
        if low > at:
            parts.append(scratch[at - block.begin : low - block.begin])
        parts.append(memory[low - begin : high - begin])
        at = high
    if at < block.end:
        parts.append(scratch[at - block.begin : block.end - block.begin])
    return parts


def _copy_elements(buffer: Tensor, block: _ReadBlock, box_copy: _BoxCopy) -> None:
    """Copies the elements of a block that are in a copy's box."""
    dtype, slot = DTYPES[box_copy.info.dtype], box_copy.info
    low, high = max(block.begin, slot.begin), min(block.end, slot.end)
    if low >= high:
        return
    elements = buffer[low - block.begin : high - block.begin].view(dtype)
    first, last = (low - slot.begin) // dtype.itemsize, (high - slot.begin) // dtype.itemsize
    for start, shape, skipped in range_boxes(slot.shape, first, last):
        box = Box(start, shape)
        common = overlap(box, box_copy.box)
        if common is not None:
            part = elements[skipped : skipped + math.prod(shape)].view(shape)
            box_copy.target[common.slices_in(box_copy.box)].copy_(part[common.slices_in(box)])


def read_rank_local(
    source: Path, local: Mapping[str, str], files: Mapping[str, StoredFile], rank: int
) -> dict[str, Tensor]:
    """Reads the tensors that a rank saved for itself; `local` maps entries to files."""
    prefix = f"local/{rank}/"
    tensors: dict[str, Tensor] = {}
    reads: list[BoxRead] = []
    for name, file in local.items():
        if name.startswith(prefix):
            slot = read_checked_header(source / file, files[file]).get(name)
            if slot is None:
                raise damaged_error(source / file, f"lacks {name}")
            tensor = tensors[name.removeprefix(prefix)] = torch.empty(slot.shape, dtype=DTYPES[slot.dtype])
            origin = (0,) * len(slot.shape)
            box = Box(origin, slot.shape)
            reads.append(BoxRead(Chunk(name, slot.shape, origin, tensor), StoredBox(file, name, box, origin), box))
    execute_reads(source, ReadPlan(tuple(reads), ()), files)
    return tensors
