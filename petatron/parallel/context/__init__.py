"""Context parallelism: each rank has a part of every sequence; attention needs the keys and values of all ranks, a scan a state.

**Layout.** Causal attention gives late tokens more work than early ones, so a sequence of S tokens over c ranks is cut into 2c
chunks, and rank r has chunks r and 2c - 1 - r, in this order ("zigzag"): every rank then has the same work. If a block of
adjacent ranks merges its chunks sorted by position, it has two runs again: those of one rank of a zigzag over the blocks. So
one rule of positions serves every scheme below. A layer that scans the sequence needs one contiguous part per rank instead
(`contiguous_part_exchange.py`): the model says which order it wants (`models/stage_inputs_outputs.py`). Attention between such layers
computes the same in contiguous parts, by every scheme below, but then later ranks have more work than earlier ones.

**Communication**, with `kv` the elements of a rank's keys and values, q and o those of its queries and outputs, and c the ranks
in the ring, in elements that a rank sends (or receives from a gather):

                 forward                            backward
    p2p          (c - 1) kv sent around a ring      (c - 1) kv and (c - 1) kv of gradients
    all_gather   all-gather of c kv                 the same again, and one reduce-scatter of c kv
    a2a          all-to-all of kv + q, then of o    the same
    a2a+p2p      all-to-all of kv + q, then of o,   the same, and (c - 1) kv and (c - 1) kv
                 (c - 1) kv around the rings

The all-gather is repeated in backward: saving the whole sequence's keys would defeat the purpose. Gradients of keys follow one
ring step behind the keys, and skip their owner until the end, which saves one of c steps (`ring_attention.py`).

Every visibility is computed by every scheme. Full attention and cross attention have the same work for every rank in either order. A layer
is never asked for its class: modules declare their slots (`layers/parallel_slots.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from petatron.kernels.attention import attention
from petatron.kernels.attention.key_interval_attention import KeyIntervalKernels
from petatron.kernels.attention.packed_document_attention import PackingKernels
from petatron.kernels.attention.score_modifiers import ScoreRules
from petatron.kernels.attention.visibility import Visibility
from petatron.layers.parallel_slots import ContextSlot
from petatron.mesh import collectives
from petatron.mesh.mesh import Axis, ParallelMesh
from petatron.models.batch import Batch, SequencePart
from petatron.models.stage_inputs_outputs import SequenceOrder
from petatron.parallel.context.contiguous_part_exchange import AxisParts
from petatron.parallel.context.ring_attention import KvExchange, context_parallel_attention
from petatron.parallel.context.ulysses import UlyssesAllToAll
from petatron.parallel.context.zigzag import positions_of, sorted_by_position


def split_batch(batch: Batch, axis: Axis, *, order: SequenceOrder = "zigzag") -> Batch:
    """Returns this rank's part of every array along the sequence, with explicit positions.

    Positions that the batch does not have are those of its first such array. Documents stay those of the whole sequence.
    """
    if axis.size == 1:
        return batch
    local_by_length: dict[int, Tensor] = {}
    arrays = dict(batch.arrays)
    for name, x in batch.arrays.items():
        dim = batch.sequence_dim(name)
        if dim is None:
            continue
        local = local_by_length.get(x.shape[dim])
        if local is None:
            runs = positions_of(order, axis.rank, axis.size, x.shape[dim])
            # Created on the device: a copy from the host would synchronize.
            local = torch.cat([torch.arange(run.start, run.stop, device=x.device) for run in runs])
            local_by_length[x.shape[dim]] = local
        arrays[name] = x.index_select(dim, local)
    if local_by_length:
        arrays.setdefault("positions", next(iter(local_by_length.values())))
    part = SequencePart(axis.rank, partial(collectives.all_reduce_in_region, axis=axis))
    return replace(batch, arrays=arrays, sequence_part=part)


@dataclass(frozen=True, slots=True)
class ContextParallelAttention:
    """Attention over sequence shards: all-to-all of heads over one axis, exchange of keys and values over another.

    Either axis may have a single rank, over which nothing is communicated.
    """

    ulysses: UlyssesAllToAll
    kv_axis: Axis
    kv_exchange: KvExchange
    order: SequenceOrder = "zigzag"

    def __call__(
        self,
        q_SBHE: Tensor,
        k_SBKE: Tensor,
        v_SBKE: Tensor,
        visibility: Visibility,
        *,
        dropout: float,
        packing_kernels: PackingKernels,
        interval_kernels: KeyIntervalKernels,
        rules: ScoreRules | None,
    ) -> Tensor:
        q, k, v = self.ulysses.scatter_heads_gather_sequence(q_SBHE, k_SBKE, v_SBKE)
        rules = self.ulysses.local_rules(rules)
        if self.kv_axis.size == 1:
            kernels = {"packing_kernels": packing_kernels, "interval_kernels": interval_kernels}
            out = attention(q, k, v, visibility, dropout=dropout, **kernels, rules=rules)
        else:
            scheme = {"kv_exchange": self.kv_exchange, "order": self.order, "visibility": visibility}
            out = context_parallel_attention(q, k, v, self.kv_axis, **scheme, dropout=dropout, rules=rules)
        return self.ulysses.gather_heads_scatter_sequence(out)


@dataclass(frozen=True, slots=True)
class AllGatheredKeys:
    """`KeysOfAllRanks` over an axis of the mesh; backward reduce-scatters the gradients of keys."""

    axis: Axis
    order: SequenceOrder

    @property
    def num_ranks(self) -> int:
        return self.axis.size

    def positions(self, length: int) -> tuple[range, ...]:
        return positions_of(self.order, self.axis.rank, self.axis.size, length)

    def gather(self, x: Tensor) -> Tensor:
        return sorted_by_position(collectives.gather_from_region(x, self.axis), self.axis.size, order=self.order)


def apply_context_parallel(
    model: nn.Module,
    mesh: ParallelMesh,
    *,
    comm_type: str,
    hierarchical_sizes: tuple[int, ...] = (),
    order: SequenceOrder = "zigzag",
) -> None:
    """Fills the `context_slots` of every module.

    `hierarchical_sizes`, for a2a+p2p: ranks of an all-to-all, and ranks of a ring. `order`: how sequences are shared.
    """
    if mesh.cp.size == 1:
        return
    num_head_ranks = {"p2p": 1, "all_gather": 1, "a2a": mesh.cp.size}.get(comm_type)
    if num_head_ranks is None:
        assert (
            comm_type == "a2a+p2p" and len(hierarchical_sizes) == 2 and math.prod(hierarchical_sizes) == mesh.cp.size
        ), (comm_type, hierarchical_sizes)
        num_head_ranks = hierarchical_sizes[0]
    kv_exchange: KvExchange = "gather" if comm_type == "all_gather" else "ring"
    ulysses = UlyssesAllToAll(mesh.blocks("cp", num_head_ranks), order)
    attend = ContextParallelAttention(ulysses, mesh.strides("cp", num_head_ranks), kv_exchange, order)
    values: dict[ContextSlot, object] = {"attention": attend, "keys of all ranks": AllGatheredKeys(mesh.cp, order)}
    for module in model.modules():
        slots: Mapping[str, ContextSlot] = getattr(module, "context_slots", {})
        for slot, kind in slots.items():
            assert kind != "sequence parts" or order == "contiguous", f"{type(module).__name__} needs contiguous parts"
            setattr(module, slot, values[kind] if kind in values else AxisParts(mesh.cp))
