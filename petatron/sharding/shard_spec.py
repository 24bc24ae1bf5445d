"""`Shard` and `TensorShard`: which box of which logical tensor a parameter holds, for all that splits, saves, counts or names weights.

A model declares a `Shard` per parameter. `compute_placement` computes from it, the parameter's logical shape and
this rank's tensor-parallel coordinate a `Placement`: the shape of the local parameter and the `TensorShard`s in it, each
a box of one *logical* tensor. Logical tensors are what a checkpoint or a comparison sees: q, k and v are three of them
although they are one fused weight of the layer's GEMM, and the vocabulary has exactly as many rows as there are token
ids although memory is padded. No layout changes a logical tensor's name, shape or content.

A box held by several ranks of one model replica is replicated. One of them is `primary`: it counts in norms and saves the
tensor. `grad_reduce_axis` is the axis over which the replicas' gradients are partial sums that must be reduced:
they come from different halves of the sequence (norms under sequence parallelism), from different heads (key/value heads
shared by several ranks, per-head norms), or from both ends of the model (a tied embedding on two pipeline stages).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from petatron.config.schema.sections.vocabulary import padded_rows

if TYPE_CHECKING:
    from petatron.mesh.mesh import ParallelMesh

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """One logical tensor inside a fused parameter: `rows` along the split dimension, cut only between `units` (heads)."""

    name: str
    rows: int
    units: int


@dataclass(frozen=True, slots=True)
class Shard:
    """How a parameter is split.

    tp: the tensor dimension split over the tensor-parallel axis; None means every rank holds all of it.
    ep: the dimension that counts experts, split over the expert-parallel axis. Then `tp` means the experts' own tensor axis.
    sections: logical tensors fused along that dimension (always dimension 0, also of one that every rank has whole).
    pad_to: the split dimension is padded in memory to a multiple of this x tp (vocabulary).
    partial: when a replicated parameter's gradient is a summand over tp: never, under sequence parallelism, or always.
    ends: the first and the last pipeline rank both hold it, and their gradients are summands (a tied embedding).
    copy_of: the parameter of another pipeline stage that this one is a copy of.
    rows_over_data: a table whose rows are split over the data-parallel ranks too, inside of the part of a tensor-parallel rank; ranks ask
    each other for rows, and gradients are sent to the owner of a row (`layers/vocabulary/row_sharded_table.py`).
    """

    tp: int | None = None
    ep: int | None = None
    sections: tuple[Section, ...] = ()
    pad_to: int | None = None
    partial_grad: Literal["never", "sequence", "always"] = "never"
    shared_embedding: bool = False
    replica_of: str | None = None
    rows_over_data: bool = False


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A box of a logical tensor, and its offset in the local parameter."""

    name: str
    logical_shape: Shape
    start: Shape
    shape: Shape
    local_start: Shape
    primary: bool
    grad_reduce_axis: str | None = None

    def local_slices(self) -> tuple[slice, ...]:
        return tuple(slice(at, at + size) for at, size in zip(self.local_start, self.shape))

    def logical_slices(self) -> tuple[slice, ...]:
        return tuple(slice(at, at + size) for at, size in zip(self.start, self.shape))


@dataclass(frozen=True, slots=True)
class Placement:
    """The local parameter and its shards of logical tensors; `section_rows` are the local sizes of the fused sections, in order.

    `expert` says that the parameter is replicated over the ranks of `edp`, not over those of `dp_cp`; `row_sharded` that it is on this
    rank alone. `cut_dim` is the dimension that tensor-parallel ranks split, if any; a rank may have no rows of it.
    """

    shape: Shape
    tensor_shards: tuple[TensorShard, ...]
    section_rows: tuple[int, ...]
    expert: bool = False
    cut_dim: int | None = None
    row_sharded: bool = False


@dataclass(frozen=True, slots=True)
class ModelParallelCoordinate:
    """This rank's coordinate on the axes that split tensors; `data` are the ranks with other tokens, which split tables of rows."""

    tp_size: int = 1
    tp_rank: int = 0
    sequence_parallel: bool = False
    ep_size: int = 1
    ep_rank: int = 0
    etp_size: int = 1
    etp_rank: int = 0
    data_size: int = 1
    data_rank: int = 0

    @classmethod
    def from_mesh(cls, mesh: ParallelMesh, *, sequence_parallel: bool) -> ModelParallelCoordinate:
        tp, ep, etp, data = mesh.tp, mesh.ep, mesh["etp"], mesh["dp_cp"]
        return cls(tp.size, tp.rank, sequence_parallel, ep.size, ep.rank, etp.size, etp.rank, data.size, data.rank)


@dataclass(frozen=True, slots=True)
class _DimShard:
    """A rank's part of one logical dimension: `num_rows` rows from `start`, in `num_padded_rows` rows of memory."""

    start: int
    num_rows: int
    num_padded_rows: int
    replicas: int


def _split_dim(rows: int, units: int, num_ranks: int, rank: int, pad_to: int | None) -> _DimShard:
    if pad_to is not None:
        local = padded_rows(rows, pad_to, num_ranks) // num_ranks
        start = min(rank * local, rows)
        return _DimShard(start, min(local, rows - start), local, 1)
    unit_rows = rows // units
    if units % num_ranks == 0:
        local = units // num_ranks * unit_rows
        return _DimShard(rank * local, local, local, 1)
    assert num_ranks % units == 0, f"{units} units cannot be split over {num_ranks} ranks"
    return _DimShard(rank * units // num_ranks * unit_rows, unit_rows, unit_rows, num_ranks // units)


def section_name(parameter: str, section: str) -> str:
    """`layers.0.attention.qkv.weight` and section q give `layers.0.attention.q.weight`."""
    parts = parameter.split(".")
    parts[-2] = section
    return ".".join(parts)


@lru_cache(maxsize=4096)
def compute_placement(name: str, shape: Shape, spec: Shard, coordinate: ModelParallelCoordinate) -> Placement:
    """Returns the placement on this rank of a parameter of this logical (fused) shape; forecasts ask for the same ones again and again."""
    if spec.ep is not None:
        return _expert_placement(name, shape, spec, coordinate)
    ranks, rank = coordinate.tp_size, coordinate.tp_rank
    if spec.rows_over_data:
        ranks, rank = ranks * coordinate.data_size, rank * coordinate.data_size + coordinate.data_rank
        return replace(_sharded_placement(name, shape, spec, 0, ranks, rank), row_sharded=True)
    dim = spec.tp
    if dim is None or dim >= len(shape):  # a bias of a weight that is split along its input is whole
        partial = ranks > 1 and (
            spec.partial_grad == "always"
            or (coordinate.sequence_parallel and (spec.partial_grad == "sequence" or dim is not None))
        )
        axis = "tp" if partial else None
        return _replicated_placement(name, shape, spec.sections, primary=rank == 0, grad_reduce_axis=axis)
    placement = _sharded_placement(name, shape, spec, dim, ranks, rank)
    if not spec.shared_embedding:
        return placement
    copy = {} if spec.replica_of is None else {"name": spec.replica_of, "primary": False}
    return replace(
        placement, tensor_shards=tuple(replace(p, grad_reduce_axis="ends", **copy) for p in placement.tensor_shards)
    )


def _expert_placement(name: str, shape: Shape, spec: Shard, coordinate: ModelParallelCoordinate) -> Placement:
    """Shards whole experts over ep along dimension 0, and each over the experts' tensor-parallel axis."""
    assert spec.ep == 0 and shape[0] % coordinate.ep_size == 0, (
        f"{name}: {shape[0]} experts over {coordinate.ep_size} ranks"
    )
    here = shape[0] // coordinate.ep_size
    local = (here, *shape[1:])
    if spec.tp is None or spec.tp >= len(shape):
        sum_over = "etp" if coordinate.etp_size > 1 else None
        inner = _replicated_placement(name, local, (), primary=coordinate.etp_rank == 0, grad_reduce_axis=sum_over)
    else:
        inner = _sharded_placement(name, local, spec, spec.tp, coordinate.etp_size, coordinate.etp_rank, "etp")
    pieces = tuple(
        replace(
            piece,
            logical_shape=(shape[0], *piece.logical_shape[1:]),
            start=(coordinate.ep_rank * here, *piece.start[1:]),
        )
        for piece in inner.tensor_shards
    )
    return replace(inner, tensor_shards=pieces, expert=True)


def _replicated_placement(
    name: str, shape: Shape, sections: tuple[Section, ...], *, primary: bool, grad_reduce_axis: str | None
) -> Placement:
    origin = (0,) * len(shape)
    if not sections:
        piece = TensorShard(name, shape, origin, shape, origin, primary, grad_reduce_axis)
        return Placement(shape, (piece,), (shape[0],) if shape else ())
    pieces, row = [], 0
    for section in sections:
        of_section, start = (section.rows, *shape[1:]), (row, *origin[1:])
        logical = section_name(name, section.name)
        pieces.append(TensorShard(logical, of_section, origin, of_section, start, primary, grad_reduce_axis))
        row += section.rows
    return Placement(shape, tuple(pieces), tuple(section.rows for section in sections))


def _sharded_placement(
    name: str, shape: Shape, spec: Shard, dim: int, num_ranks: int, rank: int, axis: str = "tp"
) -> Placement:
    """Concatenates every section's part of the split dimension."""
    sections = spec.sections or (Section("", shape[dim], shape[dim] if spec.pad_to is None else 1),)
    assert sum(section.rows for section in sections) == shape[dim], f"sections of {name} do not add up to {shape}"
    pieces, section_rows, local_at = [], [], 0
    for section in sections:
        part = _split_dim(section.rows, section.units, num_ranks, rank, spec.pad_to)
        if part.num_rows:
            replicas = axis if part.replicas == num_ranks else f"{axis}/{part.replicas}"
            pieces.append(
                TensorShard(
                    name=section_name(name, section.name) if section.name else name,
                    logical_shape=(*shape[:dim], section.rows, *shape[dim + 1 :]),
                    start=tuple(part.start if d == dim else 0 for d in range(len(shape))),
                    shape=(*shape[:dim], part.num_rows, *shape[dim + 1 :]),
                    local_start=tuple(local_at if d == dim else 0 for d in range(len(shape))),
                    primary=rank % part.replicas == 0,
                    grad_reduce_axis=None if part.replicas == 1 else replicas,
                )
            )
        section_rows.append(part.num_padded_rows)
        local_at += part.num_padded_rows
    cut_dim = dim if num_ranks > 1 else None
    return Placement((*shape[:dim], local_at, *shape[dim + 1 :]), tuple(pieces), tuple(section_rows), cut_dim=cut_dim)
