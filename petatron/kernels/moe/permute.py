"""Permutes tokens into expert order, and back; the experts' GEMMs are in `grouped_gemm.py`.

T tokens make K choices each; every choice of an expert becomes a row, and the rows of one expert are adjacent. `permute` copies each
token to its rows, `unpermute` sums each token's rows. A `Permutation` has both directions, the choice of every row and the row of
every choice, so that the backward of each is again a copy or a sum: no gradient is scattered with atomic adds, and results do not
depend on the order in which a device runs.

There are as many rows as choices, or, padded, a fixed number per expert. With padding every shape is known without reading the data;
so it is with `max_rows`, a sufficient number of rows, of which dropped choices get those after the rows of all experts. No GEMM
computes these: its output there is anything, NaN included, and sums skip it.

Where the router's weight w is applied decides how many bytes move. With a the activation of a row and g the gradient of the token,

    w (W a) = W (w a),     dL/dw = g . (W a) = (W^T g) . a

so the weight may be applied to the activation (`weighted_activation`), whose backward has W^T g and a anyway: the weight's gradient
costs no extra read, the last GEMM's output is not saved, and unpermute is a plain sum. Applied in `unpermute`, it costs one more read
of all rows [R, D] in backward, and saves them until then.

Bytes of an expert layer, forward and backward, in units of elements of 2 bytes (D width, F inner width, N weights of all experts):

    forward   permute T D + R D, activation 3 R F, unpermute R D + T D
    backward  copy T D + R D, activation 6 R F, sum R D + T D, rows recomputed (if not saved) T D + R D, gradients to float32 3 N

For T 32768, predicted at 4 TB/s with GEMMs at 620 TFLOP/s (rows recomputed), and measured on one H200 (rows saved):

    128 experts, K 8, D 2048, F 768      3.0 + 12.0 ms, 495 useful TFLOP/s    14.8 ms, 503
    8 experts, K 2, D 4096, F 14336      7.1 + 112 ms, 583                    115.8 ms, 598

T tokens, K choices per token, R rows, E experts, D width, O output width, G inner width before and F after the activation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from petatron.base.autograd_op import AutogradOp
from petatron.kernels.activation import (
    GATE_ACTIVATIONS,
    GluVariant,
    activation,
    activation_backward,
    gated_activation,
    gated_activation_backward,
)
from petatron.kernels.compute_dtype import to_compute_dtype
from petatron.kernels.moe.grouped_gemm import ExpertCounts, WriteGrad, write_grad


@dataclass(frozen=True, slots=True)
class Permutation:
    """The row of every choice, and the choice of every row.

    choice_R: for each row its choice (token x K + position); anything where the row is padding. Rows beyond the counts hold
        dropped choices.
    row_TK: for each choice its row; where the choice has none, a row that no expert has.
    counts: rows of each expert, padding included.
    valid_R: whether the row is no padding; None when all are.
    kept_TK: whether the choice has a row of an expert; None when all have.
    """

    choice_R: Tensor
    row_TK: Tensor
    counts: ExpertCounts
    valid_R: Tensor | None = None
    kept_TK: Tensor | None = None

    @property
    def token_R(self) -> Tensor:
        return self.choice_R // self.row_TK.shape[1]

    def truncate(self, rows: int) -> Permutation:
        """Drops the rows from a sufficient number on."""
        return replace(self, choice_R=self.choice_R[:rows])


@dataclass(frozen=True, slots=True)
class SortedChoices:
    """All choices sorted by expert: the `order` of the flat choices, the position of each, and the start of each expert.

    The last start, of expert index E, is that of the dropped choices.
    """

    order: Tensor
    sorted_position_TK: Tensor
    experts_TK: Tensor
    starts: Tensor

    @property
    def counts_E(self) -> Tensor:
        return self.starts.diff()

    @property
    def position_in_expert_TK(self) -> Tensor:
        """Counts the choices of the same expert before each one."""
        return self.sorted_position_TK - self.starts[self.experts_TK]


def sort_by_expert(experts_TK: Tensor, num_experts: int, *, priority: Tensor | None = None) -> SortedChoices:
    """Sorts choices by expert; the expert `num_experts` marks dropped choices, and comes last.

    Within an expert they stay in token order, or descend by `priority` (one number per choice).
    """
    # A device radix-sorts by a few bits per pass: one or two passes for a small type, eight or more for int64.
    assert num_experts < 2**15
    key = experts_TK.flatten().to(torch.uint8 if num_experts < 2**8 else torch.int16)
    if priority is None:
        key, order = key.sort(stable=True)
    else:
        by_priority = priority.flatten().argsort(stable=True, descending=True)
        key, order = key[by_priority].sort(stable=True)
        order = by_priority[order]
    # Where each expert starts; counting with atomic adds is slow when few experts have many choices.
    starts = torch.searchsorted(key, torch.arange(num_experts + 1, dtype=key.dtype, device=key.device))
    return SortedChoices(order, inverse_permutation(order).view_as(experts_TK), experts_TK, starts)


def inverse_permutation(order: Tensor) -> Tensor:
    """Returns the inverse of a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))


def build_permutation(
    experts_TK: Tensor,
    num_experts: int,
    *,
    may_drop: bool = False,
    capacity: int | None = None,
    max_rows: int | None = None,
) -> Permutation:
    """Sorts choices into rows by expert, within an expert in token order.

    `may_drop`: some choices may be `num_experts`, which marks them dropped; the number of rows is then read back from the device,
    unless `max_rows` is sufficient in any case: the counts may cover fewer. With a `capacity` every expert gets that many rows and
    nothing is read back; no expert may be chosen more often.
    """
    sorted_choices = sort_by_expert(experts_TK, num_experts)
    order = sorted_choices.order
    kept = experts_TK < num_experts if may_drop else None
    if capacity is None:
        counts = sorted_choices.counts_E
        if may_drop and max_rows is None:
            max_rows = int(counts.sum())
        return Permutation(order[:max_rows], sorted_choices.sorted_position_TK, counts, None, kept)
    rows = num_experts * capacity
    # Dropped choices share one extra row, which is cut off.
    row_TK = torch.where(experts_TK < num_experts, experts_TK * capacity + sorted_choices.position_in_expert_TK, rows)
    choice = torch.zeros(rows + 1, dtype=torch.long, device=order.device)
    choice.scatter_(0, row_TK.flatten(), torch.arange(order.numel(), device=order.device))
    valid = torch.zeros(rows + 1, dtype=torch.bool, device=order.device).index_fill_(0, row_TK.flatten(), True)
    return Permutation(choice[:rows], row_TK, capacity, valid[:rows], kept)


def permute_rows(x_TD: Tensor, permutation: Permutation) -> Tensor:
    """Copies the token of every row; zeros in padding."""
    return _select_rows(x_TD, permutation.token_R, permutation.valid_R)


def _select_rows(source: Tensor, at_R: Tensor, valid_R: Tensor | None) -> Tensor:
    """Selects a source row for every row; zeros in padding, where `at_R` is anything and invalid if there are no tokens."""
    if not source.shape[0]:
        return source.new_zeros((at_R.shape[0], *source.shape[1:]))
    rows = source.index_select(0, at_R)
    return rows if valid_R is None else rows.masked_fill(~valid_R.view(-1, *[1] * (rows.dim() - 1)), 0)


def unpermute_rows(rows_RD: Tensor, permutation: Permutation, *, weights_TK: Tensor | None = None) -> Tensor:
    """Sums each token's rows, each times its choice's weight, in at least float32; [T, K, D] is never materialized."""
    dtype = torch.promote_types(rows_RD.dtype, torch.float32)
    total = rows_RD.new_zeros((permutation.row_TK.shape[0], rows_RD.shape[1]), dtype=dtype)
    for k, part in enumerate(_rows_by_choice(rows_RD, permutation)):
        total += part if weights_TK is None else part * weights_TK[:, k, None]
    return total.to(rows_RD.dtype)


def unpermute_backward(
    grad_TD: Tensor, rows_RD: Tensor, weights_TK: Tensor, permutation: Permutation
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of a weighted sum: of the rows (zeros in padding), and of the weights."""
    weight_R = choices_to_rows(weights_TK, permutation)
    grad_RD = (permute_rows(grad_TD, permutation) * weight_R[:, None]).to(rows_RD.dtype)
    wide = torch.promote_types(grad_TD.dtype, torch.float32)
    grad_weights = torch.zeros_like(weights_TK)
    for k, part in enumerate(_rows_by_choice(rows_RD, permutation)):
        grad_weights[:, k] = (part * grad_TD.to(wide)).sum(-1)
    return grad_RD, grad_weights


def _rows_by_choice(rows_RD: Tensor, permutation: Permutation) -> Iterator[Tensor]:
    """Yields every token's row for each of the K choices; zeros where it has none. Nothing at all if there are no rows."""
    row_TK, kept_TK, rows = permutation.row_TK, permutation.kept_TK, rows_RD.shape[0]
    for k in range(row_TK.shape[1] if rows else 0):
        if kept_TK is None:
            yield rows_RD.index_select(0, row_TK[:, k])
        else:  # not multiplied by the mask: a row of no expert may hold NaN
            yield rows_RD.index_select(0, row_TK[:, k].clamp(max=rows - 1)).masked_fill(~kept_TK[:, k, None], 0)


def choices_to_rows(of_TK: Tensor, permutation: Permutation) -> Tensor:
    """Returns the value of every row's choice, [R]; zeros in padding."""
    return _select_rows(of_TK.flatten(), permutation.choice_R, permutation.valid_R)


def rows_to_choices(of_R: Tensor, permutation: Permutation) -> Tensor:
    """Returns the value of every choice's row, [T, K]; zeros where it has none."""
    row_TK, kept_TK, rows = permutation.row_TK, permutation.kept_TK, of_R.shape[0]
    if kept_TK is None:
        return of_R[row_TK]
    return of_R[row_TK.clamp(max=rows - 1)].masked_fill(~kept_TK, 0) if rows else of_R.new_zeros(row_TK.shape)


def weighted_activation(inner_RG: Tensor, weight_R: Tensor, name: str, variant: GluVariant | None = None) -> Tensor:
    """The activation, plain or gated, times the weight of each row, rounded once, [R, F]."""
    inner = to_compute_dtype(inner_RG)
    active = gated_activation(inner, name, variant) if name in GATE_ACTIVATIONS else activation(inner, name)
    return (active * weight_R[:, None]).to(inner_RG.dtype)


def weighted_activation_backward(
    grad_RF: Tensor,
    inner_RG: Tensor,
    weight_R: Tensor,
    name: str,
    variant: GluVariant | None = None,
    *,
    recompute_output: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the gradients of the input and of the weights, and the weighted activation if `recompute_output`."""
    inner, grad = to_compute_dtype(inner_RG), to_compute_dtype(grad_RF)
    backward = partial(gated_activation_backward, variant=variant) if name in GATE_ACTIVATIONS else activation_backward
    grad_inner, active = backward(grad * weight_R[:, None], inner, name, recompute_output=True)
    assert active is not None
    output = (active * weight_R[:, None]).to(inner_RG.dtype) if recompute_output else None
    return grad_inner.to(inner_RG.dtype), (active * grad).sum(-1).to(weight_R.dtype), output


@dataclass(frozen=True, slots=True)
class MoEKernels:
    """One implementation of each row kernel, and of writing weight gradients; the functions of this file are the reference."""

    permute_rows: Callable[[Tensor, Permutation], Tensor]
    unpermute_rows: Callable[..., Tensor]
    unpermute_backward: Callable[[Tensor, Tensor, Tensor, Permutation], tuple[Tensor, Tensor]]
    weighted_activation: Callable[..., Tensor]
    weighted_activation_backward: Callable[..., tuple[Tensor, Tensor, Tensor | None]]
    write_grad: WriteGrad


REFERENCE = MoEKernels(
    permute_rows, unpermute_rows, unpermute_backward, weighted_activation, weighted_activation_backward, write_grad
)


class _Permute(AutogradOp):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, permutation: Permutation, kernels: MoEKernels) -> Tensor:
        ctx.permutation, ctx.kernels = permutation, kernels
        return kernels.permute_rows(x_TD, permutation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.kernels.unpermute_rows(grads[0], ctx.permutation), None, None


def permute(x_TD: Tensor, permutation: Permutation, *, kernels: MoEKernels) -> Tensor:
    """Copies tokens to all rows [R, D]; zeros in padding."""
    return _Permute.apply(x_TD, permutation, kernels)  # pyright: ignore[reportReturnType]


class _Unpermute(AutogradOp):
    @staticmethod
    def forward(
        ctx: Any, rows_RD: Tensor, weights_TK: Tensor | None, permutation: Permutation, kernels: MoEKernels
    ) -> Tensor:
        ctx.permutation, ctx.kernels = permutation, kernels
        ctx.save_for_backward(*(() if weights_TK is None else (rows_RD, weights_TK)))
        return kernels.unpermute_rows(rows_RD, permutation, weights_TK=weights_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        saved = ctx.saved_tensors  # unpacked once: in a recomputed region unpacking runs the region
        if not saved:
            return ctx.kernels.permute_rows(grads[0], ctx.permutation), None, None, None
        rows_RD, weights_TK = saved
        return *ctx.kernels.unpermute_backward(grads[0], rows_RD, weights_TK, ctx.permutation), None, None


def unpermute(rows_RD: Tensor, weights_TK: Tensor | None, permutation: Permutation, *, kernels: MoEKernels) -> Tensor:
    """Sums each token's rows, each times the weight of its choice if not yet applied, [T, D]."""
    return _Unpermute.apply(rows_RD, weights_TK, permutation, kernels)  # pyright: ignore[reportReturnType]


class _PermuteRouterWeights(AutogradOp):
    @staticmethod
    def forward(ctx: Any, weights_TK: Tensor, permutation: Permutation) -> Tensor:
        ctx.permutation = permutation
        return choices_to_rows(weights_TK, permutation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return rows_to_choices(grads[0], ctx.permutation), None


def permute_router_weights(weights_TK: Tensor, permutation: Permutation) -> Tensor:
    """Returns the router's weight of every row [R], to be applied with the activation; zeros in padding."""
    return _PermuteRouterWeights.apply(weights_TK, permutation)  # pyright: ignore[reportReturnType]


class _Reorder(AutogradOp):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse_order: Tensor) -> Tensor:
        ctx.order, ctx.inverse_order = order, inverse_order
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.inverse_order), None, None


def reorder(rows: Tensor, order: Tensor, inverse_order: Tensor) -> Tensor:
    """Reorders rows; `inverse_order` is the inverse of the permutation `order`."""
    return _Reorder.apply(rows, order, inverse_order)  # pyright: ignore[reportReturnType]
