"""Context parallelism: each rank holds a part of every sequence, and attention meets the rest of the keys and values.

**Who holds what.** Causal attention gives late tokens more work than early ones, so a sequence of S tokens over c ranks is
cut into 2c chunks, and rank r holds chunks r and 2c - 1 - r, in this order ("zigzag"): every rank then has the same work.
If a block of neighbouring ranks pools its chunks and sorts them by position, it holds two runs again: those of one rank of
a zigzag over the blocks. So one rule of positions serves every scheme below.

**How they meet**, with `kv` the elements of a rank's keys and values and `qo` those of its queries and outputs, a being
the ranks that exchange heads and c the ranks in the ring, in elements that a rank hands over (or is handed by a gather):

                 forward                            backward
    p2p          (c - 1) kv sent around a ring      (c - 1) kv and (c - 1) kv of gradients
    all_gather   one gather of c kv                 the same again, and one reduce-scatter of c kv
    a2a          exchange kv + q, exchange o        the same
    a2a+p2p      exchange kv + q, exchange o,       the same, and (c - 1) kv and (c - 1) kv
                 (c - 1) kv around the rings

The gather is repeated in the backward pass, since keeping the whole sequence's keys would defeat the purpose. Gradients of
keys travel one step behind the keys, and skip their owner until the end, which saves one of c steps (`ring_attention.py`).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from petatron.kernels.attention.documents import Documents
from petatron.layers.attention import CoreAttention
from petatron.mesh.mesh import Axis, ParallelMesh
from petatron.models.batch import Batch
from petatron.parallel.context.ring_attention import KvExchange, context_parallel_attention
from petatron.parallel.context.ulysses import UlyssesAllToAll
from petatron.parallel.context.zigzag import zigzag_positions


def split_batch(batch: Batch, axis: Axis) -> Batch:
    """This rank's tokens, with explicit positions; documents stay those of the whole sequence."""
    if axis.size == 1:
        return batch
    runs = zigzag_positions(axis.rank, axis.size, batch.tokens.shape[1])
    # Made on the device: a copy from the host would wait for it.
    here = torch.cat([torch.arange(run.start, run.stop, device=batch.tokens.device) for run in runs])
    tokens, labels, loss_mask = (x.index_select(1, here) for x in (batch.tokens, batch.labels, batch.loss_mask))
    positions = here if batch.positions is None else batch.positions.index_select(-1, here)
    return replace(batch, tokens=tokens, labels=labels, loss_mask=loss_mask, positions=positions)


class ContextParallelAttention(CoreAttention):
    """Core attention of a rank's part of the sequence: heads are exchanged over one axis, keys met over another.

    Either axis may have a single rank, over which nothing happens.
    """

    def __init__(self, core: CoreAttention, *, head_axis: Axis, kv_axis: Axis, kv_exchange: KvExchange) -> None:
        super().__init__(window=core.window, dropout=core.dropout)
        self.packing_kernels = core.packing_kernels
        self.ulysses = UlyssesAllToAll(head_axis)
        self.kv_axis = kv_axis
        self.kv_exchange: KvExchange = kv_exchange

    def forward(self, q_SBHE: Tensor, k_SBKE: Tensor, v_SBKE: Tensor, documents: Documents | None = None) -> Tensor:
        q, k, v = self.ulysses.scatter_heads_gather_sequence(q_SBHE, k_SBKE, v_SBKE)
        if self.kv_axis.size == 1:
            out = super().forward(q, k, v, documents)
        else:
            out = context_parallel_attention(
                q,
                k,
                v,
                self.kv_axis,
                kv_exchange=self.kv_exchange,
                window=self.window,
                dropout=self.dropout if self.training else 0.0,
                document_starts_BS=None if documents is None else documents.starts_BS,
            )
        return self.ulysses.gather_heads_scatter_sequence(out)


def apply_context_parallel(
    model: nn.Module, mesh: ParallelMesh, *, comm_type: str, hierarchical_sizes: tuple[int, ...] = ()
) -> None:
    """Fill every slot of core attention. `hierarchical_sizes`, for a2a+p2p: ranks that exchange heads, and ranks in a ring."""
    if mesh.cp.size == 1:
        return
    exchanging = {"p2p": 1, "all_gather": 1, "a2a": mesh.cp.size}.get(comm_type)
    if exchanging is None:
        assert (
            comm_type == "a2a+p2p" and len(hierarchical_sizes) == 2 and math.prod(hierarchical_sizes) == mesh.cp.size
        ), (comm_type, hierarchical_sizes)
        exchanging = hierarchical_sizes[0]
    way: KvExchange = "gather" if comm_type == "all_gather" else "ring"
    heads, keys = mesh.blocks("cp", exchanging), mesh.strides("cp", exchanging)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, CoreAttention):
                setattr(module, name, ContextParallelAttention(child, head_axis=heads, kv_axis=keys, kv_exchange=way))
