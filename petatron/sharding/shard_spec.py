"""Which box of which logical tensor a parameter holds: one table, read by everyone who splits, saves, counts or names weights.

A model declares a `Shard` per parameter-name pattern. `place` turns that declaration, the parameter's logical shape and
this rank's tensor-parallel coordinate into a `Placement`: the shape of the local parameter and the `Piece`s in it, each
a box of one *logical* tensor. Logical tensors are what a checkpoint or a comparison sees: q, k and v are three of them
although the layer multiplies them as one fused weight, and the vocabulary has exactly as many rows as there are token
ids although memory is padded. No layout changes a logical tensor's name, shape or content.

A box held by several ranks of one model replica is a copy. One of them is `primary` and speaks for all when norms are
summed or tensors are saved. `sum_over` names the axis over which the copies' gradients are summands that must be added up:
they came from different halves of the sequence (norms under sequence parallelism), from different heads (key/value heads
shared by several ranks, per-head norms), or from both ends of the model (a tied embedding on two pipeline stages).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """One logical tensor inside a fused parameter: `rows` along the split dimension, cut only between `units` (heads)."""

    name: str
    rows: int
    units: int


@dataclass(frozen=True, slots=True)
class Shard:
    """How parameters of one name pattern are split.

    tp: the tensor dimension split over the tensor-parallel axis; None means every rank holds all of it.
    ep: the dimension that counts experts, split over the expert-parallel axis. Then `tp` means the experts' own tensor axis.
    sections: logical tensors fused along that dimension (always dimension 0).
    pad_to: the split dimension is padded in memory to a multiple of this x tp (vocabulary).
    partial: when a replicated parameter's gradient is a summand over tp: never, under sequence parallelism, or always.
    ends: the first and the last pipeline rank both hold it, and their gradients are summands (a tied embedding).
    copy_of: the parameter of another pipeline stage that this one is a copy of.
    """

    tp: int | None = None
    ep: int | None = None
    sections: tuple[Section, ...] = ()
    pad_to: int | None = None
    partial: Literal["never", "sequence", "always"] = "never"
    ends: bool = False
    copy_of: str | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a logical tensor, and where it lies in the local parameter."""

    name: str
    logical_shape: Shape
    start: Shape
    shape: Shape
    local_start: Shape
    primary: bool
    sum_over: str | None = None

    def local_slices(self) -> tuple[slice, ...]:
        return tuple(slice(at, at + size) for at, size in zip(self.local_start, self.shape))

    def logical_slices(self) -> tuple[slice, ...]:
        return tuple(slice(at, at + size) for at, size in zip(self.start, self.shape))


@dataclass(frozen=True, slots=True)
class Placement:
    """The local parameter and its pieces; `section_rows` are the local sizes of the fused sections, in order.

    `expert` says that copies of the parameter lie on the ranks of `edp`, not on those of `dp_cp`.
    """

    shape: Shape
    pieces: tuple[Piece, ...]
    section_rows: tuple[int, ...]
    expert: bool = False


@dataclass(frozen=True, slots=True)
class TensorSplit:
    """This rank's coordinate on the axes that split tensors."""

    tp_size: int = 1
    tp_rank: int = 0
    sequence_parallel: bool = False
    ep_size: int = 1
    ep_rank: int = 0
    etp_size: int = 1
    etp_rank: int = 0


@dataclass(frozen=True, slots=True)
class _Range:
    """A rank's part of one logical dimension: `real` rows from `start`, in `local` rows of memory."""

    start: int
    real: int
    local: int
    replicas: int


def find(specs: Mapping[str, Shard], name: str) -> Shard:
    """The Shard whose pattern matches a parameter name; patterns leave out the trailing `.weight` or `.bias`."""
    module, _, _ = name.rpartition(".")
    for pattern, shard in specs.items():
        if fnmatch.fnmatchcase(module, pattern) or fnmatch.fnmatchcase(name, pattern):
            return shard
    raise KeyError(f"no Shard is declared for parameter {name}; declared patterns: {', '.join(specs)}")


def padded(rows: int, pad_to: int, tp_size: int) -> int:
    """Rows in memory over all ranks: the next multiple of `pad_to` x ranks."""
    multiple = pad_to * tp_size
    return -(-rows // multiple) * multiple


def _divide(rows: int, units: int, ranks: int, rank: int, pad_to: int | None) -> _Range:
    if pad_to is not None:
        local = padded(rows, pad_to, ranks) // ranks
        start = min(rank * local, rows)
        return _Range(start, min(local, rows - start), local, 1)
    unit_rows = rows // units
    if units % ranks == 0:
        local = units // ranks * unit_rows
        return _Range(rank * local, local, local, 1)
    assert ranks % units == 0, f"{units} units cannot be split over {ranks} ranks"
    return _Range(rank * units // ranks * unit_rows, unit_rows, unit_rows, ranks // units)


def section_name(parameter: str, section: str) -> str:
    """`layers.0.attention.qkv.weight` and section q give `layers.0.attention.q.weight`."""
    parts = parameter.split(".")
    parts[-2] = section
    return ".".join(parts)


def place(name: str, shape: Shape, shard: Shard, split: TensorSplit) -> Placement:
    """Where a parameter of this logical (fused) shape lies on this rank."""
    if shard.ep is not None:
        return _place_experts(name, shape, shard, split)
    ranks, rank = split.tp_size, split.tp_rank
    dim = shard.tp
    if dim is None or dim >= len(shape):  # a bias of a weight that is split along its input is whole
        partial = ranks > 1 and (
            shard.partial == "always" or (split.sequence_parallel and (shard.partial == "sequence" or dim is not None))
        )
        return _whole(name, shape, primary=rank == 0, sum_over="tp" if partial else None)
    placement = _cut(name, shape, shard, dim, ranks, rank)
    if not shard.ends:
        return placement
    copy = {} if shard.copy_of is None else {"name": shard.copy_of, "primary": False}
    return replace(placement, pieces=tuple(replace(p, sum_over="ends", **copy) for p in placement.pieces))


def _place_experts(name: str, shape: Shape, shard: Shard, split: TensorSplit) -> Placement:
    """Whole experts over ep along dimension 0, each cut over the experts' tensor axis."""
    assert shard.ep == 0 and shape[0] % split.ep_size == 0, f"{name}: {shape[0]} experts over {split.ep_size} ranks"
    here = shape[0] // split.ep_size
    local = (here, *shape[1:])
    if shard.tp is None or shard.tp >= len(shape):
        sum_over = "etp" if split.etp_size > 1 else None
        inner = _whole(name, local, primary=split.etp_rank == 0, sum_over=sum_over)
    else:
        inner = _cut(name, local, shard, shard.tp, split.etp_size, split.etp_rank, "etp")
    pieces = tuple(
        replace(
            piece,
            logical_shape=(shape[0], *piece.logical_shape[1:]),
            start=(split.ep_rank * here, *piece.start[1:]),
        )
        for piece in inner.pieces
    )
    return replace(inner, pieces=pieces, expert=True)


def _whole(name: str, shape: Shape, *, primary: bool, sum_over: str | None) -> Placement:
    origin = (0,) * len(shape)
    piece = Piece(name, shape, origin, shape, origin, primary, sum_over)
    return Placement(shape, (piece,), (shape[0],) if shape else ())


def _cut(name: str, shape: Shape, shard: Shard, dim: int, ranks: int, rank: int, axis: str = "tp") -> Placement:
    """Every section's part of the split dimension, one after the other."""
    sections = shard.sections or (Section("", shape[dim], shape[dim] if shard.pad_to is None else 1),)
    assert sum(section.rows for section in sections) == shape[dim], f"sections of {name} do not add up to {shape}"
    pieces, section_rows, local_at = [], [], 0
    for section in sections:
        part = _divide(section.rows, section.units, ranks, rank, shard.pad_to)
        if part.real:
            pieces.append(
                Piece(
                    name=section_name(name, section.name) if section.name else name,
                    logical_shape=(*shape[:dim], section.rows, *shape[dim + 1 :]),
                    start=tuple(part.start if d == dim else 0 for d in range(len(shape))),
                    shape=(*shape[:dim], part.real, *shape[dim + 1 :]),
                    local_start=tuple(local_at if d == dim else 0 for d in range(len(shape))),
                    primary=rank % part.replicas == 0,
                    sum_over=None
                    if part.replicas == 1
                    else axis
                    if part.replicas == ranks
                    else f"{axis}/{part.replicas}",
                )
            )
        section_rows.append(part.local)
        local_at += part.local
    return Placement((*shape[:dim], local_at, *shape[dim + 1 :]), tuple(pieces), tuple(section_rows))
