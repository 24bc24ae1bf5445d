"""Which box of which logical tensor a parameter holds: one table, read by everyone who splits, saves, counts or names weights.

A model declares a `Shard` per parameter-name pattern. `place` turns that declaration, the parameter's logical shape and
this rank's tensor-parallel coordinate into a `Placement`: the shape of the local parameter and the `Piece`s in it, each
a box of one *logical* tensor. Logical tensors are what a checkpoint or a comparison sees: q, k and v are three of them
although the layer multiplies them as one fused weight, and the vocabulary has exactly as many rows as there are token
ids although memory is padded. No layout changes a logical tensor's name, shape or content.

A box held by several ranks is a replica. One of them is `primary` and speaks for all when norms are summed or tensors
are saved. `partial` says that the replicas' gradients are summands that must be added up over those ranks: they came
from different halves of the sequence (norms under sequence parallelism) or from different heads (key/value heads shared
by several ranks, per-head norms).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
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
    sections: logical tensors fused along that dimension (always dimension 0).
    pad_to: the split dimension is padded in memory to a multiple of this x tp (vocabulary).
    partial: when a replicated parameter's gradient is a summand over tp: never, under sequence parallelism, or always.
    """

    tp: int | None = None
    sections: tuple[Section, ...] = ()
    pad_to: int | None = None
    partial: Literal["never", "sequence", "always"] = "never"


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a logical tensor, and where it lies in the local parameter."""

    name: str
    logical_shape: Shape
    start: Shape
    shape: Shape
    local_start: Shape
    replicas: int
    primary: bool
    partial: bool

    def local_slices(self) -> tuple[slice, ...]:
        return tuple(slice(at, at + size) for at, size in zip(self.local_start, self.shape))

    def logical_slices(self) -> tuple[slice, ...]:
        return tuple(slice(at, at + size) for at, size in zip(self.start, self.shape))


@dataclass(frozen=True, slots=True)
class Placement:
    """The local parameter and its pieces; `section_rows` are the local sizes of the fused sections, in order."""

    shape: Shape
    pieces: tuple[Piece, ...]
    section_rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSplit:
    """This rank's coordinate on the axes that split tensors."""

    tp_size: int = 1
    tp_rank: int = 0
    sequence_parallel: bool = False


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


def _divide(rows: int, units: int, split: TensorSplit, pad_to: int | None) -> _Range:
    tp, rank = split.tp_size, split.tp_rank
    if pad_to is not None:
        local = padded(rows, pad_to, tp) // tp
        start = min(rank * local, rows)
        return _Range(start, min(local, rows - start), local, 1)
    unit_rows = rows // units
    if units % tp == 0:
        local = units // tp * unit_rows
        return _Range(rank * local, local, local, 1)
    assert tp % units == 0, f"{units} units cannot be split over {tp} ranks"
    return _Range(rank * units // tp * unit_rows, unit_rows, unit_rows, tp // units)


def section_name(parameter: str, section: str) -> str:
    """`layers.0.attention.qkv.weight` and section q give `layers.0.attention.q.weight`."""
    parts = parameter.split(".")
    parts[-2] = section
    return ".".join(parts)


def place(name: str, shape: Shape, shard: Shard, split: TensorSplit) -> Placement:
    """Where a parameter of this logical (fused) shape lies on this rank."""
    dim = shard.tp
    if dim is None or dim >= len(shape):  # a bias of a weight that is split along its input is whole
        partial = split.tp_size > 1 and (
            shard.partial == "always" or (split.sequence_parallel and (shard.partial == "sequence" or dim is not None))
        )
        origin = (0,) * len(shape)
        piece = Piece(name, shape, origin, shape, origin, split.tp_size, split.tp_rank == 0, partial)
        return Placement(shape, (piece,), (shape[0],) if shape else ())

    sections = shard.sections or (Section("", shape[dim], shape[dim] if shard.pad_to is None else 1),)
    assert sum(section.rows for section in sections) == shape[dim], f"sections of {name} do not add up to {shape}"
    pieces, section_rows, local_at = [], [], 0
    for section in sections:
        part = _divide(section.rows, section.units, split, shard.pad_to)
        logical = (*shape[:dim], section.rows, *shape[dim + 1 :])
        if part.real:
            pieces.append(
                Piece(
                    name=section_name(name, section.name) if section.name else name,
                    logical_shape=logical,
                    start=tuple(part.start if d == dim else 0 for d in range(len(shape))),
                    shape=(*shape[:dim], part.real, *shape[dim + 1 :]),
                    local_start=tuple(local_at if d == dim else 0 for d in range(len(shape))),
                    replicas=part.replicas,
                    primary=split.tp_rank % part.replicas == 0,
                    partial=part.replicas > 1,
                )
            )
        section_rows.append(part.local)
        local_at += part.local
    return Placement((*shape[:dim], local_at, *shape[dim + 1 :]), tuple(pieces), tuple(section_rows))
