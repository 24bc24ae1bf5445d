"""Splits the QKV GEMM's output into q, k and v with qk-norm and rope applied, under autograd; and merges heads again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from petatron.base.autograd_op import AutogradOp, first_derivative
from petatron.kernels.qk_norm_rope import QKNormSpec, TensorPair, TensorTriple
from petatron.kernels.rope import split_qkv
from petatron.layers.forward_context import RopeCosSin
from petatron.layers.norm import RMSNorm, submit_norm_grad
from petatron.layers.ops.recompute_output import DeferredOutput, MaybeTensors, SavedViewFunction, Tensors
from petatron.layers.token_rows import TokenRows, is_batch_first

QKNorms = tuple[RMSNorm, RMSNorm]
"""The norms of queries and of keys."""


class RopeKernels(Protocol):
    """See `kernels/rope.py`."""

    split_qkv_rope: Callable[..., TensorTriple]
    split_qkv_rope_backward: Callable[..., Tensor]
    join_qkv_grads: Callable[..., Tensor]


class QKNormRopeKernels(Protocol):
    """See `kernels/qk_norm_rope.py`."""

    split_qkv_norm_rope: Callable[..., TensorTriple]
    split_qkv_norm_rope_backward: Callable[..., TensorPair]


class _SplitQKV(AutogradOp):
    """Returns views. Their gradients are joined in the memory order of the whole: autograd would concatenate and copy them."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, rows: TokenRows | None, heads: tuple[int, int], kernels: RopeKernels
    ) -> TensorTriple:
        ctx.shape, ctx.stride, ctx.kernels = qkv.shape, qkv.stride(), kernels
        ctx.batch_first = rows is not None and rows.batch_first
        return _views(qkv, rows, heads)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        out = grads[-1].new_empty_strided(ctx.shape, ctx.stride)
        return ctx.kernels.join_qkv_grads(*grads, out=out, batch_first=ctx.batch_first), None, None, None


def _views(qkv: Tensor, rows: TokenRows | None, heads: tuple[int, int]) -> TensorTriple:
    num_heads, num_kv_heads = heads
    qkv_SBF = qkv if rows is None else rows.unflatten(qkv)
    q, k, v = split_qkv(qkv_SBF, num_heads=num_heads, num_kv_heads=num_kv_heads)
    return q, k, v


def split_qkv_without_rope(
    qkv: Tensor, *, num_heads: int, num_kv_heads: int, kernels: RopeKernels, rows: TokenRows | None = None
) -> TensorTriple:
    """Returns views q [S, B, H, E], k and v [S, B, K, E] of `qkv`; `rows` says how it is flattened, if it is.

    Keys and values alone are those of no query head.
    """
    heads = num_heads, num_kv_heads
    if not torch.is_grad_enabled():
        return _views(qkv, rows, heads)
    return _SplitQKV.apply(qkv, rows, heads, kernels)  # pyright: ignore[reportReturnType]


class _SplitQKVRope(AutogradOp):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, split: Callable[..., TensorTriple], join: Callable[..., Tensor], rope_cos_sin: RopeCosSin
    ) -> TensorTriple:
        # All layers share cos and sin, which no hook need offload or recompute.
        ctx.join, ctx.rope_cos_sin = join, rope_cos_sin
        ctx.shape, ctx.stride = qkv.shape, qkv.stride()
        return split(qkv, *rope_cos_sin)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        out = grads[0].new_empty_strided(ctx.shape, ctx.stride)
        return ctx.join(*grads, *ctx.rope_cos_sin, out=out), None, None, None


def split_qkv_rope(
    qkv: Tensor,
    rope_cos_sin: RopeCosSin,
    *,
    num_heads: int,
    num_kv_heads: int,
    kernels: RopeKernels,
    rows: TokenRows | None = None,
) -> TensorTriple:
    """Returns q [S, B, H, E], k and v [S, B, K, E] as new tensors in the memory order of `qkv`; q and k have rope applied.

    `rows` says how `qkv` is flattened, if it is.
    """
    batch, batch_first = (None, is_batch_first(qkv)) if rows is None else rows
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "batch": batch, "batch_first": batch_first}
    split = partial(kernels.split_qkv_rope, **sizes)
    if not torch.is_grad_enabled():
        return split(qkv, *rope_cos_sin)
    join = partial(kernels.split_qkv_rope_backward, batch_first=batch_first)
    return _SplitQKVRope.apply(qkv, split, join, rope_cos_sin)  # pyright: ignore[reportReturnType]


class _MergedHeads(SavedViewFunction):
    """Heads [S, B, H, E] as rows [R, H E]; a view, which the GEMM that takes it saves."""

    __slots__ = ("_num_heads", "_rows")

    def __init__(self, rows: TokenRows, num_heads: int) -> None:
        self._rows, self._num_heads = rows, num_heads

    def forward(self, *inputs: Tensor) -> tuple[Tensors, Tensors]:
        merged = self._rows.flatten_heads(inputs[0])
        return (merged,), (merged,)

    def backward(
        self, saved: Tensors, grads: MaybeTensors, *, recompute_output: bool
    ) -> tuple[MaybeTensors, Tensor | None]:
        (grad,), merged = grads, saved[0] if recompute_output else None
        assert grad is not None
        return (self._rows.unflatten(grad.view(grad.shape[0], self._num_heads, -1)),), merged


def merge_heads(y_SBHE: Tensor, rows: TokenRows) -> DeferredOutput:
    """Flattens attention's output to rows within the autograd node of the GEMM that takes them."""
    return DeferredOutput(_MergedHeads(rows, y_SBHE.shape[2]), y_SBHE)


class _SplitQKVNormRope(AutogradOp):
    """Saves the QKV output, of which v is a view, and no normalized tensor."""

    @staticmethod
    def forward(
        ctx: Any, norms: QKNorms, norm: QKNormSpec, kernels: QKNormRopeKernels, *tensors: Tensor
    ) -> TensorTriple:
        qkv, q_weight, k_weight, cos, sin = tensors
        ctx.save_for_backward(*tensors)
        ctx.norms, ctx.norm, ctx.kernels = norms, norm, kernels
        return kernels.split_qkv_norm_rope(qkv, (q_weight, k_weight), (cos, sin), norm, batch_first=is_batch_first(qkv))

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, q_weight, k_weight, cos, sin = ctx.saved_tensors
        out = torch.empty_strided(qkv.shape, qkv.stride(), dtype=qkv.dtype, device=qkv.device)
        weight_grads = ctx.kernels.split_qkv_norm_rope_backward(
            grads, qkv, (q_weight, k_weight), (cos, sin), ctx.norm, out=out
        )
        returned_grads = (
            submit_norm_grad(norm, norm.weight, grad) for norm, grad in zip(ctx.norms, weight_grads, strict=True)
        )
        return None, None, None, out, *returned_grads, None, None


def split_qkv_norm_rope(
    qkv: Tensor,
    rope_cos_sin: RopeCosSin,
    norms: QKNorms,
    *,
    num_heads: int,
    num_kv_heads: int,
    kernels: QKNormRopeKernels,
) -> TensorTriple:
    """Returns q [S, B, H, E] and k [S, B, K, E], normalized and with rope, in the memory order of `qkv`; v is a view of it."""
    spec = QKNormSpec(num_heads, num_kv_heads, norms[0].eps, norms[0].zero_centered_gamma)
    weights = (norm.weight for norm in norms)
    return _SplitQKVNormRope.apply(norms, spec, kernels, qkv, *weights, *rope_cos_sin)  # pyright: ignore[reportReturnType]
