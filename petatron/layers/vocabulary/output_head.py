"""The output head: hidden states to token losses, or to logits.

The last GEMM and the loss are fused, so that logits exist for a few thousand tokens at a time. A token loss's gradient, times its
weight, needs the logits too. Where that weight is known beforehand (in training it is: the token's mask over the number of tokens,
times the loss scale) gradients are computed in forward, with three large GEMMs; else the logits are recomputed in backward. The
weight gradient is accumulated straight into its weight-gradient target (`ops/linear_op.py`).

The loss is vocabulary-parallel: logits stay sharded over vocabulary shards, and `kernels/fused_linear_cross_entropy.py` all-reduces the
max, the sum of exponentials and the target's logit of each token.

S sequence, B batch, D hidden, T tokens, V vocabulary rows on this device (padding included).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from petatron.base.autograd_op import AutogradOp, first_derivative
from petatron.kernels.cpu_matmul import matmul
from petatron.kernels.fused_linear_cross_entropy import (
    REFERENCE,
    CrossEntropyKernels,
    GradRequest,
    VocabColumns,
    WriteWeightGrad,
    biased_kernels,
    linear_cross_entropy,
    linear_losses_and_greedy,
    softcapped_kernels,
)
from petatron.kernels.linear_gemms import PLAIN_GEMM, Gemm
from petatron.kernels.losses_and_entropies import losses_and_entropies
from petatron.layers.linear import LinearOp
from petatron.layers.ops.linear_op import WeightGradTarget, local_linear
from petatron.layers.parallel_slots import CommSlot, TensorSlot, identity
from petatron.layers.token_rows import from_row_order, from_rows, is_batch_first, to_row_order, to_rows
from petatron.layers.vocabulary.vocabulary_shard import VocabShard


class _LinearCrossEntropy(AutogradOp):
    @staticmethod
    def forward(
        ctx: Any,
        x_SBD: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets_SB: Tensor,
        loss_weights_SB: Tensor | None,
        head: OutputHead,
    ) -> Tensor:
        """`loss_weights_SB` are the losses' gradients, if they are known before backward."""
        batch_first = is_batch_first(x_SBD)
        rows, targets = to_rows(x_SBD, batch_first=batch_first), to_row_order(targets_SB, batch_first=batch_first)
        weights = None
        if loss_weights_SB is not None and ctx.needs_input_grad[0]:
            weights = to_row_order(loss_weights_SB, batch_first=batch_first)
        known = weights is not None
        losses, grads = head.losses_and_grads(rows, weight, targets, weights)
        ctx.batch_first, ctx.weights_known, ctx.weight, ctx.head = batch_first, known, weight, head
        ctx.save_for_backward(*grads if known else (rows, targets))
        return from_row_order(losses, targets_SB, batch_first=batch_first)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.weights_known:
            grad, weight_grad, bias_grad = ctx.saved_tensors
        else:
            rows, targets = ctx.saved_tensors
            weights = to_row_order(grads[0], batch_first=ctx.batch_first)
            _, (grad, weight_grad, bias_grad) = ctx.head.losses_and_grads(rows, ctx.weight, targets, weights)
        if weight_grad is not None:
            weight_grad = weight_grad.to(ctx.weight.dtype)
        x_grad = from_rows(grad, grads[0].unsqueeze(-1), batch_first=ctx.batch_first)
        return x_grad, weight_grad, bias_grad, None, None, None


class HeadGrads(NamedTuple):
    """The gradients of the head's input, and of its weight and bias where autograd gets them."""

    rows_TD: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


LossGemmFactory = Callable[[Tensor], Gemm]
"""Makes the GEMMs of a micro-batch's losses and gradients from its tokens' weights in the loss."""

LogitsGemm = Callable[[Tensor, Tensor], Tensor]
"""x W^T of the rows whose logits generation needs, and the head's weight."""


def plain_loss_gemm(loss_weights_T: Tensor) -> Gemm:
    return PLAIN_GEMM


def plain_logits_gemm(x_RD: Tensor, weight_VD: Tensor) -> Tensor:
    return matmul(x_RD, weight_VD.t())


class OutputHead(nn.Module):
    """Maps hidden states to losses, or to logits over this rank's vocabulary shard.

    A tied head has no weight of its own and uses the token embedding's. `input_scale` is a factor on its input, and so on the
    logits; `softcap` bounds them. A `bias` per id (BERT) is added to logits; it has no softcap beside it.
    """

    tensor_slots: Mapping[str, TensorSlot] = {
        "linear_op": "column linear",
        "input_comm": "whole sequence",
        "vocab_shard": "vocabulary shard",
        "weight_grad_target": "weight-gradient target",
    }

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tied: bool,
        input_scale: float | None = None,
        softcap: float | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        assert softcap is None or not bias, "logits are capped or get a bias"
        self.input_scale, self.softcap = input_scale, softcap
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.bias = nn.Parameter(torch.empty(vocab_size)) if bias else None
        self.vocab_shard = VocabShard(vocab_size, 0, vocab_size)
        self.linear_op: LinearOp = local_linear
        self.input_comm: CommSlot = identity
        self.weight_grad_target: WeightGradTarget | None = None
        self.kernels: CrossEntropyKernels = REFERENCE
        self.gemm: Gemm = PLAIN_GEMM
        self.make_loss_gemm: LossGemmFactory = plain_loss_gemm
        self.logits_gemm: LogitsGemm = plain_logits_gemm

    def kernel_slots(self) -> Mapping[str, str]:
        return {"kernels": "softmax and loss"}

    def forward(self, x_SBD: Tensor, embedding_weight: Tensor | None) -> Tensor:
        """Returns logits [S, B, V]."""
        return self._adjusted(self.linear_op(self._scaled(x_SBD), self.used_weight(embedding_weight), None))

    def gathered_input(self, x_SBD: Tensor) -> Tensor:
        """Gathers what sequence parallelism has sharded."""
        return self.input_comm(x_SBD)

    def logits_of_rows(self, x_RD: Tensor, embedding_weight: Tensor | None) -> Tensor:
        """Returns logits [R, vocabulary] of some rows of the gathered input, whole on every rank."""
        logits = self.logits_gemm(self._scaled(x_RD), self.used_weight(embedding_weight))
        return self.vocab_shard.full_logits(self._adjusted(logits))

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.input_scale is None else x * self.input_scale

    def _adjusted(self, logits: Tensor) -> Tensor:
        logits = logits if self.bias is None else logits + self.bias
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def _loss_kernels(self, bias_grad_V: Tensor | None = None) -> CrossEntropyKernels:
        if self.bias is not None:
            return biased_kernels(self.kernels, self.bias, bias_grad_V)
        return self.kernels if self.softcap is None else softcapped_kernels(self.kernels, self.softcap)

    def losses(
        self,
        x_SBD: Tensor,
        embedding_weight: Tensor | None,
        targets_SB: Tensor,
        *,
        loss_weights_SB: Tensor | None = None,
    ) -> Tensor:
        """Returns token losses [S, B]. With `loss_weights_SB` their gradient must be just that: it is used before backward."""
        x_SBD = self.input_comm(self._scaled(x_SBD))
        return self.gathered_losses(x_SBD, embedding_weight, targets_SB, loss_weights_SB=loss_weights_SB)

    def gathered_losses(
        self,
        x_SBD: Tensor,
        embedding_weight: Tensor | None,
        targets_SB: Tensor,
        *,
        loss_weights_SB: Tensor | None = None,
    ) -> Tensor:
        """Returns the token losses of an input that is scaled and gathered."""
        weight = self.used_weight(embedding_weight)
        return _LinearCrossEntropy.apply(x_SBD, weight, self.bias, targets_SB, loss_weights_SB, self)  # pyright: ignore[reportReturnType]

    def losses_and_greedy(
        self, x_SBD: Tensor, embedding_weight: Tensor | None, targets_SB: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns token losses [S, B], and whether each target is the most likely id; without gradients."""
        x_SBD = self.input_comm(self._scaled(x_SBD))
        batch_first = is_batch_first(x_SBD)
        rows, targets = to_rows(x_SBD, batch_first=batch_first), to_row_order(targets_SB, batch_first=batch_first)
        weight = self.used_weight(embedding_weight)
        kernels = {"gemm": self.gemm, "kernels": self._loss_kernels()}
        of_rows = linear_losses_and_greedy(rows, weight, targets, self._columns(), **kernels)
        losses, greedy = (from_row_order(x, targets_SB, batch_first=batch_first) for x in of_rows)
        return losses, greedy

    def losses_and_entropies(
        self, x_SBD: Tensor, embedding_weight: Tensor | None, targets_SB: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns token losses [S, B], and the entropies of their distributions; with gradients, for which logits are saved."""
        logits_SBV = self(x_SBD, embedding_weight)
        losses, entropies = losses_and_entropies(logits_SBV.flatten(0, 1), targets_SB.reshape(-1), self._columns())
        return losses.view(targets_SB.shape), entropies.view(targets_SB.shape)

    def losses_and_grads(
        self, x_TD: Tensor, weight: Tensor, targets_T: Tensor, loss_weights_T: Tensor | None
    ) -> tuple[Tensor, HeadGrads]:
        """Returns the losses; with weights also the gradients of the rows, of the weight if it has no weight-gradient target, and of
        the bias."""
        bias_grad = None
        if loss_weights_T is not None and self.bias is not None and self.bias.requires_grad:
            bias_grad = torch.zeros_like(self.bias, dtype=torch.promote_types(self.bias.dtype, torch.float32))
        kernels = self._loss_kernels(bias_grad)
        compute = partial(linear_cross_entropy, x_TD, weight, targets_T, self._columns(), kernels=kernels)
        if loss_weights_T is None:
            return compute(gemm=self.gemm)[0], HeadGrads(None, None, None)
        loss_weights_T = loss_weights_T.to(torch.promote_types(x_TD.dtype, torch.float32))
        compute = partial(compute, gemm=self.make_loss_gemm(loss_weights_T))
        results: list[tuple[Tensor, Tensor | None]] = []
        weight_grad = None

        def write(out: Tensor, accumulate: bool) -> None:
            accumulates = [accumulate]

            def deliver(chunk: WriteWeightGrad) -> None:
                chunk(out, accumulates[0])
                accumulates[0] = True

            results.append(compute(grad_request=GradRequest(loss_weights_T, deliver)))

        if not weight.requires_grad:
            results.append(compute(grad_request=GradRequest(loss_weights_T, None)))
        elif self.weight_grad_target is None:
            weight_grad = torch.empty_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
            write(weight_grad, False)
        else:
            self.weight_grad_target.submit(weight, write, now=True)
        [(losses, grad)] = results
        bias_grad = None if bias_grad is None or self.bias is None else bias_grad.to(self.bias.dtype)
        return losses, HeadGrads(grad, weight_grad, bias_grad)

    def _columns(self) -> VocabColumns:
        shard = self.vocab_shard
        return VocabColumns(shard.num_ids, shard.first_id, *(shard.all_reduce_max_sum or ()))

    def used_weight(self, embedding_weight: Tensor | None) -> Tensor:
        """Returns the head's own weight, or that of the embedding which it is tied to."""
        weight = self.weight if self.weight is not None else embedding_weight
        assert weight is not None, "a tied head needs the embedding's weight"
        return weight
