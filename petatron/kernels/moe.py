"""Tokens in the order of their experts, and matrix products of which every expert has its own.

T tokens make K choices each; every choice that reaches an expert becomes a row, and the rows of one expert lie together. Going
there (`take`) is a gather by token, coming back (`combine`) a weighted sum of each token's rows. The backward of each is
again a gather, because an `Arrangement` keeps both directions: the choice of every row, and the row of every choice. So no
gradient is scattered with atomic adds, and results do not depend on the order in which a device runs.

Rows are as many as there are choices, or, padded, a fixed number per expert. Padding lets every shape be known without
looking at the data.

T tokens, K choices per token, R rows, E experts, D width, O output width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Counts = Tensor | int
"""Rows of each expert: a vector [E] on the device, or one number for all of them."""
GroupedProduct = Callable[[Tensor, Tensor, Counts], Tensor]
"""(rows [R, D], weight [E, O, D], counts) to rows [R, O]: every expert's rows times its own matrix."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Where every choice lies among the rows, and the other way round.

    choice_R: for each row the choice (token x K + place) it holds; anything where the row is padding.
    row_TK: for each choice its row; anything where the choice has none.
    counts: rows of each expert, padding included.
    real_R: whether the row is no padding; None when all are.
    kept_TK: whether the choice has a row; None when all have.
    """

    choice_R: Tensor
    row_TK: Tensor
    counts: Counts
    real_R: Tensor | None = None
    kept_TK: Tensor | None = None

    @property
    def token_R(self) -> Tensor:
        return self.choice_R // self.row_TK.shape[1]


@dataclass(frozen=True, slots=True)
class Sorted:
    """All choices by expert: `order` of the flat choices, where each one went, its place within its expert, and counts."""

    order: Tensor
    at_TK: Tensor
    place_TK: Tensor
    counts_E: Tensor


def sort_by_expert(experts_TK: Tensor, num_experts: int, *, preference: Tensor | None = None) -> Sorted:
    """Sort choices by expert; the expert `num_experts` stands for nowhere, and comes last.

    Within an expert they stay in token order, or come by falling `preference` (one number per choice).
    """
    expert = experts_TK.flatten()
    order = expert.argsort(stable=True)
    if preference is not None:
        liked = preference.flatten().argsort(stable=True, descending=True)
        order = liked[expert[liked].argsort(stable=True)]
    # Where each expert begins among the sorted; counting with atomic adds is slow when few experts take many choices.
    starts = torch.searchsorted(expert[order], torch.arange(num_experts + 1, device=expert.device))
    at = inverse(order)
    place = at - starts[expert]
    return Sorted(order, at.view_as(experts_TK), place.view_as(experts_TK), starts.diff())


def inverse(order: Tensor) -> Tensor:
    """The permutation that undoes a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))


def arrange(
    experts_TK: Tensor, num_experts: int, *, incomplete: bool = False, capacity: int | None = None
) -> Arrangement:
    """Rows in the order of their experts, within an expert in token order.

    `incomplete` says that some choices may be `num_experts`, which stands for nowhere; how many has then to be read back
    from the device. With a `capacity` every expert gets that many rows and nothing is read back; no expert may be chosen
    more often.
    """
    by_expert = sort_by_expert(experts_TK, num_experts)
    order = by_expert.order
    kept = experts_TK < num_experts if incomplete else None
    if capacity is None:
        rows = int(by_expert.counts_E.sum()) if incomplete else order.numel()
        return Arrangement(order[:rows], by_expert.at_TK, by_expert.counts_E, None, kept)
    rows = num_experts * capacity
    # What goes nowhere lands in one row too many, which is cut off.
    row_TK = torch.where(experts_TK < num_experts, experts_TK * capacity + by_expert.place_TK, rows)
    choice = torch.zeros(rows + 1, dtype=torch.long, device=order.device)
    choice.scatter_(0, row_TK.flatten(), torch.arange(order.numel(), device=order.device))
    real = torch.zeros(rows + 1, dtype=torch.bool, device=order.device).index_fill_(0, row_TK.flatten(), True)
    return Arrangement(choice[:rows], row_TK, capacity, real[:rows], kept)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, arrangement: Arrangement) -> Tensor:
        ctx.arrangement = arrangement
        rows = x_TD.index_select(0, arrangement.token_R)
        return rows if arrangement.real_R is None else rows * arrangement.real_R[:, None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum_of_rows(grads[0], None, ctx.arrangement), None


def take(x_TD: Tensor, arrangement: Arrangement) -> Tensor:
    """The tokens of all rows [R, D]; zeros in padding."""
    return _Take.apply(x_TD, arrangement)  # pyright: ignore[reportReturnType]


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weights_TK: Tensor, arrangement: Arrangement) -> Tensor:
        ctx.save_for_backward(rows_RD, weights_TK)
        ctx.arrangement = arrangement
        return _sum_of_rows(rows_RD, weights_TK, arrangement)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        rows_RD, weights_TK = ctx.saved_tensors
        arrangement, grad_TD = ctx.arrangement, grads[0]
        weight_R = weights_TK.flatten().index_select(0, arrangement.choice_R)
        if arrangement.real_R is not None:
            weight_R = weight_R * arrangement.real_R
        grad_RD = (grad_TD.index_select(0, arrangement.token_R) * weight_R[:, None]).to(rows_RD.dtype)
        wide = torch.promote_types(grad_TD.dtype, weights_TK.dtype)
        grad_weights = torch.zeros_like(weights_TK)
        for k, row_T in enumerate(_rows_by_place(arrangement, rows_RD.shape[0])):
            dots = (rows_RD.index_select(0, row_T) * grad_TD.to(wide)).sum(-1)
            grad_weights[:, k] = dots if arrangement.kept_TK is None else dots * arrangement.kept_TK[:, k]
        return grad_RD, grad_weights, None


def combine(rows_RD: Tensor, weights_TK: Tensor, arrangement: Arrangement) -> Tensor:
    """For every token the sum of its rows, each times the weight of its choice [T, D], in the rows' precision."""
    return _Combine.apply(rows_RD, weights_TK, arrangement)  # pyright: ignore[reportReturnType]


def _sum_of_rows(rows_RD: Tensor, weights_TK: Tensor | None, arrangement: Arrangement) -> Tensor:
    """Added up one choice after the other in at least float32, so that [T, K, D] is never in memory."""
    wide = torch.promote_types(rows_RD.dtype, torch.float32)
    total = rows_RD.new_zeros((arrangement.row_TK.shape[0], rows_RD.shape[1]), dtype=wide)
    for k, row_T in enumerate(_rows_by_place(arrangement, rows_RD.shape[0])):
        part = rows_RD.index_select(0, row_T)
        if arrangement.kept_TK is not None:
            part = part * arrangement.kept_TK[:, k, None]
        total += part if weights_TK is None else part * weights_TK[:, k, None]
    return total.to(rows_RD.dtype)


def _rows_by_place(arrangement: Arrangement, rows: int) -> tuple[Tensor, ...]:
    """For each of the K places the row of every token; some row where it has none, and none at all if there are no rows."""
    if rows == 0:
        return ()
    row_TK = arrangement.row_TK if arrangement.kept_TK is None else arrangement.row_TK.clamp(max=rows - 1)
    return row_TK.unbind(1)


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.order, ctx.back = order, back
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.back), None, None


def reorder(rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Rows in another order; `back` is the inverse of the permutation `order`."""
    return _Reorder.apply(rows, order, back)  # pyright: ignore[reportReturnType]


def looped_linear(x_RD: Tensor, weight_EOD: Tensor, counts: Counts) -> Tensor:
    """One product after the other: the reference.

    An expert without rows is multiplied too, so that every weight gets a gradient, if only of zeros, in every backward pass.
    """
    if isinstance(counts, int):
        return torch.bmm(x_RD.unflatten(0, (-1, counts)), weight_EOD.transpose(1, 2)).flatten(0, 1)
    parts = x_RD.split(counts.tolist())
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weight_EOD.unbind(), strict=True)])


class _Grouped(torch.autograd.Function):
    """The weight's gradient is a product grouped along the rows that are summed over."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, weight_EOD: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x_RD, weight_EOD, ends)
        return F.grouped_mm(x_RD, weight_EOD.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_RD, weight_EOD, ends = ctx.saved_tensors
        grad = grads[0].contiguous()
        x_grad = F.grouped_mm(grad, weight_EOD, offs=ends) if ctx.needs_input_grad[0] else None
        weight_grad = F.grouped_mm(grad.t(), x_RD, offs=ends) if ctx.needs_input_grad[1] else None
        return x_grad, weight_grad, None


def grouped_linear(x_RD: Tensor, weight_EOD: Tensor, counts: Counts) -> Tensor:
    """All products in one kernel where torch has it (bfloat16 on CUDA, widths that are multiples of 8), else the loop."""
    if isinstance(counts, int) or not _has_grouped_kernel(x_RD, weight_EOD.dtype, weight_EOD.shape[1:]):
        return looped_linear(x_RD, weight_EOD, counts)
    ends = counts.cumsum(0).to(torch.int32)
    return _Grouped.apply(x_RD.contiguous(), weight_EOD, ends)  # pyright: ignore[reportReturnType]


def grouped_weight_grad(x_RD: Tensor, grad_RO: Tensor, counts: Counts) -> Tensor:
    """The gradient of the weights of a grouped product, [E, O, D]."""
    if isinstance(counts, int):
        grads, xs = (rows.unflatten(0, (-1, counts)) for rows in (grad_RO, x_RD))
        return torch.bmm(grads.transpose(1, 2), xs)
    if _has_grouped_kernel(x_RD, grad_RO.dtype, (x_RD.shape[1], grad_RO.shape[1])):
        return F.grouped_mm(grad_RO.contiguous().t(), x_RD.contiguous(), offs=counts.cumsum(0).to(torch.int32))
    sizes = counts.tolist()
    return torch.stack([grad.t() @ x for grad, x in zip(grad_RO.split(sizes), x_RD.split(sizes), strict=True)])


def _has_grouped_kernel(x_RD: Tensor, dtype: torch.dtype, widths: Sequence[int]) -> bool:
    right_kind = x_RD.device.type == "cuda" and x_RD.dtype == dtype == torch.bfloat16
    return right_kind and all(width % 8 == 0 for width in widths) and x_RD.shape[0] > 0
