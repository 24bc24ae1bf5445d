"""From the boxes of weights that ranks hold to the whole tensors of a model folder, each on the one rank that writes it.

Every rank knows every rank's boxes (a small table), so all of them derive the same list of transfers and no request is ever
sent. Transfers go in rounds of limited size, one exchange each; inside a round the bytes between two ranks are in the order
of the entries, their regions, and the sender's boxes. With one rank nothing moves, and an entry that is one box is that
box's own memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.checkpoint.manifest import StoredBox, StoredTensor
from petatron.checkpoint.placing import entry_box, in_entry
from petatron.checkpoint.safetensors_file import DTYPE_CODES
from petatron.checkpoint.state import WEIGHTS, Chunk, ChunkFacts
from petatron.mesh.boxes import Box, overlap, tiling_problem
from petatron.mesh.collectives import all_to_all
from petatron.mesh.mesh import Axis
from petatron.mesh.spec import Shape
from petatron.models.hf.entries import Entry, Region

_ROUND_BYTES = 256 << 20
_WORD = 8
_MOST_FILE_BYTES = 4 << 30
_LEAST_FILE_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Held:
    """A box that a rank is primary for; `index` is its place among that rank's chunks."""

    rank: int
    index: int
    box: Box


@dataclass(frozen=True, slots=True)
class Weight:
    """A logical tensor of the model and who holds its boxes."""

    shape: Shape
    dtype: torch.dtype
    held: tuple[Held, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A file of the folder, and the rank that writes it."""

    name: str
    entries: tuple[Entry, ...]
    rank: int


def weights_of(survey: Sequence[Sequence[ChunkFacts]]) -> dict[str, Weight]:
    """Every logical tensor of the model folder that some rank holds boxes of, from every rank's facts."""
    weights: dict[str, Weight] = {}
    for rank, table in enumerate(survey):
        for index, (key, shape, dtype, box) in enumerate(table):
            name = key.removeprefix(WEIGHTS)
            known = weights.get(name, Weight(shape, dtype, ()))
            if (known.shape, known.dtype) != (shape, dtype):
                raise CheckpointError(
                    f"{key} is {known.dtype} {list(known.shape)} on one rank and {dtype} {list(shape)} on another. "
                    "Nothing was saved. Give every rank's chunk the same logical shape and dtype."
                )
            weights[name] = Weight(shape, dtype, (*known.held, Held(rank, index, box)))
    return weights


def plan_files(entries: Sequence[Entry], weights: Mapping[str, Weight], world_size: int) -> list[FilePlan]:
    """Cut the entries into files of at most 4 GiB, more where that lets more ranks write at a time."""
    sizes = [_entry_bytes(entry, weights) for entry in entries]
    total = sum(sizes)
    count = max(-(-total // _MOST_FILE_BYTES), min(world_size, -(-total // _LEAST_FILE_BYTES)), 1)
    groups: list[list[Entry]] = [[] for _ in range(count)]
    before = 0
    for entry, size in zip(entries, sizes):
        groups[min(count - 1, before * count // max(total, 1))].append(entry)
        before += size
    groups = [group for group in groups if group]
    names = (
        ["model.safetensors"]
        if len(groups) == 1
        else [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    )
    return [
        FilePlan(name, tuple(group), number * world_size // len(groups))
        for number, (name, group) in enumerate(zip(names, groups))
    ]


def _entry_bytes(entry: Entry, weights: Mapping[str, Weight]) -> int:
    return math.prod(entry.shape) * _dtype(entry, weights).itemsize


def _dtype(entry: Entry, weights: Mapping[str, Weight]) -> torch.dtype:
    return weights[entry.regions[0].name].dtype


def check_covered(entries: Sequence[Entry], weights: Mapping[str, Weight]) -> None:
    """Refuse to save a folder that would lack a weight, hold one twice, or hold one that nobody has."""
    problems = []
    boxes: dict[str, list[Box]] = {}
    for region in (region for entry in entries for region in entry.regions):
        boxes.setdefault(region.name, []).append(Box(region.start, region.shape))
    for name in sorted(boxes.keys() | weights.keys()):
        if name not in weights:
            problems.append(f"no rank holds {name}")
        elif name not in boxes:
            problems.append(f"{name} has no place in the model folder")
        else:
            for what, found in (("ranks", [held.box for held in weights[name].held]), ("folder", boxes[name])):
                gap = tiling_problem(weights[name].shape, found)
                problems += [] if gap is None else [f"{name} in the {what}: {gap}"]
    if problems:
        raise CheckpointError(
            f"the ranks' weights are not the whole model: {'; '.join(problems[:5])}. Nothing was saved."
        )


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A part of an entry that a rank sends to the rank that writes it."""

    entry: Entry
    region: Region
    held: Held
    common: Box
    to: int


class Assembly:
    """The transfers of a save, and the memory they need: once this is made on every rank, nothing of it should fail."""

    def __init__(
        self,
        files: Sequence[FilePlan],
        weights: Mapping[str, Weight],
        chunks: Sequence[Chunk],
        world: Axis,
        device: torch.device,
    ) -> None:
        """`chunks` are this rank's boxes, on the device that the world's ranks talk over."""
        self._weights, self._chunks, self._world = weights, chunks, world
        self._rounds = list(_rounds(files, weights))
        self._whole: dict[str, Tensor] = {}
        for transfer in (transfer for transfers in self._rounds for transfer in transfers):
            if transfer.to == world.rank and self._own_entry(transfer) is None:
                self._entry(transfer.entry)
        moves = [self._moves(transfers) for transfers in self._rounds]
        self._outgoing = torch.empty(max((sum(m.sent) for m in moves), default=0), dtype=torch.uint8, device=device)
        self._incoming = torch.empty(max((sum(m.received) for m in moves), default=0), dtype=torch.uint8)

    def run(self) -> dict[str, Tensor]:
        """The whole entries of this rank's files, in host memory unless they are a local chunk's own; every rank calls it."""
        for transfers in self._rounds:
            for transfer in transfers:
                if transfer.held.rank == transfer.to == self._world.rank:
                    self._take_own(transfer)
            if self._world.size > 1:
                self._exchange(self._moves(transfers))
        return self._whole

    def _moves(self, transfers: Sequence[_Transfer]) -> _Moves:
        """What this rank sends and receives in a round; the order between two ranks is that of the round on both."""
        rank, size = self._world.rank, self._world.size
        sending = [t for t in transfers if t.held.rank == rank != t.to]
        receiving = [t for t in transfers if t.to == rank != t.held.rank]
        sending.sort(key=lambda transfer: transfer.to)
        receiving.sort(key=lambda transfer: transfer.held.rank)
        sent, received = [0] * size, [0] * size
        for transfer in sending:
            sent[transfer.to] += self._bytes(transfer)
        for transfer in receiving:
            received[transfer.held.rank] += self._bytes(transfer)
        return _Moves(sending, receiving, sent, received)

    def _exchange(self, moves: _Moves) -> None:
        at = 0
        for transfer in moves.sending:
            self._values(self._outgoing, at, transfer).copy_(self._part(transfer))
            at += self._bytes(transfer)
        arrived = all_to_all(self._outgoing[:at], self._world, send=moves.sent, receive=moves.received)
        self._incoming[: arrived.numel()].copy_(arrived)
        at = 0
        for transfer in moves.receiving:
            _place(self._whole[transfer.entry.name], transfer, self._values(self._incoming, at, transfer))
            at += self._bytes(transfer)

    def _values(self, memory: Tensor, at: int, transfer: _Transfer) -> Tensor:
        """The place of a transfer in packed memory, as the box it is."""
        dtype = self._weights[transfer.region.name].dtype
        return memory[at : at + transfer.common.volume * dtype.itemsize].view(dtype).view(transfer.common.shape)

    def _take_own(self, transfer: _Transfer) -> None:
        own = self._own_entry(transfer)
        if own is not None:
            self._whole[transfer.entry.name] = own
        else:
            _place(self._whole[transfer.entry.name], transfer, self._part(transfer))

    def _own_entry(self, transfer: _Transfer) -> Tensor | None:
        """This rank's own memory, where it is a whole entry."""
        if transfer.held.rank != self._world.rank:
            return None
        region = transfer.region
        part = in_entry(self._part(transfer), len(transfer.entry.shape), transposed=region.transposed)
        return part if tuple(part.shape) == transfer.entry.shape else None

    def _part(self, transfer: _Transfer) -> Tensor:
        chunk = self._chunks[transfer.held.index]
        return chunk.tensor.detach()[transfer.common.slices_in(chunk.box)]

    def _entry(self, entry: Entry) -> None:
        if entry.name not in self._whole:
            self._whole[entry.name] = torch.empty(entry.shape, dtype=_dtype(entry, self._weights))

    def _bytes(self, transfer: _Transfer) -> int:
        """In whole words, so that what is packed one after another is aligned."""
        size = transfer.common.volume * self._weights[transfer.region.name].dtype.itemsize
        return -(-size // _WORD) * _WORD


@dataclass(frozen=True, slots=True)
class _Moves:
    """A rank's part of a round, and the bytes that go to and come from each rank."""

    sending: list[_Transfer]
    receiving: list[_Transfer]
    sent: list[int]
    received: list[int]


def _rounds(files: Sequence[FilePlan], weights: Mapping[str, Weight]) -> Iterator[list[_Transfer]]:
    """The transfers of all files; in every round each rank that writes gets about as much as a round may have."""
    writers = sorted({file.rank for file in files})
    queues = [_writer_rounds([file for file in files if file.rank == rank], weights) for rank in writers]
    while parts := [part for queue in queues if (part := next(queue, None)) is not None]:
        yield [transfer for part in parts for transfer in part]


def _writer_rounds(files: Sequence[FilePlan], weights: Mapping[str, Weight]) -> Iterator[list[_Transfer]]:
    waiting: list[_Transfer] = []
    size = 0
    for writer, entry in ((file.rank, entry) for file in files for entry in file.entries):
        for region in entry.regions:
            for held in weights[region.name].held:
                common = overlap(held.box, Box(region.start, region.shape))
                if common is not None:
                    waiting.append(_Transfer(entry, region, held, common, writer))
        size += _entry_bytes(entry, weights)
        if size >= _ROUND_BYTES:
            yield waiting
            waiting, size = [], 0
    if waiting:
        yield waiting


def _place(target: Tensor, transfer: _Transfer, values: Tensor) -> None:
    region = transfer.region
    inside = entry_box(transfer.common, region.start, region.at, transposed=region.transposed)
    target[inside.slices()].copy_(in_entry(values, target.dim(), transposed=region.transposed))


def file_table(file: FilePlan, weights: Mapping[str, Weight], path: str) -> list[tuple[str, StoredTensor]]:
    """The manifest's entries for a file of the folder."""
    return [
        (
            WEIGHTS + region.name,
            StoredTensor(
                weights[region.name].shape,
                DTYPE_CODES[weights[region.name].dtype],
                (StoredBox(path, entry.name, Box(region.start, region.shape), region.at, region.transposed),),
            ),
        )
        for entry in file.entries
        for region in entry.regions
    ]
