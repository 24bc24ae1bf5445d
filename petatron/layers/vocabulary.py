"""Token ids in, token losses out: the two ends of a language model, which share one view of the vocabulary.

Both ends' weight gradients are as large as the weights and go straight to where they are accumulated (see `product.py`). The
last product and the loss are one, so that logits exist for a few thousand tokens at a time. The gradient of a token's loss
times some weight needs the logits too, so where that weight is known beforehand (in training it is: the token's mask over the
number of tokens, times the loss scale) gradients are formed in the forward pass, with three large products; else the logits
are computed a second time in the backward pass.

S sequence, B batch, D hidden, T tokens, V vocabulary rows on this device (padding included).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from petatron.kernels import embedding as embedding_reference
from petatron.kernels.linear_loss import REFERENCE, Columns, SoftmaxKernels, Wanted, linear_cross_entropy
from petatron.layers.linear import Product
from petatron.layers.product import TakesWeightGrads, Write, multiply_here
from petatron.layers.rows import batch_first, from_row_order, from_rows, to_row_order, to_rows
from petatron.layers.seam import Seam, same


class EmbeddingKernels(Protocol):
    """`kernels/embedding.py` or a faster twin."""

    def embedding_grad(self, ids_T: Tensor, grad_TD: Tensor, out_VD: Tensor, *, accumulate: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Which rows of the vocabulary this device holds, and how ranks that hold the others are asked.

    `size` ids exist; this device holds `rows` of them from `first` on. `ranks` combine partial results by maximum and by sum,
    None where all is here; `join` puts partial logits [V, ...] one after the other along dimension 0.
    """

    size: int
    first: int
    rows: int
    ranks: tuple[Seam, Seam] | None = None
    join: Seam = same

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows of the table held here, and which ids lie elsewhere (their row is -1); None when all are here."""
        if self.rows == self.size:
            return ids, None
        local = ids - self.first
        elsewhere = (local < 0) | (local >= self.rows)
        return local.masked_fill(elsewhere, -1), elsewhere

    def whole_logits(self, logits: Tensor) -> Tensor:
        """Logits over all ids, on every device; for generation and tests, never for training."""
        return self.join(logits.movedim(-1, 0).contiguous()).movedim(0, -1)[..., : self.size]


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_BS: Tensor, elsewhere_BS: Tensor | None, weight: Tensor, table: TokenEmbedding
    ) -> Tensor:
        ctx.save_for_backward(rows_BS)
        ctx.weight, ctx.table = weight, table
        if elsewhere_BS is None:
            return F.embedding(rows_BS, weight)
        return F.embedding(rows_BS.clamp(min=0), weight).masked_fill_(elsewhere_BS.unsqueeze(-1), 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor | None, None]:
        (rows_BS,) = ctx.saved_tensors
        # Tokens that lie elsewhere come along: the kernel passes over their row, -1.
        ids_T, grad_TD = rows_BS.flatten(), grads[0].contiguous().flatten(0, 1)
        taker, kernels = ctx.table.weight_grads, ctx.table.kernels
        if taker is None:
            out = torch.empty_like(ctx.weight, dtype=torch.promote_types(ctx.weight.dtype, torch.float32))
            kernels.embedding_grad(ids_T, grad_TD, out, accumulate=False)
            return None, None, out.to(ctx.weight.dtype), None
        taker.take(
            ctx.weight,
            lambda out, accumulate: kernels.embedding_grad(ids_T, grad_TD, out, accumulate=accumulate),
            now=True,
        )
        return None, None, None, None


class TokenEmbedding(nn.Module):
    """Rows of a table, one per token id: [B, S] to [S, B, D], sequences one after the other in memory."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.vocabulary = Vocabulary(vocab_size, 0, vocab_size)
        self.leave: Seam = same
        self.weight_grads: TakesWeightGrads | None = None
        self.kernels: EmbeddingKernels = embedding_reference

    def forward(self, ids_BS: Tensor) -> Tensor:
        rows_BS, elsewhere_BS = self.vocabulary.local(ids_BS)
        found: Tensor = _Lookup.apply(rows_BS, elsewhere_BS, self.weight, self)  # pyright: ignore[reportAssignmentType]
        return self.leave(found.transpose(0, 1))


class PositionEmbedding(nn.Module):
    """A learned vector per position, to be added to the tokens: [S] or [B, S] to [S, 1 or B, D]."""

    def __init__(self, num_positions: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_positions, hidden_size))
        self.leave: Seam = same

    def forward(self, positions: Tensor) -> Tensor:
        rows = positions.unsqueeze(1) if positions.dim() == 1 else positions.t()
        return self.leave(F.embedding(rows, self.weight))


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_SBD: Tensor, weight: Tensor, targets_SB: Tensor, weights_SB: Tensor | None, head: OutputHead
    ) -> Tensor:
        """`weights_SB` are the gradients that will come back, if they are known."""
        by_batch = batch_first(x_SBD)
        rows, targets = to_rows(x_SBD, by_batch=by_batch), to_row_order(targets_SB, by_batch=by_batch)
        known = weights_SB is not None and ctx.needs_input_grad[0]
        weights = to_row_order(weights_SB, by_batch=by_batch) if known and weights_SB is not None else None
        losses, grad, weight_grad = head.losses_of_rows(rows, weight, targets, weights)
        ctx.by_batch, ctx.known, ctx.weight, ctx.head = by_batch, known, weight, head
        ctx.save_for_backward(*(grad, weight_grad) if known else (rows, targets))
        return from_row_order(losses, targets_SB, by_batch=by_batch)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.known:
            grad, weight_grad = ctx.saved_tensors
        else:
            rows, targets = ctx.saved_tensors
            weights = to_row_order(grads[0], by_batch=ctx.by_batch)
            _, grad, weight_grad = ctx.head.losses_of_rows(rows, ctx.weight, targets, weights)
        if weight_grad is not None:
            weight_grad = weight_grad.to(ctx.weight.dtype)
        like = grads[0].unsqueeze(-1)
        return from_rows(grad, like, by_batch=ctx.by_batch), weight_grad, None, None, None


class OutputHead(nn.Module):
    """Hidden states to losses, or to logits over this device's part of the vocabulary.

    A tied head has no weight of its own and multiplies with the token embedding's.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, tied: bool) -> None:
        super().__init__()
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.vocabulary = Vocabulary(vocab_size, 0, vocab_size)
        self.product: Product = multiply_here
        self.enter: Seam = same
        self.weight_grads: TakesWeightGrads | None = None
        self.kernels: SoftmaxKernels = REFERENCE

    def forward(self, x_SBD: Tensor, embedding: Tensor | None) -> Tensor:
        """Logits [S, B, V]."""
        return self.product(x_SBD, self._weight(embedding))

    def losses(
        self, x_SBD: Tensor, embedding: Tensor | None, targets_SB: Tensor, *, weights_SB: Tensor | None = None
    ) -> Tensor:
        """Token losses [S, B]. With `weights_SB` their gradient must be just that: it is used before it is known."""
        args = (self.enter(x_SBD), self._weight(embedding), targets_SB, weights_SB, self)
        return _LinearLoss.apply(*args)  # pyright: ignore[reportReturnType]

    def losses_of_rows(
        self, x_TD: Tensor, weight: Tensor, targets_T: Tensor, weights_T: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Losses; with weights also the gradients of the rows and, if nobody takes it, of the weight."""
        ranks = self.vocabulary.ranks
        columns = Columns(self.vocabulary.rows, self.vocabulary.first, *(ranks or ()))
        compute = partial(linear_cross_entropy, x_TD, weight, targets_T, columns, kernels=self.kernels)
        if weights_T is None:
            return *compute(), None
        weights_T = weights_T.to(torch.promote_types(x_TD.dtype, torch.float32))
        if not weight.requires_grad:
            return *compute(wanted=Wanted(weights_T, None)), None
        found: list[tuple[Tensor, Tensor | None]] = []

        def write(out: Tensor, accumulate: bool) -> None:
            adds = [accumulate]

            def deliver(chunk: Write) -> None:
                chunk(out, adds[0])
                adds[0] = True

            found.append(compute(wanted=Wanted(weights_T, deliver)))

        own = None
        if self.weight_grads is None:
            own = torch.empty_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
            write(own, False)
        else:
            self.weight_grads.take(weight, write, now=True)
        return *found[0], own

    def _weight(self, embedding: Tensor | None) -> Tensor:
        weight = self.weight if self.weight is not None else embedding
        assert weight is not None, "a tied head needs the embedding's weight"
        return weight
