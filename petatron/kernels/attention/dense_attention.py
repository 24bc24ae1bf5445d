"""Attention of dense batches, causal, full or to another sequence, by the fastest kernel that takes their tensors.

S sequence, B batch, H query heads, K kv heads, E head dim.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from petatron.base.autograd_op import AutogradOp, first_derivative
from petatron.kernels.attention import cudnn, flash
from petatron.kernels.attention.visibility import VisibilitySupport

VISIBILITY = VisibilitySupport.of("causal", "full", "cross")
"""What all the kernels here compute."""
_HEADS_FIRST = (1, 2, 0, 3)
"""Permutes to the view [B, H, S, E] that PyTorch's kernels take."""


def dense_attention(q_SBHE: Tensor, k_SBKE: Tensor, v_SBKE: Tensor, *, dropout: float, causal: bool) -> Tensor:
    """Attention of whole sequences; keys may be those of another one if it is not causal."""
    kernel = _kernel_of_ours(q_SBHE, v_SBKE) if dropout == 0.0 else None
    if kernel is not None:
        return _KernelAttention.apply(q_SBHE, k_SBKE, v_SBKE, causal, kernel)
    q, k, v = q_SBHE.permute(_HEADS_FIRST), k_SBKE.permute(_HEADS_FIRST), v_SBKE.permute(_HEADS_FIRST)
    # Dropout on a CPU is PyTorch's composite of GEMMs, which widens half precision by itself.
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, dropout_p=dropout, enable_gqa=q.shape[1] != k.shape[1]
    ).permute(2, 0, 1, 3)


def equal_length_attention(q_SBHE: Tensor, k_SBKE: Tensor, v_SBKE: Tensor, length: int, *, causal: bool) -> Tensor:
    """Treats documents of one length as a larger batch of shorter sequences; a view where memory is batch first."""
    sequence, batch = q_SBHE.shape[:2]
    q, k, v = (x.transpose(0, 1).reshape(-1, length, *x.shape[2:]).transpose(0, 1) for x in (q_SBHE, k_SBKE, v_SBKE))
    return (
        dense_attention(q, k, v, dropout=0.0, causal=causal)
        .transpose(0, 1)
        .reshape(batch, sequence, q_SBHE.shape[2], v_SBKE.shape[3])
        .transpose(0, 1)
    )


def _kernel_of_ours(q_SBHE: Tensor, v_SBKE: Tensor) -> ModuleType | None:
    """Returns the module that calls the kernel instead of PyTorch's `scaled_dot_product_attention`, where that is faster."""
    if q_SBHE.shape[0] >= cudnn.MIN_SEQUENCE_LENGTH and cudnn.unsupported_tensors_reason(q_SBHE, v_SBKE) is None:
        return cudnn
    ours = flash.widens(q_SBHE) or q_SBHE.shape[-1] != v_SBKE.shape[-1]
    return flash if ours and flash.supports(q_SBHE, v_SBKE) else None


class _KernelAttention(AutogradOp):
    """One call; a node of its own because of the gradient's layout (`cudnn.py`), or to save operands before they are widened.

    Views that kernels need are taken inside: as ops of their own, autograd would follow each of them there and back.
    """

    @staticmethod
    def forward(ctx: Any, q_SBHE: Tensor, k_SBKE: Tensor, v_SBKE: Tensor, causal: bool, kernel: ModuleType) -> Tensor:
        q, k, v = q_SBHE.permute(_HEADS_FIRST), k_SBKE.permute(_HEADS_FIRST), v_SBKE.permute(_HEADS_FIRST)
        out, lse = kernel.forward(q, k, v, causal=causal)
        out = out if out.dtype == q.dtype else out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.kernel = causal, kernel
        return out.permute(2, 0, 1, 3)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        qkv_grads = ctx.kernel.backward(grads[0].permute(_HEADS_FIRST), q, k, v, out=out, lse=lse, causal=ctx.causal)
        if qkv_grads[0].dtype != q.dtype:
            qkv_grads = [grad.to(q.dtype) for grad in qkv_grads]
        dq, dk, dv = qkv_grads
        return dq.permute(2, 0, 1, 3), dk.permute(2, 0, 1, 3), dv.permute(2, 0, 1, 3), None, None
