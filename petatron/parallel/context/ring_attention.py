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

from petatron.kernels.attention.blocks import (
    AttentionBackwardInputs,
    PartialAttention,
    QKVGrads,
    block_backward,
    zero_qkv_grads,
)
from petatron.kernels.attention.mask import AttentionBounds, BlockMask
from petatron.kernels.attention.tiles import AttentionDropout
from petatron.mesh import collectives
from petatron.mesh.mesh import Axis
from petatron.parallel.context.zigzag import sorted_by_position, sorted_by_rank, zigzag_positions

KeyValue = tuple[Tensor, Tensor]
KvExchange = Literal["ring", "gather"]
"""How the keys of other ranks are met, see above."""


@dataclass(frozen=True, slots=True)
class _AttentionPlan:
    """Who holds which positions of a sequence, and what may be seen."""

    axis: Axis
    length: int
    bounds: AttentionBounds | None
    dropout: AttentionDropout | None

    def positions_of(self, rank: int) -> tuple[range, ...]:
        return zigzag_positions(rank, self.axis.size, self.length)

    def mask(self, source: int | None) -> BlockMask:
        """This rank's queries against the keys of a rank, or of all."""
        keys = (range(self.length),) if source is None else self.positions_of(source)
        return BlockMask(self.positions_of(self.axis.rank), keys, self.bounds)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: _AttentionPlan) -> Tensor:
        partial = PartialAttention(q, value_width=v.shape[-1])
        for source, (keys, values) in _ring_steps(plan.axis, (k, v)):
            partial.attend_block(keys, values, plan.mask(source), dropout=plan.dropout)
        return _save_for_backward(ctx, q, k, v, partial, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        plan: _AttentionPlan = ctx.plan
        answered = AttentionBackwardInputs.of(q, out_SBHE=out, lse_BHS=lse, grad_SBHE=grads[0])
        dq, own_dk, own_dv = zero_qkv_grads(q, k, v)
        behind = _GradientRing(plan.axis)
        for source, (keys, values) in _ring_steps(plan.axis, (k, v)):
            at_home = source == plan.axis.rank
            dk, dv = (own_dk, own_dv) if at_home else (torch.zeros_like(own_dk), torch.zeros_like(own_dv))
            block_backward(answered, keys, values, plan.mask(source), grads=(dq, dk, dv), dropout=plan.dropout)
            if not at_home:
                behind.accumulate_and_send((dk, dv), k.dtype)
        behind.receive_into((own_dk, own_dv))
        return dq.to(q.dtype), own_dk.to(k.dtype), own_dv.to(v.dtype), None


class _AllGatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: _AttentionPlan) -> Tensor:
        partial = PartialAttention(q, value_width=v.shape[-1])
        partial.attend_block(*_all_gather_kv(k, v, plan.axis), plan.mask(None), dropout=plan.dropout)
        return _save_for_backward(ctx, q, k, v, partial, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        plan: _AttentionPlan = ctx.plan
        answered = AttentionBackwardInputs.of(q, out_SBHE=out, lse_BHS=lse, grad_SBHE=grads[0])
        keys, values = _all_gather_kv(k, v, plan.axis)
        found: QKVGrads = zero_qkv_grads(q, keys, values)
        block_backward(answered, keys, values, plan.mask(None), grads=found, dropout=plan.dropout)
        whole = sorted_by_rank(_pack_kv(found[1].to(k.dtype), found[2].to(v.dtype)), plan.axis.size)
        dk, dv = _unpack_kv(collectives.reduce_scatter(whole, plan.axis), k, v)
        return found[0].to(q.dtype), dk, dv, None


def _save_for_backward(
    ctx: Any, q: Tensor, k: Tensor, v: Tensor, partial: PartialAttention, plan: _AttentionPlan
) -> Tensor:
    out = partial.out_SBHE.to(q.dtype)
    ctx.save_for_backward(q, k, v, out, partial.lse_BHS)
    ctx.plan = plan
    return out


def _ring_steps(axis: Axis, held: KeyValue) -> Iterator[tuple[int, KeyValue]]:
    """Every rank's pair of tensors with that rank, this one's first; the next pair travels while one is used."""
    for step in range(axis.size):
        source = (axis.rank - step) % axis.size
        if step == axis.size - 1:
            yield source, held
            return
        landing = _empty_like(held)
        handles = collectives.start_ring_shift(landing, held, axis)
        yield source, held
        for handle in handles:
            handle.wait()
        held = landing


class _GradientRing:
    """Gradients of travelling keys, one step behind them."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._receive_buffers: KeyValue | None = None
        self._handles: list[collectives.Handle] = []

    def accumulate_and_send(self, grads: KeyValue, dtype: torch.dtype) -> None:
        """Join this rank's part to what the rank before has passed on, and pass that on."""
        self.receive_into(grads)
        parcel = grads[0].to(dtype), grads[1].to(dtype)
        self._receive_buffers = _empty_like(parcel)
        self._handles = collectives.start_ring_shift(self._receive_buffers, parcel, self._axis)

    def receive_into(self, grads: KeyValue) -> None:
        """Wait for what is on its way here, if anything, and add it."""
        for handle in self._handles:
            handle.wait()
        if self._receive_buffers is not None:
            for total, more in zip(grads, self._receive_buffers):
                total.add_(more)


def _empty_like(pair: KeyValue) -> KeyValue:
    first, second = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in pair)
    return first, second


def _all_gather_kv(k: Tensor, v: Tensor, axis: Axis) -> KeyValue:
    """Keys and values of the whole sequence, sorted by position, in one gather."""
    whole = sorted_by_position(collectives.all_gather(_pack_kv(k, v), axis), axis.size)
    return _unpack_kv(whole, k, v)


def _pack_kv(k_SBKE: Tensor, v_SBKE: Tensor) -> Tensor:
    return torch.cat((k_SBKE.flatten(2), v_SBKE.flatten(2)), dim=-1)


def _unpack_kv(packed: Tensor, k_SBKE: Tensor, v_SBKE: Tensor) -> KeyValue:
    k, v = packed.split([k_SBKE[0, 0].numel(), v_SBKE[0, 0].numel()], dim=-1)
    return k.unflatten(-1, k_SBKE.shape[2:]), v.unflatten(-1, v_SBKE.shape[2:])


_ATTENTION_FUNCTIONS = {"ring": _RingAttention, "gather": _AllGatherAttention}


def context_parallel_attention(
    q_SBHE: Tensor,
    k_SBKE: Tensor,
    v_SBKE: Tensor,
    axis: Axis,
    *,
    kv_exchange: KvExchange,
    window: int | None,
    dropout: float,
    document_starts_BS: Tensor | None,
) -> Tensor:
    """Attention of this rank's queries over the keys and values of every rank of the axis."""
    length = q_SBHE.shape[0] * axis.size
    bounds = AttentionBounds.build(length, window=window, document_starts_BS=document_starts_BS, device=q_SBHE.device)
    plan = _AttentionPlan(axis, length, bounds, AttentionDropout.draw(dropout))
    return _ATTENTION_FUNCTIONS[kv_exchange].apply(q_SBHE, k_SBKE, v_SBKE, plan)  # pyright: ignore[reportReturnType]
