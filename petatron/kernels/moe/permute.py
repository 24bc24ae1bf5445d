"""Tokens in the order of their experts, and back; the products of the experts themselves are in `grouped_gemm.py`.

T tokens make K choices each; every choice that reaches an expert becomes a row, and the rows of one expert lie together. Going
there (`permute`) is a copy of each token to its rows, coming back (`unpermute`) a sum over each token's rows. An `Permutation` keeps
both directions, the choice of every row and the row of every choice, so that the backward of each is again a copy or a sum:
no gradient is scattered with atomic adds, and results do not depend on the order in which a device runs.

Rows are as many as there are choices, or, padded, a fixed number per expert. Padding lets every shape be known without
looking at the data; so does `room`, a number of rows that is enough, of which choices that go nowhere get those behind the rows
of all experts. No product computes them: what comes out of one there is anything, NaN included, and sums pass over it.

Where the router's weight w is applied decides how many bytes move. With a the activation of a row and g the gradient that
comes back from the token,

    w (W a) = W (w a),     dL/dw = g . (W a) = (W^T g) . a

so the weight may go in with the activation (`weighted_activation`), whose backward pass has W^T g and a at hand anyway: the
weight's gradient costs no extra read, the last product's output is not kept, and the way back is a plain sum. Applied in
`unpermute`, it costs one more read of all rows [R, D] in the backward pass, and keeps them until then.

Bytes of an expert layer, forward and backward, in units of elements of 2 bytes (D width, F inner width, N weights of all experts):

    forward   take T D + R D, activation 3 R F, sum R D + T D
    backward  copy T D + R D, activation 6 R F, sum R D + T D, the rows again (if not kept) T D + R D, gradients to float32 3 N

For T 32768, predicted at 4 TB/s beside products at 620 TFLOP/s (rows made again), and measured on one H200 (rows kept):

    128 experts, K 8, D 2048, F 768      3.0 + 12.0 ms, 495 useful TFLOP/s    14.8 ms, 503
    8 experts, K 2, D 4096, F 14336      7.1 + 112 ms, 583                    115.8 ms, 598

T tokens, K choices per token, R rows, E experts, D width, O output width, G inner width before and F after the activation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from petatron.kernels.activation import (
    GATE_ACTIVATIONS,
    activation,
    activation_backward,
    gated_activation,
    gated_activation_backward,
)
from petatron.kernels.compute_dtype import to_compute_dtype
from petatron.kernels.moe.grouped_gemm import ExpertCounts


@dataclass(frozen=True, slots=True)
class Permutation:
    """Where every choice lies among the rows, and the other way round.

    choice_R: for each row the choice (token x K + place) it holds; anything where the row is padding. Rows beyond the counts
        hold choices without an expert.
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
        """Without rows beyond a number that is enough."""
        return replace(self, choice_R=self.choice_R[:rows])


@dataclass(frozen=True, slots=True)
class SortedChoices:
    """All choices by expert: `order` of the flat choices, where each one went, and where each expert begins.

    The last beginning, of expert number E, is that of the choices that go nowhere.
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
        """How many choices of the same expert come before each one."""
        return self.sorted_position_TK - self.starts[self.experts_TK]


def sort_by_expert(experts_TK: Tensor, num_experts: int, *, priority: Tensor | None = None) -> SortedChoices:
    """Sort choices by expert; the expert `num_experts` stands for nowhere, and comes last.

    Within an expert they stay in token order, or come by falling `priority` (one number per choice).
    """
    # A device sorts by digits of a few bits, one pass each: of a small type there are one or two, of int64 eight or more.
    assert num_experts < 2**15
    key = experts_TK.flatten().to(torch.uint8 if num_experts < 2**8 else torch.int16)
    if priority is None:
        key, order = key.sort(stable=True)
    else:
        liked = priority.flatten().argsort(stable=True, descending=True)
        key, order = key[liked].sort(stable=True)
        order = liked[order]
    # Where each expert begins among the sorted; counting with atomic adds is slow when few experts take many choices.
    starts = torch.searchsorted(key, torch.arange(num_experts + 1, dtype=key.dtype, device=key.device))
    return SortedChoices(order, inverse_permutation(order).view_as(experts_TK), experts_TK, starts)


def inverse_permutation(order: Tensor) -> Tensor:
    """The permutation that undoes a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))


def build_permutation(
    experts_TK: Tensor,
    num_experts: int,
    *,
    may_drop: bool = False,
    capacity: int | None = None,
    max_rows: int | None = None,
) -> Permutation:
    """Rows in the order of their experts, within an expert in token order.

    `may_drop` says that some choices may be `num_experts`, which stands for nowhere; how many has then to be read back
    from the device, unless there is `max_rows` for that many rows in any case: the counts may not reach to the last of them.
    With a `capacity` every expert gets that many rows and nothing is read back; no expert may be chosen more often.
    """
    by_expert = sort_by_expert(experts_TK, num_experts)
    order = by_expert.order
    kept = experts_TK < num_experts if may_drop else None
    if capacity is None:
        counts = by_expert.counts_E
        if may_drop and max_rows is None:
            max_rows = int(counts.sum())
        return Permutation(order[:max_rows], by_expert.sorted_position_TK, counts, None, kept)
    rows = num_experts * capacity
    # What goes nowhere lands in one row too many, which is cut off.
    row_TK = torch.where(experts_TK < num_experts, experts_TK * capacity + by_expert.position_in_expert_TK, rows)
    choice = torch.zeros(rows + 1, dtype=torch.long, device=order.device)
    choice.scatter_(0, row_TK.flatten(), torch.arange(order.numel(), device=order.device))
    real = torch.zeros(rows + 1, dtype=torch.bool, device=order.device).index_fill_(0, row_TK.flatten(), True)
    return Permutation(choice[:rows], row_TK, capacity, real[:rows], kept)


def permute_rows(x_TD: Tensor, permutation: Permutation) -> Tensor:
    """The token of every row; zeros in padding."""
    return _select_rows(x_TD, permutation.token_R, permutation.valid_R)


def _select_rows(source: Tensor, at_R: Tensor, valid_R: Tensor | None) -> Tensor:
    """What every row has of a source; zeros in padding, for which `at_R` is anything: without tokens there is nothing at it."""
    if not source.shape[0]:
        return source.new_zeros((at_R.shape[0], *source.shape[1:]))
    rows = source.index_select(0, at_R)
    return rows if valid_R is None else rows.masked_fill(~valid_R.view(-1, *[1] * (rows.dim() - 1)), 0)


def unpermute_rows(rows_RD: Tensor, permutation: Permutation, *, weights_TK: Tensor | None = None) -> Tensor:
    """For every token the sum of its rows, each times its choice's weight, in at least float32; [T, K, D] is never made."""
    wide = torch.promote_types(rows_RD.dtype, torch.float32)
    total = rows_RD.new_zeros((permutation.row_TK.shape[0], rows_RD.shape[1]), dtype=wide)
    for k, part in enumerate(_rows_by_choice(rows_RD, permutation)):
        total += part if weights_TK is None else part * weights_TK[:, k, None]
    return total.to(rows_RD.dtype)


def unpermute_backward(
    grad_TD: Tensor, rows_RD: Tensor, weights_TK: Tensor, permutation: Permutation
) -> tuple[Tensor, Tensor]:
    """Gradients of a weighted sum: of the rows (zeros in padding), and of the weights."""
    weight_R = choices_to_rows(weights_TK, permutation)
    grad_RD = (permute_rows(grad_TD, permutation) * weight_R[:, None]).to(rows_RD.dtype)
    wide = torch.promote_types(grad_TD.dtype, torch.float32)
    grad_weights = torch.zeros_like(weights_TK)
    for k, part in enumerate(_rows_by_choice(rows_RD, permutation)):
        grad_weights[:, k] = (part * grad_TD.to(wide)).sum(-1)
    return grad_RD, grad_weights


def _rows_by_choice(rows_RD: Tensor, permutation: Permutation) -> Iterator[Tensor]:
    """For each of the K places every token's row; zeros where it has none. Nothing at all if there are no rows."""
    row_TK, kept_TK, rows = permutation.row_TK, permutation.kept_TK, rows_RD.shape[0]
    for k in range(row_TK.shape[1] if rows else 0):
        if kept_TK is None:
            yield rows_RD.index_select(0, row_TK[:, k])
        else:  # not a product with kept: a row of no expert may hold NaN
            yield rows_RD.index_select(0, row_TK[:, k].clamp(max=rows - 1)).masked_fill(~kept_TK[:, k, None], 0)


def choices_to_rows(of_TK: Tensor, permutation: Permutation) -> Tensor:
    """For every row what its choice has, [R]; zeros in padding."""
    return _select_rows(of_TK.flatten(), permutation.choice_R, permutation.valid_R)


def rows_to_choices(of_R: Tensor, permutation: Permutation) -> Tensor:
    """For every choice what its row has, [T, K]; zeros where it has none."""
    row_TK, kept_TK, rows = permutation.row_TK, permutation.kept_TK, of_R.shape[0]
    if kept_TK is None:
        return of_R[row_TK]
    return of_R[row_TK.clamp(max=rows - 1)].masked_fill(~kept_TK, 0) if rows else of_R.new_zeros(row_TK.shape)


def weighted_activation(inner_RG: Tensor, weight_R: Tensor, name: str) -> Tensor:
    """The activation, plain or gated, times the weight of each row, rounded once, [R, F]."""
    inner = to_compute_dtype(inner_RG)
    active = gated_activation(inner, name) if name in GATE_ACTIVATIONS else activation(inner, name)
    return (active * weight_R[:, None]).to(inner_RG.dtype)


def weighted_activation_backward(
    grad_RF: Tensor, inner_RG: Tensor, weight_R: Tensor, name: str, *, recompute_output: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of what went in and of the weights, and the weighted activation if it is wanted again."""
    inner, grad = to_compute_dtype(inner_RG), to_compute_dtype(grad_RF)
    backward = gated_activation_backward if name in GATE_ACTIVATIONS else activation_backward
    grad_inner, active = backward(grad * weight_R[:, None], inner, name, recompute_output=True)
    assert active is not None
    made = (active * weight_R[:, None]).to(inner_RG.dtype) if recompute_output else None
    return grad_inner.to(inner_RG.dtype), (active * grad).sum(-1).to(weight_R.dtype), made


@dataclass(frozen=True, slots=True)
class MoEKernels:
    """One implementation of everything here that runs over rows; the functions of this file are the reference."""

    permute_rows: Callable[[Tensor, Permutation], Tensor]
    unpermute_rows: Callable[..., Tensor]
    unpermute_backward: Callable[[Tensor, Tensor, Tensor, Permutation], tuple[Tensor, Tensor]]
    weighted_activation: Callable[[Tensor, Tensor, str], Tensor]
    weighted_activation_backward: Callable[..., tuple[Tensor, Tensor, Tensor | None]]


REFERENCE = MoEKernels(
    permute_rows, unpermute_rows, unpermute_backward, weighted_activation, weighted_activation_backward
)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, permutation: Permutation, kernels: MoEKernels) -> Tensor:
        ctx.permutation, ctx.kernels = permutation, kernels
        return kernels.permute_rows(x_TD, permutation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.kernels.unpermute_rows(grads[0], ctx.permutation), None, None


def permute(x_TD: Tensor, permutation: Permutation, *, kernels: MoEKernels) -> Tensor:
    """The tokens of all rows [R, D]; zeros in padding."""
    return _Permute.apply(x_TD, permutation, kernels)  # pyright: ignore[reportReturnType]


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_RD: Tensor, weights_TK: Tensor | None, permutation: Permutation, kernels: MoEKernels
    ) -> Tensor:
        ctx.permutation, ctx.kernels = permutation, kernels
        ctx.save_for_backward(*(() if weights_TK is None else (rows_RD, weights_TK)))
        return kernels.unpermute_rows(rows_RD, permutation, weights_TK=weights_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        saved = ctx.saved_tensors  # asked for once: where this is recomputed, every time is a run
        if not saved:
            return ctx.kernels.permute_rows(grads[0], ctx.permutation), None, None, None
        rows_RD, weights_TK = saved
        return *ctx.kernels.unpermute_backward(grads[0], rows_RD, weights_TK, ctx.permutation), None, None


def unpermute(rows_RD: Tensor, weights_TK: Tensor | None, permutation: Permutation, *, kernels: MoEKernels) -> Tensor:
    """For every token the sum of its rows, each times the weight of its choice if not yet applied, [T, D]."""
    return _Unpermute.apply(rows_RD, weights_TK, permutation, kernels)  # pyright: ignore[reportReturnType]


class _PermuteRouterWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights_TK: Tensor, permutation: Permutation) -> Tensor:
        ctx.permutation = permutation
        return choices_to_rows(weights_TK, permutation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return rows_to_choices(grads[0], ctx.permutation), None


def permute_router_weights(weights_TK: Tensor, permutation: Permutation) -> Tensor:
    """The router's weight of every row [R], to be applied with the activation; zeros in padding."""
    return _PermuteRouterWeights.apply(weights_TK, permutation)  # pyright: ignore[reportReturnType]


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse_order: Tensor) -> Tensor:
        ctx.order, ctx.inverse_order = order, inverse_order
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.inverse_order), None, None


def reorder(rows: Tensor, order: Tensor, inverse_order: Tensor) -> Tensor:
    """Rows in another order; `inverse_order` is the inverse of the permutation `order`."""
    return _Reorder.apply(rows, order, inverse_order)  # pyright: ignore[reportReturnType]
