"""The output GEMM of a language model and its cross-entropy in one pass over chunks of tokens, without whole logits.

With T tokens and V columns the logits z = x W^T are the largest tensor of a training step (32,768 x 128,256 in bf16 is
8.4 GB), and their gradient is as large. Neither is needed at once: a token's loss and gradient need its own row only,

    loss_t = log(sum_v exp z_v) - z_t        d(w_t loss_t) / dz = w_t (softmax(z) - onehot(t))

so a chunk of C tokens goes through all of it while its logits exist once:

    z = x W^T          [C, V], a GEMM
    z <- gradient      one kernel in place: the row's maximum and sum of exponentials, then w (p - onehot)
    dx = z W           a GEMM
    dW += z^T x        a GEMM that accumulates in float32, submitted to the target, which runs it at once
    z is freed

That is three GEMMs, the fewest possible: nothing is recomputed in backward, because the gradient is computed in forward. Hence two
contracts. A token's weight in the final scalar (mask, 1 / number of tokens, loss scale) is given beforehand, as a tensor on the
device; the gradient that autograd later passes for the weighted sum of losses is one by contract and is never read, which would
cost a pass or a synchronization. And the weight's gradient is submitted during forward: the target must compute it before it
returns, since the next chunk reuses the memory.

Where the vocabulary is sharded over ranks, no rank has all of a token's logits. With m the maximum over the whole vocabulary,

    loss_t = log(sum_v exp(z_v - m)) - (z_t - m)

so ranks all-reduce one number per token, the maximum, and then two, the sum of exponentials and the target's logit, where a rank
without the target contributes 0. The gradient of the logits is local, and dx is this rank's partial sum.

Cost on an H200 for T = 16,384, V = 128,256 (C = 6,144: 1.58 GB of logits). GEMMs: 6 T V D floating-point operations, 37 ms for
D = 2048 and 75 ms for D = 4096 at 690 TFLOP/s. Softmax: 4.2 GB of logits read once from memory and written once, with a second
read that mostly hits the caches: 2.1 to 3.2 ms. Extra memory: one chunk of logits and dx.

T tokens, C tokens of a chunk, D hidden, V columns on this device (padding included).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from petatron.kernels.compute_dtype import to_compute_dtype
from petatron.kernels.linear_gemms import PLAIN_GEMM, Gemm

CHUNK_BYTES, LARGE_BATCH_CHUNK_BYTES = 7 << 28, 1 << 31
"""The largest size of a chunk's logits, and that of a batch of 32,768 tokens or more, whose activations dwarf it: 7,325 and 8,372
tokens of a vocabulary of 128,256 in bf16."""
_CHUNK_MULTIPLES = (2048, 128)
"""Multiples for the tokens of a chunk, the best first. The GEMM of its gradient with the weight reaches 687 TFLOP/s for 4,096 and
6,144 tokens, but 644 to 659 for 5,504, 6,656 and 7,168 (H200, 128,256 x 2,048); 128 are at least whole tiles."""

AllReduce = Callable[[Tensor], Tensor]
"""Reduces a tensor over ranks, in place."""

WriteWeightGrad = Callable[[Tensor, bool], object]
"""write(out, accumulate): writes a weight's gradient to `out`, or adds it."""

ChunkGradTarget = Callable[[WriteWeightGrad], None]
"""Receives the computation of a part of the weight's gradient, and runs it before returning."""


@dataclass(frozen=True, slots=True)
class VocabColumns:
    """The vocabulary columns of this rank: `num_columns` real ones from id `first_id` on, before any padding.

    `all_reduce_max` and `all_reduce_sum` reduce over the ranks with the others; None: there are no others.
    """

    num_columns: int
    first_id: int = 0
    all_reduce_max: AllReduce | None = None
    all_reduce_sum: AllReduce | None = None


@dataclass(frozen=True, slots=True)
class GradRequest:
    """Requests gradients: the weight of every token in the final scalar, and the target of the weight's gradient."""

    loss_weights_T: Tensor
    weight_grad_target: ChunkGradTarget | None


@dataclass(frozen=True, slots=True)
class CrossEntropyKernels:
    """Kernels on a chunk of logits [C, V], of which the first `num_columns` columns are real; a target that is none of those is
    another rank's. Values per token are in at least float32."""

    statistics: Callable[[Tensor, Tensor, int], Tensor]
    """(logits, targets, num_columns) -> [3, C]: maximum, sum of exponentials below it, target logit below it (0: not here)."""
    gradient_: Callable[[Tensor, Tensor, Tensor, Tensor, int], None]
    """(logits, targets, weights, log of the sum of exponentials, num_columns): overwrites logits by their gradient, padding by 0."""
    losses_and_gradient_: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    """(logits, targets, weights, num_columns) -> losses; both of the above in one, where the vocabulary is not sharded."""


def _is_local_target(targets_C: Tensor, num_columns: int) -> Tensor:
    return (targets_C >= 0) & (targets_C < num_columns)


def statistics(logits_CV: Tensor, targets_C: Tensor, num_columns: int) -> Tensor:
    wide = to_compute_dtype(logits_CV[:, :num_columns])
    if not num_columns:  # all of this rank's shard is padding
        zeros = wide.new_zeros(wide.shape[0])
        return torch.stack((zeros - float("inf"), zeros, zeros))
    max_logit = wide.amax(dim=1)
    below = wide - max_logit.unsqueeze(1)
    target_logit = below.gather(1, targets_C.clamp(0, num_columns - 1).unsqueeze(1)).squeeze(1)
    target_logit = target_logit.masked_fill(~_is_local_target(targets_C, num_columns), 0)
    return torch.stack((max_logit, below.exp_().sum(dim=1), target_logit))


def gradient_(
    logits_CV: Tensor, targets_C: Tensor, loss_weights_C: Tensor, log_total_C: Tensor, num_columns: int
) -> None:
    if num_columns:
        grad = (to_compute_dtype(logits_CV[:, :num_columns]) - log_total_C.unsqueeze(1)).exp_()
        onehot = _is_local_target(targets_C, num_columns).to(grad.dtype).unsqueeze(1)
        grad.scatter_add_(1, targets_C.clamp(0, num_columns - 1).unsqueeze(1), -onehot)
        logits_CV[:, :num_columns] = grad.mul_(loss_weights_C.unsqueeze(1))
    logits_CV[:, num_columns:] = 0


def losses_and_gradient_(logits_CV: Tensor, targets_C: Tensor, loss_weights_C: Tensor, num_columns: int) -> Tensor:
    max_logit, total, target_logit = statistics(logits_CV, targets_C, num_columns)
    log = total.log()
    gradient_(logits_CV, targets_C, loss_weights_C, max_logit + log, num_columns)
    return log - target_logit


REFERENCE = CrossEntropyKernels(statistics, gradient_, losses_and_gradient_)


def softcapped_kernels(kernels: CrossEntropyKernels, softcap: float) -> CrossEntropyKernels:
    """Returns the kernels of logits l that become c tanh(l / c).

    The first to see a chunk's logits caps them in place; the gradient of a capped logit y is multiplied by 1 - (y / c)^2.
    """

    def cap_(logits_CV: Tensor) -> None:
        logits_CV.copy_(softcap * torch.tanh(to_compute_dtype(logits_CV) / softcap))

    def slope(logits_CV: Tensor) -> Tensor:
        return 1.0 - (to_compute_dtype(logits_CV) / softcap).square_()

    def capped_statistics(logits_CV: Tensor, *arguments: Any) -> Tensor:
        cap_(logits_CV)
        return kernels.statistics(logits_CV, *arguments)

    def capped_gradient_(logits_CV: Tensor, *arguments: Any) -> None:
        slope_CV = slope(logits_CV)
        kernels.gradient_(logits_CV, *arguments)
        logits_CV.mul_(slope_CV)

    def capped_losses_and_gradient_(logits_CV: Tensor, *arguments: Any) -> Tensor:
        cap_(logits_CV)
        slope_CV = slope(logits_CV)
        losses = kernels.losses_and_gradient_(logits_CV, *arguments)
        logits_CV.mul_(slope_CV)
        return losses

    return CrossEntropyKernels(capped_statistics, capped_gradient_, capped_losses_and_gradient_)


def biased_kernels(kernels: CrossEntropyKernels, bias_V: Tensor, bias_grad_V: Tensor | None) -> CrossEntropyKernels:
    """Returns the kernels of logits to which a bias per column is added; its gradient is added to `bias_grad_V`.

    The first to see a chunk's logits adds it in place, as caps do.
    """

    def biased_statistics(logits_CV: Tensor, *arguments: Any) -> Tensor:
        return kernels.statistics(logits_CV.add_(bias_V), *arguments)

    def add_grad(logits_CV: Tensor) -> None:
        if bias_grad_V is not None:
            bias_grad_V.add_(logits_CV.sum(dim=0, dtype=bias_grad_V.dtype))

    def biased_gradient_(logits_CV: Tensor, *arguments: Any) -> None:
        kernels.gradient_(logits_CV, *arguments)
        add_grad(logits_CV)

    def biased_losses_and_gradient_(logits_CV: Tensor, *arguments: Any) -> Tensor:
        losses = kernels.losses_and_gradient_(logits_CV.add_(bias_V), *arguments)
        add_grad(logits_CV)
        return losses

    return CrossEntropyKernels(biased_statistics, biased_gradient_, biased_losses_and_gradient_)


def chunk_tokens(num_tokens: int, num_columns: int, element_size: int) -> int:
    """Returns the tokens of a chunk: as few chunks as the bound allows, since each adds to the whole weight's gradient, and even ones."""
    bound = LARGE_BATCH_CHUNK_BYTES if num_tokens >= 32768 else CHUNK_BYTES
    max_tokens = max(bound // max(num_columns * element_size, 1), 1)
    if num_tokens <= max_tokens:
        return max(num_tokens, 1)
    multiple = next((size for size in _CHUNK_MULTIPLES if size <= max_tokens), 1)
    max_tokens = max_tokens // multiple * multiple
    even = -(-num_tokens // -(-num_tokens // max_tokens))
    return min(-(-even // multiple) * multiple, max_tokens)


def _reduce_over_ranks(statistics_3C: Tensor, targets_C: Tensor, columns: VocabColumns) -> tuple[Tensor, Tensor]:
    """Returns losses and the log of the sum of exponentials, both over the whole vocabulary, from each rank's statistics."""
    max_logit, total, target_logit = statistics_3C
    if columns.all_reduce_max is None or columns.all_reduce_sum is None:
        log = total.log()
        return log - target_logit, max_logit + log
    global_max = columns.all_reduce_max(max_logit.clone())
    shift = max_logit - global_max
    target_logit = torch.where(_is_local_target(targets_C, columns.num_columns), target_logit + shift, 0)
    total, target_logit = columns.all_reduce_sum(torch.stack((total * shift.exp(), target_logit)))
    log = total.log()
    return log - target_logit, global_max + log


def _chunk_losses(
    logits_CV: Tensor,
    targets_C: Tensor,
    loss_weights_C: Tensor | None,
    columns: VocabColumns,
    kernels: CrossEntropyKernels,
) -> Tensor:
    """Returns the losses of a chunk; its logits become their gradient where tokens have weights."""
    if loss_weights_C is not None and columns.all_reduce_max is None:
        return kernels.losses_and_gradient_(logits_CV, targets_C, loss_weights_C, columns.num_columns)
    losses, log_total = _reduce_over_ranks(
        kernels.statistics(logits_CV, targets_C, columns.num_columns), targets_C, columns
    )
    if loss_weights_C is not None:
        kernels.gradient_(logits_CV, targets_C, loss_weights_C, log_total, columns.num_columns)
    return losses


@torch.no_grad()
def linear_cross_entropy(
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    columns: VocabColumns,
    *,
    grad_request: GradRequest | None = None,
    gemm: Gemm = PLAIN_GEMM,
    kernels: CrossEntropyKernels = REFERENCE,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Returns each token's loss, not weighted, and the gradient of the weighted sum of losses with respect to x.

    Targets are ids of the whole vocabulary; one that is no id needs a weight of zero. `grad_request` None evaluates: the gradient
    is None. The weight's gradient goes to `grad_request.weight_grad_target` chunk by chunk before this returns; that of no tokens is
    zero, and goes there too.
    """
    tokens = chunk_size or chunk_tokens(x_TD.shape[0], weight_VD.shape[0], x_TD.element_size())
    targets_T = targets_T - columns.first_id
    weights_T = None if grad_request is None else grad_request.loss_weights_T.contiguous()
    losses_T = x_TD.new_empty(x_TD.shape[0], dtype=torch.promote_types(x_TD.dtype, torch.float32))
    grad_x_TD = None if grad_request is None else torch.empty_like(x_TD)

    def run_chunk(part: slice) -> None:  # a function, so that a chunk's logits are freed before the next chunk's exist
        x_CD = x_TD[part]
        logits_CV, saved = gemm.forward(x_CD, weight_VD)
        weights_C = None if weights_T is None else weights_T[part]
        losses_T[part] = _chunk_losses(logits_CV, targets_T[part], weights_C, columns, kernels)
        if grad_request is not None and grad_x_TD is not None:
            grad_x_TD[part], weight_grad = gemm.backward(logits_CV, weight_VD, saved)
            if grad_request.weight_grad_target is not None:
                grad_request.weight_grad_target(partial(weight_grad.write, x_CD if weight_grad.needs_input else None))

    for start in range(0, x_TD.shape[0], tokens):
        run_chunk(slice(start, start + tokens))
    if not x_TD.shape[0] and grad_request is not None and grad_request.weight_grad_target is not None:
        grad_request.weight_grad_target(lambda out, accumulate: None if accumulate else out.zero_())
    return losses_T, grad_x_TD


@torch.no_grad()
def linear_losses_and_greedy(
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    columns: VocabColumns,
    *,
    gemm: Gemm = PLAIN_GEMM,
    kernels: CrossEntropyKernels = REFERENCE,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns each token's loss, and whether its target is the most likely id; of equal logits the smallest id is.

    For evaluation: chunk by chunk like `linear_cross_entropy`, without gradients.
    """
    tokens = chunk_size or chunk_tokens(x_TD.shape[0], weight_VD.shape[0], x_TD.element_size())
    targets_T = targets_T - columns.first_id
    losses_T = x_TD.new_empty(x_TD.shape[0], dtype=torch.promote_types(x_TD.dtype, torch.float32))
    greedy_T = torch.empty_like(targets_T, dtype=torch.bool)

    def run_chunk(part: slice) -> None:
        logits_CV, _ = gemm.forward(x_TD[part], weight_VD)
        values = kernels.statistics(logits_CV, targets_T[part], columns.num_columns)
        losses_T[part], _ = _reduce_over_ranks(values, targets_T[part], columns)
        greedy_T[part] = _argmax_over_ranks(logits_CV, values[0], columns) == targets_T[part]

    for start in range(0, x_TD.shape[0], tokens):
        run_chunk(slice(start, start + tokens))
    return losses_T, greedy_T


def _argmax_over_ranks(logits_CV: Tensor, max_logit_C: Tensor, columns: VocabColumns) -> Tensor:
    """Returns the first of the most likely columns over the whole vocabulary, counted from this rank's first one."""
    width = columns.num_columns
    here = logits_CV[:, :width].argmax(dim=1) if width else torch.zeros_like(max_logit_C, dtype=torch.int64)
    if columns.all_reduce_max is None:
        return here
    has_max = max_logit_C == columns.all_reduce_max(max_logit_C.clone())
    # As floating-point numbers, which every backend reduces; ids are exact in them.
    first = torch.where(has_max, -(here + columns.first_id).to(torch.float64), -float("inf"))
    return -columns.all_reduce_max(first).long() - columns.first_id
