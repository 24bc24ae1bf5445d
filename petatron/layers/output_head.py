"""The output head: hidden states to token losses, or to logits.

The last product and the loss are one, so that logits exist for a few thousand tokens at a time. The gradient of a token's loss
times some weight needs the logits too, so where that weight is known beforehand (in training it is: the token's mask over the
number of tokens, times the loss scale) gradients are formed in the forward pass, with three large products; else the logits
are computed a second time in the backward pass. The weight gradient goes straight to where it is accumulated (`ops/linear_op.py`).

S sequence, B batch, D hidden, T tokens, V vocabulary rows on this device (padding included).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from petatron.kernels.linear_cross_entropy import REFERENCE, Columns, SoftmaxKernels, Wanted, linear_cross_entropy
from petatron.layers.linear import Product
from petatron.layers.ops.linear_op import TakesWeightGrads, Write, multiply_here
from petatron.layers.seam import Seam, same
from petatron.layers.token_layout import batch_first, from_row_order, from_rows, to_row_order, to_rows
from petatron.layers.vocabulary_shard import Vocabulary


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
