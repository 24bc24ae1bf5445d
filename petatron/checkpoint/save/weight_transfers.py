"""Which parts of weights go from which rank to which, in rounds of limited size.

A writer's entries, one after another, are cut into rounds of at most so many bytes: between rows of a logical tensor, or inside
a row that is larger than a round. The cuts follow from the files alone, so a sender knows the rounds of every writer without
being told, and needs only its own boxes; a writer needs the boxes that meet its files. Inside a round the bytes between
two ranks are in the order of the cuts, then of the sender's boxes, which both ends know.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from petatron.checkpoint.save.file_plan import FilePlan
from petatron.models.hf.folder_entries import Entry, Region
from petatron.sharding.boxes import Box, BoxIndex
from petatron.sharding.flat_shard import range_boxes

ROUND_BYTES = 256 << 20
_WORD = 8


@dataclass(frozen=True, slots=True)
class Held:
    """A box that a rank is primary for; `index` is its place among that rank's chunks."""

    rank: int
    index: int
    box: Box


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of an entry that its writer gets in one round: a box of the region's logical tensor."""

    round: int
    entry: Entry
    region: Region
    box: Box


@dataclass(frozen=True, slots=True)
class Transfer:
    """A part of a segment that one rank holds. `peer` is the other rank, `index` the place of the sender's chunk."""

    round: int
    peer: int
    index: int
    entry: Entry
    region: Region
    common: Box
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """In whole words, so that what is packed one after another is aligned."""
        size = self.common.volume * self.dtype.itemsize
        return -(-size // _WORD) * _WORD


@dataclass(frozen=True, slots=True)
class Moves:
    """A rank's part of a round, in the order in which it is packed."""

    sending: tuple[Transfer, ...]
    receiving: tuple[Transfer, ...]

    @property
    def bytes_out(self) -> int:
        return sum(transfer.num_bytes for transfer in self.sending)

    @property
    def bytes_in(self) -> int:
        return sum(transfer.num_bytes for transfer in self.receiving)


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """What one rank does to bring the entries together.

    own: parts of its files that it holds itself. aliases: entries that are a box of its own, by that chunk's place.
    """

    rounds: tuple[Moves, ...]
    own: tuple[Transfer, ...]
    aliases: Mapping[str, Transfer]

    def with_rounds(self, count: int) -> TransferPlan:
        """The same with empty rounds at the end."""
        return replace(self, rounds=(*self.rounds, *[Moves((), ())] * (count - len(self.rounds))))

    @property
    def bytes_out(self) -> int:
        """The most that is sent in a round."""
        return max((moves.bytes_out for moves in self.rounds), default=0)

    @property
    def bytes_in(self) -> int:
        """The most that is received in a round."""
        return max((moves.bytes_in for moves in self.rounds), default=0)


def cut_rounds(
    files: Iterable[FilePlan], dtypes: Mapping[str, torch.dtype], round_bytes: int = ROUND_BYTES
) -> Iterator[Segment]:
    """The files of one writer, cut into rounds of at most so many bytes."""
    number, room = 0, round_bytes
    for entry in (entry for file in files for entry in file.entries):
        for region in entry.regions:
            itemsize = dtypes[region.name].itemsize
            row, total = math.prod(region.shape[1:]), math.prod(region.shape)
            at = 0
            while at < total:
                if room < min(min(row, total - at) * itemsize, round_bytes):
                    number, room = number + 1, round_bytes
                take = min(total - at, max(1, room // itemsize))
                if take < total - at and take > row:
                    take -= (at + take) % row
                for start, shape, _ in range_boxes(region.shape, at, at + take):
                    begin = tuple(a + b for a, b in zip(region.start, start))
                    yield Segment(number, entry, region, Box(begin, shape))
                at, room = at + take, room - take * itemsize


def plan_transfers(
    rank: int,
    files: Sequence[FilePlan],
    dtypes: Mapping[str, torch.dtype],
    own: Mapping[str, Sequence[Held]],
    held: Mapping[str, Sequence[Held]],
    round_bytes: int = ROUND_BYTES,
) -> TransferPlan:
    """What a rank sends, receives and has: `own` are its boxes by tensor, `held` all that meet the files it writes."""
    writing = [file for file in files if file.rank == rank]
    aliases = _aliases(rank, writing, dtypes, held)
    kept: list[Transfer] = []
    receiving: list[Transfer] = []
    for transfer in _meetings(cut_rounds(writing, dtypes, round_bytes), dtypes, held):
        if transfer.peer != rank:
            receiving.append(transfer)
        elif transfer.entry.name not in aliases:
            kept.append(transfer)
    sending: list[Transfer] = []
    for writer, theirs in _files_met(rank, files, own).items():
        segments = cut_rounds(theirs, dtypes, round_bytes)
        met = (segment for segment in segments if segment.region.name in own)
        sending += [replace(transfer, peer=writer) for transfer in _meetings(met, dtypes, own)]
    count = 1 + max((transfer.round for transfer in (*sending, *receiving)), default=-1)
    out, into = _by_round(sending, count), _by_round(receiving, count)
    return TransferPlan(tuple(map(Moves, out, into)), tuple(kept), aliases)


def _files_met(rank: int, files: Sequence[FilePlan], own: Mapping[str, Sequence[Held]]) -> dict[int, list[FilePlan]]:
    """The other ranks that write a tensor of which this rank has boxes, with all their files."""
    writers = {
        file.rank
        for file in files
        if file.rank != rank and any(region.name in own for entry in file.entries for region in entry.regions)
    }
    found: dict[int, list[FilePlan]] = {writer: [] for writer in sorted(writers)}
    for file in files:
        if file.rank in found:
            found[file.rank].append(file)
    return found


def _meetings(
    segments: Iterable[Segment], dtypes: Mapping[str, torch.dtype], held: Mapping[str, Sequence[Held]]
) -> Iterator[Transfer]:
    """Where segments meet boxes, in the order of both; `peer` is who holds the box."""
    indexes: dict[str, BoxIndex] = {}
    for segment in segments:
        name = segment.region.name
        boxes = held.get(name, ())
        if name not in indexes:
            indexes[name] = BoxIndex([found.box for found in boxes])
        for number, common in indexes[name].overlaps(segment.box):
            source = boxes[number]
            yield Transfer(
                segment.round, source.rank, source.index, segment.entry, segment.region, common, dtypes[name]
            )


def _by_round(transfers: Iterable[Transfer], count: int) -> list[tuple[Transfer, ...]]:
    rounds: list[list[Transfer]] = [[] for _ in range(count)]
    for transfer in transfers:
        rounds[transfer.round].append(transfer)
    return [tuple(sorted(found, key=lambda transfer: transfer.peer)) for found in rounds]


def _aliases(
    rank: int, files: Iterable[FilePlan], dtypes: Mapping[str, torch.dtype], held: Mapping[str, Sequence[Held]]
) -> dict[str, Transfer]:
    """Entries of one region that lies in one box of this rank: its own memory is written."""
    found = {}
    for entry in (entry for file in files for entry in file.entries):
        region = entry.regions[0]
        box = Box(region.start, region.shape)
        if len(entry.regions) > 1 or region.extent != entry.shape:
            continue
        for source in held.get(region.name, ()):
            if source.rank == rank and _inside(box, source.box):
                found[entry.name] = Transfer(0, rank, source.index, entry, region, box, dtypes[region.name])
    return found


def _inside(inner: Box, outer: Box) -> bool:
    return all(a >= b for a, b in zip(inner.start, outer.start)) and all(a <= b for a, b in zip(inner.stop, outer.stop))
