"""Attention of a rank's queries over the keys of all ranks: sent around a ring, or all-gathered.

**Ring** (Liu et al., Ring Attention). In step t rank r has the keys of rank r - t, and sends them on while it computes with
them. Partial results are merged by log-sum-exp. In backward the keys go around once more, followed by their gradients: rank r
adds its part for the keys of rank r - t to the sum that rank r - 1 sent a step before, while it computes with the next keys.
The owner's own part is not sent, so the gradients start at step 1 and reach their owner after size - 1 steps. They are sent in
the precision of the keys; each rank's part is summed in at least float32.

**Gather.** Keys of the whole sequence, sorted by position, are all-gathered in both passes and their gradients reduce-scattered.

Both work for every visibility. In cross attention keys are those of another sequence, with a length of its own, that is shared in the same
order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from petatron.kernels.attention.blockwise_attention import (
    AttentionBackwardInputs,
    PartialAttention,
    QKVGrads,
    RuleGrads,
    block_backward,
    zero_qkv_grads,
)
from petatron.kernels.attention.score_modifiers import NO_RULES, ScoreRules
from petatron.kernels.attention.tile_attention import AttentionDropout
from petatron.kernels.attention.visibility import Visibility
from petatron.kernels.attention.visible_key_intervals import BlockMask, VisibleKeys
from petatron.mesh import collectives
from petatron.mesh.mesh import Axis
from petatron.models.stage_inputs_outputs import SequenceOrder
from petatron.parallel.context.zigzag import positions_of, sorted_by_position, sorted_by_rank

KeyValue = tuple[Tensor, Tensor]
KvExchange = Literal["ring", "gather"]
"""How a rank gets the keys of other ranks, see above."""


@dataclass(frozen=True, slots=True)
class _AttentionPlan:
    """The positions of each rank's queries and keys, and what is visible. `keep_positions` is that of `BlockMask`."""

    axis: Axis
    kv_exchange: KvExchange
    order: SequenceOrder
    length: int
    key_length: int
    visible: VisibleKeys
    dropout: AttentionDropout | None
    softcap: float | None = None
    keep_positions: bool = False

    def mask(self, source: int | None) -> BlockMask:
        """Masks this rank's queries against the keys of one rank, or of all."""
        queries = positions_of(self.order, self.axis.rank, self.axis.size, self.length)
        if source is None:
            keys = (range(self.key_length),)
        else:
            keys = positions_of(self.order, source, self.axis.size, self.key_length)
        return BlockMask(queries, keys, self.visible, keep_positions=self.keep_positions)


class _ContextParallelAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bias: Tensor | None, plan: _AttentionPlan
    ) -> Tensor:
        attention = PartialAttention(q, value_width=v.shape[-1], rules=ScoreRules(plan.softcap, sinks, bias))
        blocks = _ring_steps(plan.axis, (k, v)) if plan.kv_exchange == "ring" else [(None, _all_gather_kv(k, v, plan))]
        for source, (keys, values) in blocks:
            attention.attend_block(keys, values, plan.mask(source), dropout=plan.dropout)
        attention.add_sinks()
        out = attention.out_SBHE.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, attention.lse_BHS, sinks, bias)
        ctx.plan = plan
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks, bias = ctx.saved_tensors
        plan: _AttentionPlan = ctx.plan
        rule_grads = RuleGrads(ScoreRules(plan.softcap, sinks, bias))
        inputs = AttentionBackwardInputs.of(q, out_SBHE=out, lse_BHS=lse, grad_SBHE=grads[0])
        run_block = partial(block_backward, inputs, dropout=plan.dropout, rule_grads=rule_grads)
        backward = _ring_backward if plan.kv_exchange == "ring" else _all_gather_backward
        dq, dk, dv = backward(q, k, v, plan, run_block)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *rule_grads.of_inputs(inputs), None


def _ring_backward(q: Tensor, k: Tensor, v: Tensor, plan: _AttentionPlan, run_block: Callable[..., None]) -> QKVGrads:
    dq, local_dk, local_dv = zero_qkv_grads(q, k, v)
    grad_ring = _GradientRing(plan.axis)
    for source, (keys, values) in _ring_steps(plan.axis, (k, v)):
        is_local = source == plan.axis.rank
        dk, dv = (local_dk, local_dv) if is_local else (torch.zeros_like(local_dk), torch.zeros_like(local_dv))
        run_block(keys, values, plan.mask(source), grads=(dq, dk, dv))
        if not is_local:
            grad_ring.accumulate_and_send((dk, dv), k.dtype)
    grad_ring.receive_into((local_dk, local_dv))
    return dq, local_dk, local_dv


def _all_gather_backward(
    q: Tensor, k: Tensor, v: Tensor, plan: _AttentionPlan, run_block: Callable[..., None]
) -> QKVGrads:
    keys, values = _all_gather_kv(k, v, plan)
    dq, dk, dv = zero_qkv_grads(q, keys, values)
    run_block(keys, values, plan.mask(None), grads=(dq, dk, dv))
    kv_grads = sorted_by_rank(_pack_kv(dk.to(k.dtype), dv.to(v.dtype)), plan.axis.size, order=plan.order)
    return dq, *_unpack_kv(collectives.reduce_scatter(kv_grads, plan.axis), k, v)


def _ring_steps(axis: Axis, kv: KeyValue) -> Iterator[tuple[int, KeyValue]]:
    """Yields every rank with its keys and values, this one first; the next pair is received while one is used."""
    for step in range(axis.size):
        source = (axis.rank - step) % axis.size
        if step == axis.size - 1:
            yield source, kv
            return
        received = _empty_like(kv)
        handles = collectives.start_ring_shift(received, kv, axis)
        yield source, kv
        for handle in handles:
            handle.wait()
        kv = received


class _GradientRing:
    """Gradients of the keys in the ring, one step behind them."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._receive_buffers: KeyValue | None = None
        self._handles: list[collectives.Handle] = []

    def accumulate_and_send(self, grads: KeyValue, dtype: torch.dtype) -> None:
        """Adds the partial sum received from the rank before, and starts to send the result on."""
        self.receive_into(grads)
        partial_sums = grads[0].to(dtype), grads[1].to(dtype)
        self._receive_buffers = _empty_like(partial_sums)
        self._handles = collectives.start_ring_shift(self._receive_buffers, partial_sums, self._axis)

    def receive_into(self, grads: KeyValue) -> None:
        """Waits for the partial sums being received, if any, and adds them."""
        for handle in self._handles:
            handle.wait()
        if self._receive_buffers is not None:
            for total, received in zip(grads, self._receive_buffers):
                total.add_(received)


def _empty_like(pair: KeyValue) -> KeyValue:
    first, second = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in pair)
    return first, second


def _all_gather_kv(k: Tensor, v: Tensor, plan: _AttentionPlan) -> KeyValue:
    """All-gathers keys and values of the whole sequence in one collective, and sorts them by position."""
    gathered = collectives.all_gather(_pack_kv(k, v), plan.axis)
    return _unpack_kv(sorted_by_position(gathered, plan.axis.size, order=plan.order), k, v)


def _pack_kv(k_SBKE: Tensor, v_SBKE: Tensor) -> Tensor:
    return torch.cat((k_SBKE.flatten(2), v_SBKE.flatten(2)), dim=-1)


def _unpack_kv(packed: Tensor, k_SBKE: Tensor, v_SBKE: Tensor) -> KeyValue:
    k, v = packed.split([k_SBKE[0, 0].numel(), v_SBKE[0, 0].numel()], dim=-1)
    return k.unflatten(-1, k_SBKE.shape[2:]), v.unflatten(-1, v_SBKE.shape[2:])


def context_parallel_attention(
    q_SBHE: Tensor,
    k_SBKE: Tensor,
    v_SBKE: Tensor,
    axis: Axis,
    *,
    kv_exchange: KvExchange,
    order: SequenceOrder,
    visibility: Visibility,
    dropout: float,
    rules: ScoreRules | None = None,
) -> Tensor:
    """Computes attention of this rank's queries over the keys and values of every rank of the axis."""
    length, key_length = q_SBHE.shape[0] * axis.size, k_SBKE.shape[0] * axis.size
    rules, visible = rules or NO_RULES, VisibleKeys.of(visibility, length, q_SBHE.device)
    plan = _AttentionPlan(
        axis,
        kv_exchange,
        order,
        length,
        key_length,
        visible,
        AttentionDropout.draw(dropout),
        rules.softcap,
        keep_positions=rules.bias_HD is not None,
    )
    args = (q_SBHE, k_SBKE, v_SBKE, rules.sinks_H, rules.bias_HD, plan)
    return _ContextParallelAttention.apply(*args)  # pyright: ignore[reportReturnType]
