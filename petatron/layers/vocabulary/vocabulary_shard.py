"""The vocabulary shard of a tensor-parallel rank, shared by token embedding and output head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from petatron.base.autograd_op import AutogradOp, first_derivative
from petatron.layers.parallel_slots import CommSlot, identity


class _GatherLogits(AutogradOp):
    """All-gathers logits of a loss that every rank computes: the gradient is whole on each, and a rank needs its own columns of it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, shard: VocabShard) -> Tensor:
        ctx.shard, ctx.num_columns = shard, logits.shape[-1]
        return shard.all_gather_logits(logits.movedim(-1, 0).contiguous()).movedim(0, -1)[..., : shard.vocab_size]

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shard: VocabShard = ctx.shard
        columns = grads[0][..., shard.first_id : shard.first_id + shard.num_ids]
        return F.pad(columns, (0, ctx.num_columns - shard.num_ids)), None


@dataclass(frozen=True, slots=True)
class VocabShard:
    """The rows of the vocabulary on this rank, and the collectives over the ranks with the others.

    Of `vocab_size` ids this rank has `num_ids` from `first_id` on. `all_reduce_max_sum` reduce partial results by maximum and by
    sum, None where the vocabulary is not sharded; `all_gather_logits` concatenates partial logits [V, ...] along dimension 0.
    """

    vocab_size: int
    first_id: int
    num_ids: int
    all_reduce_max_sum: tuple[CommSlot, CommSlot] | None = None
    all_gather_logits: CommSlot = identity

    def to_local_ids(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns rows of the local table, -1 for ids of other shards, and the mask of those ids; None when all are here."""
        if self.num_ids == self.vocab_size:
            return ids, None
        local = ids - self.first_id
        elsewhere = (local < 0) | (local >= self.num_ids)
        return local.masked_fill(elsewhere, -1), elsewhere

    def full_logits(self, logits: Tensor) -> Tensor:
        """Returns logits over all ids, on every rank. In backward each rank takes its shard of the gradient, which all of them have."""
        if self.all_reduce_max_sum is None:  # not sharded
            return logits[..., : self.vocab_size]
        return _GatherLogits.apply(logits, self)  # pyright: ignore[reportReturnType]
