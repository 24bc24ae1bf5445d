"""Attention of queries that see an interval of keys each, with biases by distance: the reference, and the op under autograd.

Every visibility but first tokens is such an interval (`visible_key_intervals.py`), of a batch's documents, padding, windows and spans of
another sequence too. The two bounds of each query stay on the device: nothing is planned by the host, so a CUDA graph may hold it.

Biases are those of `ScoreRules`: a column of the table for each distance. With P the softmax and dS the gradient of scores, the gradient of
a column is the sum of dS over all pairs of that distance.

S sequence of the queries, T of the keys, B batch, H query heads, K kv heads, E head dim, D distances.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from petatron.base.autograd_op import AutogradOp, first_derivative
from petatron.kernels.attention.score_modifiers import distance_columns
from petatron.kernels.attention.tile_attention import TileRules, tile_backward, tile_forward
from petatron.kernels.attention.visibility import Visibility, VisibilitySupport
from petatron.kernels.attention.visible_key_intervals import interval_tensors

VISIBILITY = VisibilitySupport.of(
    "causal", "full", "prefix", "cross", window=True, documents=True, key_spans=True, score_rules=True
)
"""Of score rules, biases by distance alone."""


class KeyIntervals(NamedTuple):
    """Both directions of what is visible, as int32: keys first_BS <= t < stop_BS of query s, and queries s of key t likewise."""

    first_BS: Tensor
    stop_BS: Tensor
    first_query_BT: Tensor
    stop_query_BT: Tensor


class KeyIntervalKernels(Protocol):
    """The interface of this module and its faster implementation; heads are [S, B, H, E]."""

    def unsupported_tensors_reason(self, q: Tensor, v: Tensor) -> str | None: ...

    def forward(
        self,
        q_SBHE: Tensor,
        k_TBKE: Tensor,
        v_TBKE: Tensor,
        bias_HD: Tensor | None,
        intervals: KeyIntervals | None,
        *,
        causal: bool,
    ) -> tuple[Tensor, Tensor]: ...

    def backward(
        self,
        grad_SBHE: Tensor,
        q_SBHE: Tensor,
        k_TBKE: Tensor,
        v_TBKE: Tensor,
        bias_HD: Tensor | None,
        intervals: KeyIntervals | None,
        *,
        out_SBHE: Tensor,
        lse_BHS: Tensor,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]: ...


def unsupported_tensors_reason(q: Tensor, v: Tensor) -> str | None:
    """Returns why these functions should not run on such tensors; None: they should."""
    return "the reference has all scores of a sequence in memory, unlike blocks and tiles"


def forward(
    q_SBHE: Tensor,
    k_TBKE: Tensor,
    v_TBKE: Tensor,
    bias_HD: Tensor | None,
    intervals: KeyIntervals | None,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the output [S, B, H, E] and the log-sum-exp [B, H, S]; 0 and -inf where a query sees no key.

    Without intervals a query sees all keys, or, if `causal`, those up to itself.
    """
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBHE, k_TBKE, v_TBKE))
    out, lse = tile_forward(q, k, v, _rules(q_SBHE, k_TBKE, bias_HD, intervals, causal=causal))
    return out.permute(2, 0, 1, 3).to(q_SBHE.dtype), lse


def backward(
    grad_SBHE: Tensor,
    q_SBHE: Tensor,
    k_TBKE: Tensor,
    v_TBKE: Tensor,
    bias_HD: Tensor | None,
    intervals: KeyIntervals | None,
    *,
    out_SBHE: Tensor,
    lse_BHS: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns the gradients of queries, keys, values and biases."""
    grad, q, k, v = (x.permute(1, 2, 0, 3) for x in (grad_SBHE, q_SBHE, k_TBKE, v_TBKE))
    delta_BHS = (grad_SBHE.to(lse_BHS.dtype) * out_SBHE.to(lse_BHS.dtype)).sum(-1).permute(1, 2, 0)
    rules = _rules(q_SBHE, k_TBKE, bias_HD, intervals, causal=causal)
    *qkv_grads, grad_HST = tile_backward(grad, q, k, v, rules, lse_BHQ=lse_BHS, delta_BHQ=delta_BHS.contiguous())
    dq, dk, dv = (x.permute(2, 0, 1, 3).to(q.dtype) for x in qkv_grads)
    if bias_HD is None or grad_HST is None:
        return dq, dk, dv, None
    columns = distance_columns(bias_HD, 0, *grad_HST.shape[1:])
    bias_grad = torch.zeros_like(bias_HD, dtype=grad_HST.dtype).index_add_(1, columns.flatten(), grad_HST.flatten(1))
    return dq, dk, dv, bias_grad.to(bias_HD.dtype)


def _rules(
    q_SBHE: Tensor, k_TBKE: Tensor, bias_HD: Tensor | None, intervals: KeyIntervals | None, *, causal: bool
) -> TileRules:
    rows, columns = q_SBHE.shape[0], k_TBKE.shape[0]
    key, masked_out = torch.arange(columns, device=q_SBHE.device), None
    if intervals is not None:
        masked_out = (key < intervals.first_BS[..., None]) | (key >= intervals.stop_BS[..., None])
    elif causal:
        masked_out = key > torch.arange(rows, device=key.device)[:, None]
    bias = None if bias_HD is None else bias_HD[:, distance_columns(bias_HD, 0, rows, columns)]
    return TileRules(masked_out, bias_HQT=bias)


def key_interval_attention(
    q_SBHE: Tensor,
    k_TBKE: Tensor,
    v_TBKE: Tensor,
    visibility: Visibility,
    bias_HD: Tensor | None,
    kernels: KeyIntervalKernels,
) -> Tensor:
    """Softmax attention of each query over the keys that it sees."""
    intervals = _intervals(visibility, q_SBHE, k_TBKE)
    return _KeyIntervalAttention.apply(q_SBHE, k_TBKE, v_TBKE, bias_HD, intervals, visibility.is_causal, kernels)


def _intervals(visibility: Visibility, q_SBHE: Tensor, k_TBKE: Tensor) -> KeyIntervals | None:
    """Makes the intervals; once for all layers with the same visibility of a batch's documents."""
    (length, batch), key_length = q_SBHE.shape[:2], k_TBKE.shape[0]
    parts = visibility.documents or visibility.key_spans
    cached = {} if parts is None else parts.computed
    name = ("intervals", visibility, length, key_length, q_SBHE.device)
    if name not in cached:
        bounds = interval_tensors(visibility, length, q_SBHE.device)
        cached[name] = None if bounds is None else _both_directions(*bounds, batch, key_length)
    return cached[name]


def _both_directions(first_BS: Tensor, stop_BS: Tensor, batch: int, key_length: int) -> KeyIntervals:
    """Adds the interval of queries of each key. Both bounds grow along the sequence, so that it is one."""
    first, stop = (x.expand(batch, -1).to(torch.int32).contiguous() for x in (first_BS, stop_BS))
    keys = torch.arange(key_length, dtype=torch.int32, device=first.device).expand(batch, -1).contiguous()
    first_query, stop_query = (torch.searchsorted(x, keys, right=True, out_int32=True) for x in (stop, first))
    return KeyIntervals(first, stop, first_query, stop_query)


class _KeyIntervalAttention(AutogradOp):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        intervals: KeyIntervals | None,
        causal: bool,
        kernels: KeyIntervalKernels,
    ) -> Tensor:
        out, lse = kernels.forward(q, k, v, bias, intervals, causal=causal)
        # All layers share the intervals, which no hook need offload or recompute.
        ctx.intervals, ctx.causal, ctx.kernels = intervals, causal, kernels
        ctx.save_for_backward(q, k, v, bias, out, lse)
        return out

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, out, lse = ctx.saved_tensors
        known = {"out_SBHE": out, "lse_BHS": lse, "causal": ctx.causal}
        return *ctx.kernels.backward(grads[0], q, k, v, bias, ctx.intervals, **known), None, None, None
