"""Plans which boxes of weights go from which rank to which, where the same tensors are held in two layouts.

Each tensor is planned by one rank, which follows from its name. Every rank tells it the boxes that it has and those that it needs, and gets
back what to send and what to receive; so no rank ever has the boxes of all, and a plan costs each rank what its own tensors cost.

Transfers go in rounds of at most `ROUND_BYTES` of logical tensors, in the order of their names: larger tensors are cut along their first
dimension. In a round a rank receives no more than that, and sends no more than that for each copy of the model that is drawn with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from petatron.checkpoint.sparse_all_to_all import exchange_messages
from petatron.mesh.json_collectives import all_gather_json
from petatron.mesh.mesh import Axis
from petatron.mesh.rng import stable_seed
from petatron.sharding.boxes import Box, BoxIndex, overlap

ROUND_BYTES = 256 << 20


class HeldBox(NamedTuple):
    """A box of a logical tensor that a rank has, or needs, and its place among those of this rank; `dtype` where it is needed."""

    name: str
    logical_shape: tuple[int, ...]
    box: Box
    place: int
    dtype: torch.dtype | None = None


class Transfer(NamedTuple):
    """A part of a tensor that goes to a rank, or comes from it; `place` is that of the box here which has it, or needs it."""

    peer: int
    name: str
    box: Box
    place: int


@dataclass(frozen=True, slots=True)
class HandoverRound:
    """What this rank sends and receives at once, each in the order in which it is packed."""

    sends: Sequence[Transfer]
    receives: Sequence[Transfer]


@dataclass(frozen=True, slots=True)
class HandoverPlan:
    """Rounds, as many on every rank; what is copied from one tensor of this rank to another, with the indices of both; and in which
    precision a tensor is sent."""

    rounds: Sequence[HandoverRound]
    copies: Sequence[tuple[int, int, Box]]
    dtypes: Mapping[str, torch.dtype]


class _Piece(NamedTuple):
    """A part of a tensor that goes in one round."""

    round: int
    box: Box


@dataclass(slots=True)
class _Tensor:
    """What ranks have and need of a tensor: (rank, index there, box)."""

    logical_shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    sources: list[tuple[int, int, Box]] = field(default_factory=list)
    targets: list[tuple[int, int, Box]] = field(default_factory=list)


def plan_handover(
    sources: Sequence[HeldBox],
    targets: Sequence[HeldBox],
    axis: Axis,
    *,
    ranks_per_node: int = 1,
    round_bytes: int = ROUND_BYTES,
) -> HandoverPlan:
    """Plans a hand-over over an axis of control messages; every rank calls it with what it has and what it needs."""
    tensors = {name: tensor for name, tensor in _gather_tensors(sources, targets, axis).items() if tensor.targets}
    told = {name: (tensor.logical_shape, str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()}
    everywhere = {name: value for of_rank in all_gather_json(told, axis) for name, value in of_rank.items()}
    dtypes: dict[str, torch.dtype] = {name: getattr(torch, dtype) for name, (_, dtype) in everywhere.items()}
    sizes = {name: (tuple(shape), dtypes[name].itemsize) for name, (shape, _) in everywhere.items()}
    pieces = split_into_rounds(sizes, round_bytes)
    planned: dict[int, dict[str, list[Any]]] = {}
    sent: dict[int, int] = {}
    for name, tensor in sorted(tensors.items()):
        for number, source, target, common in _transfers(tensor, pieces[name], sent, ranks_per_node):
            of_source, of_target = (planned.setdefault(rank, {}) for rank in (source[0], target[0]))
            content = [name, common.start, common.shape]
            if source[0] == target[0]:
                of_source.setdefault("copies", []).append([source[1], target[1], *content[1:]])
                continue
            of_source.setdefault("sends", []).append([number, target[0], *content, source[1]])
            of_target.setdefault("receives", []).append([number, source[0], *content, target[1]])
    used = {number for message in planned.values() for number, *_ in message.get("sends", ())}
    rounds = sorted({number for of_rank in all_gather_json(sorted(used), axis) for number in of_rank})
    return _merge(exchange_messages(planned, axis).values(), rounds, dtypes)


def split_into_rounds(tensors: Mapping[str, tuple[tuple[int, ...], int]], round_bytes: int) -> dict[str, list[_Piece]]:
    """Cuts tensors (shape and bytes of an element, by name) into pieces that fill rounds one after another.

    >>> pieces = split_into_rounds({"a": ((4, 2), 4), "b": ((), 4)}, 24)
    >>> [(piece.round, piece.box.start, piece.box.shape) for piece in pieces["a"]], pieces["b"][0].round
    ([(0, (0, 0), (3, 2)), (1, (3, 0), (1, 2))], 1)
    """
    number, room = 0, round_bytes
    pieces: dict[str, list[_Piece]] = {}
    for name, (shape, itemsize) in sorted(tensors.items()):
        rows, row_bytes = (shape[0], math.prod(shape[1:]) * itemsize) if shape else (1, itemsize)
        row, pieces[name] = 0, []
        while row < rows:
            if room < row_bytes and room < round_bytes:
                number, room = number + 1, round_bytes
            count = min(rows - row, max(1, room // max(1, row_bytes)))
            box = Box((row, *(0 for _ in shape[1:])), (count, *shape[1:])) if shape else Box((), ())
            pieces[name].append(_Piece(number, box))
            row, room = row + count, room - count * row_bytes
    return pieces


def _gather_tensors(sources: Sequence[HeldBox], targets: Sequence[HeldBox], axis: Axis) -> dict[str, _Tensor]:
    """Returns the tensors that this rank plans, with the boxes of all ranks."""
    messages: dict[int, list[Any]] = {}
    for kind, held in (("sources", sources), ("targets", targets)):
        for name, shape, box, index, dtype in held:
            planner, code = stable_seed("handover", name) % axis.size, dtype and str(dtype).removeprefix("torch.")
            messages.setdefault(planner, []).append([kind, name, shape, box.start, box.shape, index, code])
    tensors: dict[str, _Tensor] = {}
    for rank, message in exchange_messages(messages, axis).items():
        for kind, name, shape, start, size, index, code in message:
            tensor = tensors.setdefault(name, _Tensor(tuple(shape)))
            tensor.dtype = tensor.dtype if code is None else getattr(torch, code)
            getattr(tensor, kind).append((rank, index, Box(tuple(start), tuple(size))))
    return tensors


def _transfers(
    tensor: _Tensor, pieces: Sequence[_Piece], sent: dict[int, int], ranks_per_node: int
) -> Iterator[tuple[int, tuple[int, int], tuple[int, int], Box]]:
    """Yields round, source and target (rank and index), and the box, of what each target gets.

    Of the ranks that have a box a target takes itself, else one of its machine, and of these the one that sends least.
    """
    holders: dict[Box, list[tuple[int, int]]] = {}
    for rank, index, box in tensor.sources:
        holders.setdefault(box, []).append((rank, index))
    distinct = list(holders)
    boxes = BoxIndex(distinct)
    for rank, index, needed in tensor.targets:
        cost = partial(_cost, rank, sent=sent, ranks_per_node=ranks_per_node)
        for number, piece in pieces:
            part = overlap(piece, needed)
            if part is None:
                continue
            covered = 0
            for place, common in boxes.overlaps(part):
                source = min(holders[distinct[place]], key=cost)
                if source[0] != rank:
                    sent[source[0]] = sent.get(source[0], 0) + common.volume
                covered += common.volume
                yield number, source, (rank, index), common
            assert covered == part.volume, f"{covered} of {part.volume} elements of {part} are somewhere"


def _cost(
    target: int, holder: tuple[int, int], *, sent: Mapping[int, int], ranks_per_node: int
) -> tuple[bool, bool, int, int]:
    """Returns what orders the ranks that have a box, for a rank that needs it."""
    rank = holder[0]
    return rank != target, rank // ranks_per_node != target // ranks_per_node, sent.get(rank, 0), rank


def _merge(messages: Any, rounds: Sequence[int], dtypes: Mapping[str, torch.dtype]) -> HandoverPlan:
    """Makes the plan of a rank from what the planners of its tensors say."""
    sends, receives = ({number: [] for number in rounds} for _ in range(2))
    copies: list[tuple[int, int, Box]] = []
    for message in messages:
        for into, kind in ((sends, "sends"), (receives, "receives")):
            for number, peer, name, start, shape, index in message.get(kind, ()):
                into[number].append(Transfer(peer, name, Box(tuple(start), tuple(shape)), index))
        for source, target, start, shape in message.get("copies", ()):
            copies.append((source, target, Box(tuple(start), tuple(shape))))

    def packed(transfers: list[Transfer]) -> list[Transfer]:
        return sorted(transfers, key=lambda transfer: (transfer.peer, transfer.name, transfer.box.start))

    return HandoverPlan(
        [HandoverRound(packed(sends[number]), packed(receives[number])) for number in rounds], copies, dtypes
    )
