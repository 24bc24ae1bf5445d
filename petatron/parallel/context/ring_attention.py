"""Attention of a rank's queries over the keys of all ranks: passed around a ring, or gathered at once.

**Ring** (Liu et al., Ring Attention). In step t rank r holds the keys of rank r - t, and passes them on while it computes
with them. Results over the ranks' keys are merged by log-sum-exp. Backward the keys go around once more, and behind them go
their gradients: what rank r adds for the keys of rank r - t is joined to what rank r - 1 added a step before, while the next
keys are being computed with. The owner's own part needs no travel, so it starts at step 1 and is home after size - 1 steps.
The gradients travel in the precision of the keys; each rank's part is summed in at least float32.

**Gather.** Keys of the whole sequence, sorted by position, are gathered in both passes and their gradients scattered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from petatron.kernels.attention.blocks import Answered, Gradients, PartialAttention, block_backward, zero_gradients
from petatron.kernels.attention.mask import BlockMask, Bounds
from petatron.kernels.attention.tiles import Dropout
from petatron.mesh import collectives
from petatron.mesh.mesh import Axis
from petatron.parallel.context.zigzag import sorted_by_position, sorted_by_rank, zigzag

Pair = tuple[Tensor, Tensor]
Way = Literal["ring", "gather"]
"""How the keys of other ranks are met, see above."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Who holds which positions of a sequence, and what may be seen."""

    axis: Axis
    length: int
    bounds: Bounds | None
    dropout: Dropout | None

    def held_by(self, rank: int) -> tuple[range, ...]:
        return zigzag(rank, self.axis.size, self.length)

    def mask(self, source: int | None) -> BlockMask:
        """This rank's queries against the keys of a rank, or of all."""
        keys = (range(self.length),) if source is None else self.held_by(source)
        return BlockMask(self.held_by(self.axis.rank), keys, self.bounds)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: _Plan) -> Tensor:
        partial = PartialAttention(q, value_width=v.shape[-1])
        for source, (keys, values) in _around(plan.axis, (k, v)):
            partial.meet(keys, values, plan.mask(source), dropout=plan.dropout)
        return _remember(ctx, q, k, v, partial, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        plan: _Plan = ctx.plan
        answered = Answered.of(q, out_SBHE=out, lse_BHS=lse, grad_SBHE=grads[0])
        dq, own_dk, own_dv = zero_gradients(q, k, v)
        behind = _Following(plan.axis)
        for source, (keys, values) in _around(plan.axis, (k, v)):
            at_home = source == plan.axis.rank
            dk, dv = (own_dk, own_dv) if at_home else (torch.zeros_like(own_dk), torch.zeros_like(own_dv))
            block_backward(answered, keys, values, plan.mask(source), into=(dq, dk, dv), dropout=plan.dropout)
            if not at_home:
                behind.add_and_pass_on((dk, dv), k.dtype)
        behind.arrive((own_dk, own_dv))
        return dq.to(q.dtype), own_dk.to(k.dtype), own_dv.to(v.dtype), None


class _GatheredAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: _Plan) -> Tensor:
        partial = PartialAttention(q, value_width=v.shape[-1])
        partial.meet(*_gathered(k, v, plan.axis), plan.mask(None), dropout=plan.dropout)
        return _remember(ctx, q, k, v, partial, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        plan: _Plan = ctx.plan
        answered = Answered.of(q, out_SBHE=out, lse_BHS=lse, grad_SBHE=grads[0])
        keys, values = _gathered(k, v, plan.axis)
        found: Gradients = zero_gradients(q, keys, values)
        block_backward(answered, keys, values, plan.mask(None), into=found, dropout=plan.dropout)
        whole = sorted_by_rank(_packed(found[1].to(k.dtype), found[2].to(v.dtype)), plan.axis.size)
        dk, dv = _unpacked(collectives.reduce_scatter(whole, plan.axis), k, v)
        return found[0].to(q.dtype), dk, dv, None


def _remember(ctx: Any, q: Tensor, k: Tensor, v: Tensor, partial: PartialAttention, plan: _Plan) -> Tensor:
    out = partial.out_SBHE.to(q.dtype)
    ctx.save_for_backward(q, k, v, out, partial.lse_BHS)
    ctx.plan = plan
    return out


def _around(axis: Axis, held: Pair) -> Iterator[tuple[int, Pair]]:
    """Every rank's pair of tensors with that rank, this one's first; the next pair travels while one is used."""
    for step in range(axis.size):
        source = (axis.rank - step) % axis.size
        if step == axis.size - 1:
            yield source, held
            return
        landing = _empty_like(held)
        handles = collectives.start_shift(landing, held, axis)
        yield source, held
        for handle in handles:
            handle.wait()
        held = landing


class _Following:
    """Gradients of travelling keys, one step behind them."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._landing: Pair | None = None
        self._handles: list[collectives.Handle] = []

    def add_and_pass_on(self, ours: Pair, dtype: torch.dtype) -> None:
        """Join this rank's part to what the rank before has passed on, and pass that on."""
        self.arrive(ours)
        parcel = ours[0].to(dtype), ours[1].to(dtype)
        self._landing = _empty_like(parcel)
        self._handles = collectives.start_shift(self._landing, parcel, self._axis)

    def arrive(self, into: Pair) -> None:
        """Wait for what is on its way here, if anything, and add it."""
        for handle in self._handles:
            handle.wait()
        if self._landing is not None:
            for total, more in zip(into, self._landing):
                total.add_(more)


def _empty_like(pair: Pair) -> Pair:
    first, second = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in pair)
    return first, second


def _gathered(k: Tensor, v: Tensor, axis: Axis) -> Pair:
    """Keys and values of the whole sequence, sorted by position, in one gather."""
    whole = sorted_by_position(collectives.all_gather(_packed(k, v), axis), axis.size)
    return _unpacked(whole, k, v)


def _packed(k_SBKE: Tensor, v_SBKE: Tensor) -> Tensor:
    return torch.cat((k_SBKE.flatten(2), v_SBKE.flatten(2)), dim=-1)


def _unpacked(packed: Tensor, k_SBKE: Tensor, v_SBKE: Tensor) -> Pair:
    k, v = packed.split([k_SBKE[0, 0].numel(), v_SBKE[0, 0].numel()], dim=-1)
    return k.unflatten(-1, k_SBKE.shape[2:]), v.unflatten(-1, v_SBKE.shape[2:])


_WAYS = {"ring": _RingAttention, "gather": _GatheredAttention}


def distributed_attention(
    q_SBHE: Tensor,
    k_SBKE: Tensor,
    v_SBKE: Tensor,
    axis: Axis,
    *,
    way: Way,
    window: int | None,
    dropout: float,
    document_starts_BS: Tensor | None,
) -> Tensor:
    """Attention of this rank's queries over the keys and values of every rank of the axis."""
    length = q_SBHE.shape[0] * axis.size
    bounds = Bounds.build(length, window=window, document_starts_BS=document_starts_BS, device=q_SBHE.device)
    plan = _Plan(axis, length, bounds, Dropout.draw(dropout))
    return _WAYS[way].apply(q_SBHE, k_SBKE, v_SBKE, plan)  # pyright: ignore[reportReturnType]
