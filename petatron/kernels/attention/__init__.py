"""Attention on one device: the fastest kernel that supports these tensors, else blocks and tiles.

Causally, a token attends to itself and the tokens before it, at most `window` of them, and none before the start of its document.

    neither window nor documents       cuDNN on Hopper, else PyTorch's choice; FlashAttention where values are narrower than keys
    documents                          cuDNN on Hopper for long ones (`documents.py`), else FlashAttention on NVIDIA GPUs
    windows, with or without them      FlashAttention on NVIDIA GPUs
    rules of scores                    `score_rules.py`; rectangles as below, those of a soft cap in tiles only
    everything else                    the sequence is cut into rectangles (`mask.py`), so that masked-out parts cost neither
                                       time nor memory

The first three are for half precision. None of them synchronises with the device: what the host needs to know of the documents
was computed with the batch.

S sequence, B batch, H query heads, K kv heads, E head dim.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from petatron.base.autograd_op import AutogradOp, first_derivative
from petatron.kernels.attention import cudnn, flash, rows
from petatron.kernels.attention.blocks import (
    AttentionBackwardInputs,
    PartialAttention,
    block_backward,
    sink_grads,
    zero_qkv_grads,
)
from petatron.kernels.attention.documents import Documents, cut_into_chunks
from petatron.kernels.attention.mask import AttentionBounds, BlockMask
from petatron.kernels.attention.padded import PackingKernels, PaddedKernels, padded_attention
from petatron.kernels.attention.score_rules import ScoreRules
from petatron.kernels.attention.tiles import AttentionDropout

_PLANNED_LENGTHS = 256
"""Where lengths vary, cuDNN computes the multiples of this: few enough for each to have its plan."""


def causal_attention(
    q_SBHE: Tensor,
    k_SBKE: Tensor,
    v_SBKE: Tensor,
    *,
    window: int | None = None,
    dropout: float = 0.0,
    documents: Documents | None = None,
    packing_kernels: PackingKernels = rows,
    lengths_vary: bool = False,
    rules: ScoreRules | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Softmax attention of each token to itself and the tokens of its document before it, at most `window` of them.

    `packing_kernels` gathers tokens into padded rows and scatters them back: `rows` or a faster implementation. `lengths_vary`: hardly
    a length comes again. cuDNN builds a plan for each, so few of them are computed by it. `chunk`: documents are cut into as many
    tokens, which are then documents of their own.
    """
    length = q_SBHE.shape[0]
    if not q_SBHE.numel():
        return _no_attention(q_SBHE, k_SBKE, v_SBKE)
    if chunk is not None and chunk < length:
        documents = cut_into_chunks(documents, chunk, batch=q_SBHE.shape[1], length=length, device=q_SBHE.device)
    limit = window if window is not None and window < length else None
    if rules is not None:
        return _attention_in_blocks(q_SBHE, k_SBKE, v_SBKE, window, dropout, documents, rules)
    if lengths_vary and limit is None and flash.supports_varlen(q_SBHE, v_SBKE):
        common = length if documents is None else documents.equal_length
        if common is None or common % _PLANNED_LENGTHS:
            return flash.varlen_attention(q_SBHE, k_SBKE, v_SBKE, window=None, documents=documents, dropout=dropout)
    if limit is None and documents is None:
        return _dense_attention(q_SBHE, k_SBKE, v_SBKE, dropout=dropout, causal=True)
    if (
        documents is not None
        and limit is None
        and dropout == 0.0
        and cudnn.unsupported_tensors_reason(q_SBHE, v_SBKE) is None
    ):
        if documents.equal_length is not None:
            return _equal_length_attention(q_SBHE, k_SBKE, v_SBKE, documents.equal_length)
        if documents.padded_rows is not None and q_SBHE.shape[-1] == v_SBKE.shape[-1]:
            return padded_attention(
                q_SBHE, k_SBKE, v_SBKE, documents.padded_rows, PaddedKernels(packing_kernels, cudnn, flash)
            )
    if flash.supports_varlen(q_SBHE, v_SBKE):
        return flash.varlen_attention(q_SBHE, k_SBKE, v_SBKE, window=limit, documents=documents, dropout=dropout)
    return _attention_in_blocks(q_SBHE, k_SBKE, v_SBKE, window, dropout, documents, None)


def _attention_in_blocks(
    q_SBHE: Tensor,
    k_SBKE: Tensor,
    v_SBKE: Tensor,
    window: int | None,
    dropout: float,
    documents: Documents | None,
    rules: ScoreRules | None,
) -> Tensor:
    length = q_SBHE.shape[0]
    starts = None if documents is None else documents.starts_BS
    bounds = AttentionBounds.build(length, window=window, document_starts_BS=starts, device=q_SBHE.device)
    whole = (range(length),)
    return block_attention(q_SBHE, k_SBKE, v_SBKE, BlockMask(whole, whole, bounds), dropout=dropout, rules=rules)


def full_attention(q_SBHE: Tensor, k_TBKE: Tensor, v_TBKE: Tensor, *, dropout: float = 0.0) -> Tensor:
    """Softmax attention of each token to all T keys, which may be those of another sequence."""
    if not q_SBHE.numel():
        return _no_attention(q_SBHE, k_TBKE, v_TBKE)
    return _dense_attention(q_SBHE, k_TBKE, v_TBKE, dropout=dropout, causal=False)


def _no_attention(q_SBHE: Tensor, k_SBKE: Tensor, v_SBKE: Tensor) -> Tensor:
    """Returns the output of no tokens, of which gradients are zero; PyTorch's kernels for the CPU divide by how many there are."""
    nothing = q_SBHE.sum(dim=-1, keepdim=True) + 0.0 * (k_SBKE.sum() + v_SBKE.sum())
    return nothing.expand(*q_SBHE.shape[:-1], v_SBKE.shape[-1])


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
    softcap, sinks_H = (None, None) if rules is None else (rules.softcap, rules.sinks_H)
    drawn = AttentionDropout.draw(dropout)
    return _BlockAttention.apply(q_SBHE, k_SBKE, v_SBKE, sinks_H, mask, drawn, softcap)  # pyright: ignore[reportReturnType]


def _equal_length_attention(q_SBHE: Tensor, k_SBKE: Tensor, v_SBKE: Tensor, length: int) -> Tensor:
    """Treats documents of one length as a larger batch of shorter sequences; a view where memory is batch first."""
    sequence, batch = q_SBHE.shape[:2]
    q, k, v = (x.transpose(0, 1).reshape(-1, length, *x.shape[2:]).transpose(0, 1) for x in (q_SBHE, k_SBKE, v_SBKE))
    return (
        _dense_attention(q, k, v, dropout=0.0, causal=True)
        .transpose(0, 1)
        .reshape(batch, sequence, q_SBHE.shape[2], v_SBKE.shape[3])
        .transpose(0, 1)
    )


def _dense_attention(q_SBHE: Tensor, k_SBKE: Tensor, v_SBKE: Tensor, *, dropout: float, causal: bool) -> Tensor:
    kernel = _kernel_of_ours(q_SBHE, v_SBKE) if dropout == 0.0 else None
    if kernel is not None:
        return _KernelAttention.apply(q_SBHE, k_SBKE, v_SBKE, causal, kernel)
    q, k, v = _heads_before_tokens(q_SBHE), _heads_before_tokens(k_SBKE), _heads_before_tokens(v_SBKE)
    # Dropout on a CPU is PyTorch's composite of GEMMs, which widens half precision by itself.
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, dropout_p=dropout, enable_gqa=q.shape[1] != k.shape[1]
    ).permute(2, 0, 1, 3)


def _heads_before_tokens(x_SBHE: Tensor) -> Tensor:
    """Returns the view [B, H, S, E] that PyTorch's kernels take."""
    return x_SBHE.permute(1, 2, 0, 3)


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
        q, k, v = _heads_before_tokens(q_SBHE), _heads_before_tokens(k_SBKE), _heads_before_tokens(v_SBKE)
        out, lse = kernel.forward(q, k, v, causal=causal)
        out = out if out.dtype == q.dtype else out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.kernel = causal, kernel
        return out.permute(2, 0, 1, 3)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        qkv_grads = ctx.kernel.backward(_heads_before_tokens(grads[0]), q, k, v, out=out, lse=lse, causal=ctx.causal)
        if qkv_grads[0].dtype != q.dtype:
            qkv_grads = [grad.to(q.dtype) for grad in qkv_grads]
        dq, dk, dv = qkv_grads
        return dq.permute(2, 0, 1, 3), dk.permute(2, 0, 1, 3), dv.permute(2, 0, 1, 3), None, None


class _BlockAttention(AutogradOp):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        mask: BlockMask,
        dropout: AttentionDropout | None,
        softcap: float | None,
    ) -> Tensor:
        partial = PartialAttention(q, value_width=v.shape[-1], softcap=softcap)
        partial.attend_block(k, v, mask, dropout=dropout)
        if sinks is not None:
            partial.add_sinks(sinks)
        out = partial.out_SBHE.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, partial.lse_BHS, sinks)
        ctx.mask, ctx.dropout, ctx.softcap = mask, dropout, softcap
        return out

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        backward_inputs = AttentionBackwardInputs.of(q, out_SBHE=out, lse_BHS=lse, grad_SBHE=grads[0])
        qkv_grads = zero_qkv_grads(q, k, v)
        block_backward(backward_inputs, k, v, ctx.mask, grads=qkv_grads, dropout=ctx.dropout, softcap=ctx.softcap)
        sinks_grad = None if sinks is None else sink_grads(backward_inputs, sinks)
        return *(grad.to(q.dtype) for grad in qkv_grads), sinks_grad, None, None, None
