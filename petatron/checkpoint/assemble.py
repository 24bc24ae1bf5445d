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


def assemble(
    files: Sequence[FilePlan], weights: Mapping[str, Weight], chunks: Sequence[Chunk], world: Axis
) -> dict[str, Tensor]:
    """The whole entries of this rank's files, in host memory unless they are a local chunk's own."""
    whole: dict[str, Tensor] = {}
    for transfers in _rounds(files, weights):
        _exchange(transfers, weights, chunks, world, whole)
    return whole


def _rounds(files: Sequence[FilePlan], weights: Mapping[str, Weight]) -> Iterator[list[_Transfer]]:
    """The transfers of all files, side by side, so that in every round all writers receive."""
    queues = [_file_rounds(file, weights) for file in files]
    while queues:
        parts = [part for queue in queues if (part := next(queue, None)) is not None]
        if not parts:
            return
        yield [transfer for part in parts for transfer in part]


def _file_rounds(file: FilePlan, weights: Mapping[str, Weight]) -> Iterator[list[_Transfer]]:
    waiting: list[_Transfer] = []
    size = 0
    for entry in file.entries:
        for region in entry.regions:
            for held in weights[region.name].held:
                common = overlap(held.box, Box(region.start, region.shape))
                if common is not None:
                    waiting.append(_Transfer(entry, region, held, common, file.rank))
        size += _entry_bytes(entry, weights)
        if size >= _ROUND_BYTES:
            yield waiting
            waiting, size = [], 0
    if waiting:
        yield waiting


def _exchange(
    transfers: Sequence[_Transfer],
    weights: Mapping[str, Weight],
    chunks: Sequence[Chunk],
    world: Axis,
    whole: dict[str, Tensor],
) -> None:
    own = [transfer for transfer in transfers if transfer.held.rank == transfer.to == world.rank]
    for transfer in own:
        _take_local(transfer, weights, chunks, whole)
    if world.size == 1:
        return
    sending = [t for t in transfers if t.held.rank == world.rank and t.to != world.rank]
    receiving = [t for t in transfers if t.to == world.rank and t.held.rank != world.rank]
    sending.sort(key=lambda transfer: transfer.to)  # stable: the order between two ranks stays that of the round
    receiving.sort(key=lambda transfer: transfer.held.rank)
    sent, received = [0] * world.size, [0] * world.size
    for transfer in sending:
        sent[transfer.to] += _size(transfer, weights)
    for transfer in receiving:
        received[transfer.held.rank] += _size(transfer, weights)
    parts = [_flat_bytes(_part(chunks[t.held.index], t.common)) for t in sending]
    device = chunks[0].tensor.device if chunks else torch.device("cpu")
    outgoing = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)
    incoming = all_to_all(outgoing, world, send=sent, receive=received).cpu()
    at = 0
    for transfer in receiving:
        size = _size(transfer, weights)
        values = incoming[at : at + size].clone().view(weights[transfer.region.name].dtype)
        target = _entry_tensor(transfer.entry, weights, whole)
        _place(target, transfer, values.view(transfer.common.shape))
        at += size


def _size(transfer: _Transfer, weights: Mapping[str, Weight]) -> int:
    return transfer.common.volume * weights[transfer.region.name].dtype.itemsize


def _flat_bytes(part: Tensor) -> Tensor:
    return part.contiguous().reshape(-1).view(torch.uint8)


def _part(chunk: Chunk, common: Box) -> Tensor:
    return chunk.tensor.detach()[common.slices_in(chunk.box)]


def _take_local(
    transfer: _Transfer, weights: Mapping[str, Weight], chunks: Sequence[Chunk], whole: dict[str, Tensor]
) -> None:
    part = _part(chunks[transfer.held.index], transfer.common)
    as_entry = in_entry(part, len(transfer.entry.shape), transposed=transfer.region.transposed)
    if tuple(as_entry.shape) == transfer.entry.shape:
        whole[transfer.entry.name] = as_entry
    else:
        _place(_entry_tensor(transfer.entry, weights, whole), transfer, part)


def _entry_tensor(entry: Entry, weights: Mapping[str, Weight], whole: dict[str, Tensor]) -> Tensor:
    if entry.name not in whole:
        whole[entry.name] = torch.empty(entry.shape, dtype=_dtype(entry, weights))
    return whole[entry.name]


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
