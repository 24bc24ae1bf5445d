"""Attention over successive blocks of keys, merged by log-sum-exp.

If a query's output over some keys is O1 with log-sum-exp L1, and over some others O2 with L2, then over both it is

    L = log(exp L1 + exp L2)        O = O1 exp(L1 - L) + O2 exp(L2 - L)

so blocks may come in any order, from any rank. The sums are in at least float32. Shapes are those of the layers: S sequence,
B batch, H query heads, K kv heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from petatron.base.autograd_op import AutogradOp, first_derivative
from petatron.kernels.attention import flash
from petatron.kernels.attention.score_modifiers import NO_RULES, ScoreRules, distance_columns
from petatron.kernels.attention.tile_attention import AttentionDropout, TileRules, tile_backward, tile_forward
from petatron.kernels.attention.visibility import EVERYTHING
from petatron.kernels.attention.visible_key_intervals import (
    BlockMask,
    MaskRectangle,
    MaskTile,
    mask_rectangles,
    mask_tiles,
)
from petatron.kernels.compute_dtype import compute_dtype

VISIBILITY = EVERYTHING
"""What it computes: it is the reference."""


class PartialAttention:
    """The attention of some queries over the blocks of keys so far."""

    def __init__(self, q_SBHE: Tensor, *, value_width: int, rules: ScoreRules = NO_RULES) -> None:
        self._rules = rules
        length, batch, heads, _ = q_SBHE.shape
        self._q_BHSE = _heads_first(q_SBHE)
        dtype = compute_dtype(q_SBHE.dtype)
        self.out_SBHE = q_SBHE.new_zeros((length, batch, heads, value_width), dtype=dtype)
        self.lse_BHS = q_SBHE.new_full((batch, heads, length), float("-inf"), dtype=dtype)

    def attend_block(
        self, k_SBKE: Tensor, v_SBKE: Tensor, mask: BlockMask, *, dropout: AttentionDropout | None = None
    ) -> None:
        """Adds a block of keys and values; `mask` has their positions and those of the queries."""
        k, v = _heads_first(k_SBKE), _heads_first(v_SBKE)
        for rectangle, tile, key in _rectangles_and_tiles(mask, self._q_BHSE, v, dropout, self._rules):
            part = tile or rectangle
            q_part = _slice_rows(self._q_BHSE, part.rows)
            k_part, v_part = _slice_rows(k, part.columns), _slice_rows(v, part.columns)
            if tile is None:
                out, lse = flash.forward(q_part, k_part, v_part, causal=rectangle.kind == "causal")
            else:
                out, lse = tile_forward(q_part, k_part, v_part, _tile_rules(tile, dropout, key, self._rules))
            self._merge(part.rows, out, lse)

    def add_sinks(self) -> None:
        """Adds the sink of every head, if the rules have some, after all blocks."""
        if self._rules.sinks_H is None:
            return
        sinks = self._rules.sinks_H.to(self.lse_BHS.dtype)[:, None]
        with_sinks = torch.logaddexp(self.lse_BHS, sinks)
        _heads_first(self.out_SBHE).mul_((self.lse_BHS - with_sinks).exp_().unsqueeze(-1))
        self.lse_BHS.copy_(with_sinks)

    def _merge(self, rows: range, out_BHQE: Tensor, lse_BHQ: Tensor) -> None:
        out, lse = _slice_rows(_heads_first(self.out_SBHE), rows), self.lse_BHS[:, :, rows.start : rows.stop]
        merged = torch.logaddexp(lse, lse_BHQ)
        finite = merged.clamp(min=torch.finfo(merged.dtype).min)  # -inf - -inf where no key has been visible yet
        out.mul_((lse - finite).exp_().unsqueeze(-1))
        out.addcmul_(out_BHQE.to(out.dtype), (lse_BHQ - finite).exp_().unsqueeze(-1))
        lse.copy_(merged)


@dataclass(frozen=True, slots=True)
class AttentionBackwardInputs:
    """Queries with their final output over all keys, and the gradient of that output."""

    q_SBHE: Tensor
    out_SBHE: Tensor
    lse_BHS: Tensor
    grad_SBHE: Tensor
    delta_BHS: Tensor

    @classmethod
    def of(cls, q_SBHE: Tensor, *, out_SBHE: Tensor, lse_BHS: Tensor, grad_SBHE: Tensor) -> AttentionBackwardInputs:
        dtype = lse_BHS.dtype
        delta = (grad_SBHE.to(dtype) * out_SBHE.to(dtype)).sum(dim=-1).permute(1, 2, 0)
        # The kernels need a dense last dimension; autograd may pass an expanded gradient.
        return cls(q_SBHE, out_SBHE, lse_BHS, grad_SBHE.contiguous(), delta.contiguous())


class RuleGrads:
    """Gradients of sinks and biases; those of biases are accumulated block by block."""

    def __init__(self, rules: ScoreRules) -> None:
        self.rules, bias = rules, rules.bias_HD
        self.bias_HD = None if bias is None else torch.zeros_like(bias, dtype=compute_dtype(bias.dtype))

    def add_tile(self, tile: MaskTile, grad_HQT: Tensor | None) -> None:
        if self.bias_HD is not None and grad_HQT is not None:
            columns = distance_columns(self.bias_HD, tile.distance, *grad_HQT.shape[1:])
            self.bias_HD.index_add_(1, columns.flatten(), grad_HQT.flatten(1))

    def of_inputs(self, inputs: AttentionBackwardInputs) -> tuple[Tensor | None, Tensor | None]:
        """Returns the gradients of sinks and biases, after all blocks."""
        sinks_H, bias_HD = self.rules.sinks_H, self.rules.bias_HD
        sinks_grad = None
        if sinks_H is not None:
            weights_BHS = (sinks_H.to(inputs.lse_BHS.dtype)[:, None] - inputs.lse_BHS).exp_()
            sinks_grad = -(weights_BHS * inputs.delta_BHS).sum((0, 2)).to(sinks_H.dtype)
        assert self.bias_HD is None or bias_HD is not None
        return sinks_grad, None if self.bias_HD is None or bias_HD is None else self.bias_HD.to(bias_HD.dtype)


QKVGrads = tuple[Tensor, Tensor, Tensor]
"""Gradients of queries, keys and values, with their shapes."""


def zero_qkv_grads(q: Tensor, k: Tensor, v: Tensor) -> QKVGrads:
    """Allocates gradients in at least float32, to accumulate into."""
    dtype = compute_dtype(q.dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    return dq, dk, dv


def block_backward(
    inputs: AttentionBackwardInputs,
    k_SBKE: Tensor,
    v_SBKE: Tensor,
    mask: BlockMask,
    *,
    grads: QKVGrads,
    dropout: AttentionDropout | None = None,
    rule_grads: RuleGrads | None = None,
) -> None:
    """Adds the contribution of this block of keys to `grads`, and to `rule_grads`, which have the rules of scores, if there are some."""
    rules = NO_RULES if rule_grads is None else rule_grads.rules
    q, out, grad = (_heads_first(x) for x in (inputs.q_SBHE, inputs.out_SBHE, inputs.grad_SBHE))
    k, v = _heads_first(k_SBKE), _heads_first(v_SBKE)
    dq, dk, dv = (_heads_first(x) for x in grads)
    for rectangle, tile, key in _rectangles_and_tiles(mask, q, v, dropout, rules):
        part = tile or rectangle
        rows, columns = part.rows, part.columns
        lse = inputs.lse_BHS[:, :, rows.start : rows.stop]
        q_part, grad_part = _slice_rows(q, rows), _slice_rows(grad, rows)
        k_part, v_part = _slice_rows(k, columns), _slice_rows(v, columns)
        if tile is None:
            causal = rectangle.kind == "causal"
            part_grads = flash.backward(
                grad_part, q_part, k_part, v_part, out=_slice_rows(out, rows), lse=lse, causal=causal
            )
        else:
            delta, of_tile = inputs.delta_BHS[:, :, rows.start : rows.stop], _tile_rules(tile, dropout, key, rules)
            *part_grads, bias_grad = tile_backward(
                grad_part, q_part, k_part, v_part, of_tile, lse_BHQ=lse, delta_BHQ=delta
            )
            if rule_grads is not None:
                rule_grads.add_tile(tile, bias_grad)
        for total, part_rows, part_grad in zip((dq, dk, dv), (rows, columns, columns), part_grads):
            _slice_rows(total, part_rows).add_(part_grad)


def _tile_rules(tile: MaskTile, dropout: AttentionDropout | None, key: int, rules: ScoreRules) -> TileRules:
    bias = rules.bias_HD
    if bias is not None:
        bias = bias[:, distance_columns(bias, tile.distance, len(tile.rows), len(tile.columns))]
    return TileRules(tile.masked_out, None if dropout is None else (dropout, key), rules.softcap, bias)


def _rectangles_and_tiles(
    mask: BlockMask, q: Tensor, v: Tensor, dropout: AttentionDropout | None, rules: ScoreRules
) -> Iterator[tuple[MaskRectangle, MaskTile | None, int]]:
    """Yields rectangles for a fused kernel (no tile), and the tiles of the others, each with a dropout key of its own."""
    fused = dropout is None and rules.softcap is None and rules.bias_HD is None and flash.supports(q, v)
    assert rules.bias_HD is None or mask.keep_positions, "biases need the positions of tiles"
    number = mask.keys[0].start << 24 if mask.keys else 0
    for rectangle in mask_rectangles(mask):
        if fused and rectangle.kind != "bounded":
            yield rectangle, None, number
            continue
        for tile in mask_tiles(rectangle, mask, q.device):
            number += 1
            yield rectangle, tile, number


def block_attention(
    q_SBHE: Tensor,
    k_SBKE: Tensor,
    v_SBKE: Tensor,
    mask: BlockMask,
    *,
    dropout: float = 0.0,
    rules: ScoreRules | None = None,
) -> Tensor:
    """Attention of any queries over any keys, by the positions that the mask gives them."""
    rules, drawn = rules or NO_RULES, AttentionDropout.draw(dropout)
    args = (q_SBHE, k_SBKE, v_SBKE, rules.sinks_H, rules.bias_HD, mask, drawn, rules.softcap)
    return _BlockAttention.apply(*args)  # pyright: ignore[reportReturnType]


class _BlockAttention(AutogradOp):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        bias: Tensor | None,
        mask: BlockMask,
        dropout: AttentionDropout | None,
        softcap: float | None,
    ) -> Tensor:
        partial = PartialAttention(q, value_width=v.shape[-1], rules=ScoreRules(softcap, sinks, bias))
        partial.attend_block(k, v, mask, dropout=dropout)
        partial.add_sinks()
        out = partial.out_SBHE.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, partial.lse_BHS, sinks, bias)
        ctx.mask, ctx.dropout, ctx.softcap = mask, dropout, softcap
        return out

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks, bias = ctx.saved_tensors
        backward_inputs = AttentionBackwardInputs.of(q, out_SBHE=out, lse_BHS=lse, grad_SBHE=grads[0])
        qkv_grads, rule_grads = zero_qkv_grads(q, k, v), RuleGrads(ScoreRules(ctx.softcap, sinks, bias))
        block_backward(backward_inputs, k, v, ctx.mask, grads=qkv_grads, dropout=ctx.dropout, rule_grads=rule_grads)
        return *(grad.to(q.dtype) for grad in qkv_grads), *rule_grads.of_inputs(backward_inputs), None, None, None


def _heads_first(x_SBHE: Tensor) -> Tensor:
    return x_SBHE.permute(1, 2, 0, 3)


def _slice_rows(x_BHSE: Tensor, rows: range) -> Tensor:
    return x_BHSE[:, :, rows.start : rows.stop]
