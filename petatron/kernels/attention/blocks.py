"""Attention over successive blocks of keys, merged by log-sum-exp.

If a query's output over some keys is O1 with log-sum-exp L1, and over some others O2 with L2, then over both it is

    L = log(exp L1 + exp L2)        O = O1 exp(L1 - L) + O2 exp(L2 - L)

so blocks may come in any order, from any rank. The sums are in at least float32. Shapes are those of the layers: S sequence,
B batch, H query heads, K kv heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from petatron.kernels.attention import flash
from petatron.kernels.attention.mask import BlockMask, MaskRectangle, MaskTile, mask_rectangles, mask_tiles
from petatron.kernels.attention.tiles import AttentionDropout, tile_backward, tile_forward
from petatron.kernels.compute_dtype import compute_dtype


class PartialAttention:
    """The attention of some queries over the blocks of keys so far."""

    def __init__(self, q_SBHE: Tensor, *, value_width: int, softcap: float | None = None) -> None:
        self._softcap = softcap
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
        for rectangle, tile, key in _rectangles_and_tiles(mask, self._q_BHSE, v, dropout, self._softcap):
            part = tile or rectangle
            q_part, k_part, v_part = (
                _slice_rows(self._q_BHSE, part.rows),
                _slice_rows(k, part.columns),
                _slice_rows(v, part.columns),
            )
            if tile is None:
                out, lse = flash.forward(q_part, k_part, v_part, causal=rectangle.kind == "causal")
            else:
                keyed = None if dropout is None else (dropout, key)
                out, lse = tile_forward(
                    q_part, k_part, v_part, masked_out=tile.masked_out, dropout=keyed, softcap=self._softcap
                )
            self._merge(part.rows, out, lse)

    def add_sinks(self, sinks_H: Tensor) -> None:
        """Adds the sink of every head, after all blocks."""
        sinks = sinks_H.to(self.lse_BHS.dtype)[:, None]
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


def sink_grads(inputs: AttentionBackwardInputs, sinks_H: Tensor) -> Tensor:
    """Returns the gradient of the sinks."""
    weights_BHS = (sinks_H.to(inputs.lse_BHS.dtype)[:, None] - inputs.lse_BHS).exp_()
    return -(weights_BHS * inputs.delta_BHS).sum((0, 2)).to(sinks_H.dtype)


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
    softcap: float | None = None,
) -> None:
    """Adds the contribution of this block of keys to `grads`."""
    q, out, grad = (_heads_first(x) for x in (inputs.q_SBHE, inputs.out_SBHE, inputs.grad_SBHE))
    k, v = _heads_first(k_SBKE), _heads_first(v_SBKE)
    dq, dk, dv = (_heads_first(x) for x in grads)
    for rectangle, tile, key in _rectangles_and_tiles(mask, q, v, dropout, softcap):
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
            delta = inputs.delta_BHS[:, :, rows.start : rows.stop]
            keyed = None if dropout is None else (dropout, key)
            part_grads = tile_backward(
                grad_part,
                q_part,
                k_part,
                v_part,
                lse_BHQ=lse,
                delta_BHQ=delta,
                masked_out=tile.masked_out,
                dropout=keyed,
                softcap=softcap,
            )
        for total, part_rows, part_grad in zip((dq, dk, dv), (rows, columns, columns), part_grads):
            _slice_rows(total, part_rows).add_(part_grad)


def _rectangles_and_tiles(
    mask: BlockMask, q: Tensor, v: Tensor, dropout: AttentionDropout | None, softcap: float | None
) -> Iterator[tuple[MaskRectangle, MaskTile | None, int]]:
    """Yields rectangles for a fused kernel (no tile), and the tiles of the others, each with a dropout key of its own."""
    fused = dropout is None and softcap is None and flash.supports(q, v)
    number = mask.keys[0].start << 24 if mask.keys else 0
    for rectangle in mask_rectangles(mask):
        if fused and rectangle.kind != "bounded":
            yield rectangle, None, number
            continue
        for tile in mask_tiles(rectangle, mask, q.device):
            number += 1
            yield rectangle, tile, number


def _heads_first(x_SBHE: Tensor) -> Tensor:
    return x_SBHE.permute(1, 2, 0, 3)


def _slice_rows(x_BHSE: Tensor, rows: range) -> Tensor:
    return x_BHSE[:, :, rows.start : rows.stop]
