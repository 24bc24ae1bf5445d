"""Token and position embeddings. The token embedding's gradient is accumulated straight into its weight-gradient target.

S sequence, B batch, D hidden, T tokens, V vocabulary rows on this device (padding included).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petatron.base.autograd_op import AutogradOp, first_derivative
from petatron.kernels import embedding_grad as embedding_reference
from petatron.layers.ops.linear_op import WeightGradTarget
from petatron.layers.parallel_slots import CommSlot, TensorSlot, identity
from petatron.layers.vocabulary.vocabulary_shard import VocabShard


class EmbeddingKernels(Protocol):
    """See `kernels/embedding_grad.py`."""

    embedding_grad: Callable[..., None]


class _EmbeddingLookup(AutogradOp):
    @staticmethod
    def forward(
        ctx: Any, rows_BS: Tensor, elsewhere_BS: Tensor | None, weight: Tensor, embedding: TokenEmbedding
    ) -> Tensor:
        ctx.save_for_backward(rows_BS)
        ctx.weight, ctx.embedding = weight, embedding
        if elsewhere_BS is None:
            return F.embedding(rows_BS, weight)
        return F.embedding(rows_BS.clamp(min=0), weight).masked_fill_(elsewhere_BS.unsqueeze(-1), 0)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor | None, None]:
        (rows_BS,) = ctx.saved_tensors
        # Ids of other ranks' vocabulary shards have row -1, which the kernel skips.
        ids_T, grad_TD = rows_BS.flatten(), grads[0].contiguous().flatten(0, 1)
        target, kernels = ctx.embedding.weight_grad_target, ctx.embedding.kernels
        if target is None:
            out = torch.empty_like(ctx.weight, dtype=torch.promote_types(ctx.weight.dtype, torch.float32))
            kernels.embedding_grad(ids_T, grad_TD, out, accumulate=False)
            return None, None, out.to(ctx.weight.dtype), None

        def write(out: Tensor, accumulate: bool) -> None:
            kernels.embedding_grad(ids_T, grad_TD, out, accumulate=accumulate)

        target.submit(ctx.weight, write, now=True)
        return None, None, None, None


class TokenEmbedding(nn.Module):
    """Looks up token ids: [B, S] to [S, B, D], batch first in memory."""

    tensor_slots: Mapping[str, TensorSlot] = {
        "output_comm": "summed output",
        "vocab_shard": "vocabulary shard",
        "weight_grad_target": "weight-gradient target",
    }

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.vocab_shard = VocabShard(vocab_size, 0, vocab_size)
        self.output_comm: CommSlot = identity
        self.weight_grad_target: WeightGradTarget | None = None
        self.kernels: EmbeddingKernels = embedding_reference

    def kernel_slots(self) -> Mapping[str, str]:
        return {"kernels": "embedding gradient"}

    def forward(self, ids_BS: Tensor) -> Tensor:
        rows_BS, elsewhere_BS = self.vocab_shard.to_local_ids(ids_BS)
        vectors: Tensor = _EmbeddingLookup.apply(rows_BS, elsewhere_BS, self.weight, self)  # pyright: ignore[reportAssignmentType]
        return self.output_comm(vectors.transpose(0, 1))


class PositionEmbedding(nn.Module):
    """Looks up learned position vectors, to be added to the token embedding: [S] or [B, S] to [S, 1 or B, D]."""

    tensor_slots: Mapping[str, TensorSlot] = {"output_comm": "sequence shard"}

    def __init__(self, num_positions: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_positions, hidden_size))
        self.output_comm: CommSlot = identity

    def forward(self, positions: Tensor) -> Tensor:
        rows = positions.unsqueeze(1) if positions.dim() == 1 else positions.t()
        return self.output_comm(F.embedding(rows, self.weight))
