"""Plans which parts of weights are sent from which rank to which, in rounds of bounded size.

A writer's entries, one after another, are split into rounds of at most `round_bytes`: between rows of a logical tensor, or inside
a row that is larger than a round. The split follows from the files alone, so a sender knows the rounds of every writer without
communication and needs only its own boxes; a writer needs the boxes that overlap its files. Within a round the bytes between two
ranks are ordered by segment, then by the sender's boxes, which both ends know.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from petatron.checkpoint.save.assign_files_to_ranks import FilePlan
from petatron.models.hf.folder_entries import EntryRegion, FolderEntry
from petatron.sharding.boxes import Box, BoxIndex, overlap
from petatron.sharding.flat_shard import range_boxes

ROUND_BYTES = 256 << 20
_ALIGNMENT_BYTES = 8


@dataclass(frozen=True, slots=True)
class PrimaryBox:
    """A box that a rank is primary for; `chunk_index` is its index among that rank's chunks."""

    rank: int
    chunk_index: int
    box: Box


EntrySegment = tuple[int, FolderEntry, EntryRegion, Box]
"""A part of an entry that its writer receives in one round: index of the round, entry, region, box of the region's logical tensor."""


@dataclass(frozen=True, slots=True)
class WeightTransfer:
    """A part of a segment that one rank holds. `peer` is the other rank, `chunk_index` the index of the sender's chunk."""

    round_index: int
    peer: int
    chunk_index: int
    entry: FolderEntry
    region: EntryRegion
    box: Box
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Rounded up to whole words, so that packed transfers are aligned."""
        size = self.box.volume * self.dtype.itemsize
        return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class TransferRound:
    """A rank's part of a round, in packing order."""

    sends: tuple[WeightTransfer, ...]
    receives: tuple[WeightTransfer, ...]


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """One rank's part in gathering the entries.

    local_copies: parts of its files that it holds itself. aliases: entries that are one of its own boxes, with that chunk's index.
    """

    rounds: tuple[TransferRound, ...]
    local_copies: tuple[WeightTransfer, ...]
    aliases: Mapping[str, WeightTransfer]

    def with_rounds(self, num_rounds: int) -> TransferPlan:
        """Pads the plan with empty rounds."""
        return replace(self, rounds=(*self.rounds, *[TransferRound((), ())] * (num_rounds - len(self.rounds))))

    @property
    def max_send_bytes(self) -> int:
        """The most bytes sent in a round."""
        return max((sum(transfer.num_bytes for transfer in moves.sends) for moves in self.rounds), default=0)

    @property
    def max_recv_bytes(self) -> int:
        """The most bytes received in a round."""
        return max((sum(transfer.num_bytes for transfer in moves.receives) for moves in self.rounds), default=0)


def split_into_rounds(
    files: Iterable[FilePlan], dtypes: Mapping[str, torch.dtype], round_bytes: int = ROUND_BYTES
) -> Iterator[EntrySegment]:
    """Splits the files of one writer into rounds of at most `round_bytes`."""
    number, room = 0, round_bytes
    for entry in (entry for file in files for entry in file.entries):
        for region in entry.regions:
            itemsize = dtypes[region.name].itemsize
            row, total = math.prod(region.shape[1:]), math.prod(region.shape)
            at = 0
            while at < total:
                if room < min(min(row, total - at) * itemsize, round_bytes):
                    number, room = number + 1, round_bytes
                num_elements = min(total - at, max(1, room // itemsize))
                if num_elements < total - at and num_elements > row:
                    num_elements -= (at + num_elements) % row
                for start, shape, _ in range_boxes(region.shape, at, at + num_elements):
                    yield number, entry, region, Box(tuple(a + b for a, b in zip(region.start, start)), shape)
                at, room = at + num_elements, room - num_elements * itemsize


def plan_transfers(
    rank: int,
    files: Sequence[FilePlan],
    dtypes: Mapping[str, torch.dtype],
    local_boxes: Mapping[str, Sequence[PrimaryBox]],
    needed_boxes: Mapping[str, Sequence[PrimaryBox]],
    round_bytes: int = ROUND_BYTES,
) -> TransferPlan:
    """Plans a rank's sends, receives and local copies: `local_boxes` are its own by tensor, `needed_boxes` all that overlap its files."""
    writing = [file for file in files if file.rank == rank]
    aliases = _aliases(rank, writing, dtypes, needed_boxes)
    kept: list[WeightTransfer] = []
    receiving: list[WeightTransfer] = []
    for transfer in _overlapping_transfers(split_into_rounds(writing, dtypes, round_bytes), dtypes, needed_boxes):
        if transfer.peer != rank:
            receiving.append(transfer)
        elif transfer.entry.name not in aliases:
            kept.append(transfer)
    sending: list[WeightTransfer] = []
    for writer, theirs in _files_by_writer(rank, files, local_boxes).items():
        segments = split_into_rounds(theirs, dtypes, round_bytes)
        met = (segment for segment in segments if segment[2].name in local_boxes)
        sending += [replace(transfer, peer=writer) for transfer in _overlapping_transfers(met, dtypes, local_boxes)]
    count = 1 + max((transfer.round_index for transfer in (*sending, *receiving)), default=-1)
    out, into = _by_round(sending, count), _by_round(receiving, count)
    return TransferPlan(tuple(map(TransferRound, out, into)), tuple(kept), aliases)


def _files_by_writer(
    rank: int, files: Sequence[FilePlan], local_boxes: Mapping[str, Sequence[PrimaryBox]]
) -> dict[int, list[FilePlan]]:
    """Returns the other ranks that write a tensor of which this rank has boxes, with all their files."""
    writers = {
        file.rank
        for file in files
        if file.rank != rank and any(region.name in local_boxes for entry in file.entries for region in entry.regions)
    }
    return {writer: [file for file in files if file.rank == writer] for writer in sorted(writers)}


def _overlapping_transfers(
    segments: Iterable[EntrySegment],
    dtypes: Mapping[str, torch.dtype],
    boxes_by_name: Mapping[str, Sequence[PrimaryBox]],
) -> Iterator[WeightTransfer]:
    """Yields the intersections of segments and boxes, in the order of both; `peer` is the rank that holds the box."""
    indexes: dict[str, BoxIndex] = {}
    for round_index, entry, region, box in segments:
        boxes = boxes_by_name.get(region.name, ())
        if region.name not in indexes:
            indexes[region.name] = BoxIndex([primary.box for primary in boxes])
        for number, common in indexes[region.name].overlaps(box):
            rank, chunk_index = boxes[number].rank, boxes[number].chunk_index
            yield WeightTransfer(round_index, rank, chunk_index, entry, region, common, dtypes[region.name])


def _by_round(transfers: Iterable[WeightTransfer], num_rounds: int) -> list[tuple[WeightTransfer, ...]]:
    rounds: list[list[WeightTransfer]] = [[] for _ in range(num_rounds)]
    for transfer in transfers:
        rounds[transfer.round_index].append(transfer)
    return [tuple(sorted(of_round, key=lambda transfer: transfer.peer)) for of_round in rounds]


def _aliases(
    rank: int,
    files: Iterable[FilePlan],
    dtypes: Mapping[str, torch.dtype],
    boxes_by_name: Mapping[str, Sequence[PrimaryBox]],
) -> dict[str, WeightTransfer]:
    """Finds entries of one region inside one box of this rank, which are written from its own memory."""
    aliases = {}
    for entry in (entry for file in files for entry in file.entries):
        region = entry.regions[0]
        box = Box(region.start, region.shape)
        if len(entry.regions) > 1 or region.shape_in_entry != entry.shape:
            continue
        for source in boxes_by_name.get(region.name, ()):
            if source.rank == rank and overlap(box, source.box) == box:
                aliases[entry.name] = WeightTransfer(
                    0, rank, source.chunk_index, entry, region, box, dtypes[region.name]
                )
    return aliases
