"""Attention on one device: the fastest kernel that can compute a visibility of these tensors, else blocks and tiles.

What a token sees is one value (`visibility.py`). Every kernel declares what of it it can compute, and `KERNELS` lists them, the
fastest first:

    neither window nor documents       cuDNN on Hopper, else PyTorch's choice; FlashAttention where values are narrower than keys
    documents                          cuDNN on Hopper for long ones (`document_layout.py`), else FlashAttention on NVIDIA GPUs
    windows, with or without them      FlashAttention on NVIDIA GPUs
    biases by distance, prefixes,      Triton's kernel of key intervals (`key_interval_attention.py`), in half precision without dropout
    key spans
    everything else                    the sequence is cut into rectangles (`visible_key_intervals.py`), so that masked-out parts cost
                                       neither time nor memory: first tokens, sinks, modified scores (`score_modifiers.py`, soft cap and
                                       bias in tiles only), any precision and device

All but the last are for half precision. None of them synchronizes with the device: what the host needs to know of the documents
was computed with the batch.

S sequence, B batch, H query heads, K kv heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from petatron.kernels.attention import (
    blockwise_attention,
    cudnn,
    dense_attention,
    flash,
    gather_scatter_rows,
    key_interval_attention,
    packed_document_attention,
)
from petatron.kernels.attention.blockwise_attention import block_attention
from petatron.kernels.attention.document_layout import cut_into_chunks
from petatron.kernels.attention.key_interval_attention import KeyIntervalKernels
from petatron.kernels.attention.packed_document_attention import PackingKernels, PaddedKernels, padded_attention
from petatron.kernels.attention.score_modifiers import ScoreRules
from petatron.kernels.attention.visibility import CAUSAL, Visibility, VisibilitySupport
from petatron.kernels.attention.visible_key_intervals import BlockMask, VisibleKeys

__all__ = ["KERNELS", "attention", "block_attention"]

_PLANNED_LENGTHS = 256
"""Where lengths vary, cuDNN computes the multiples of this: few enough for each to have its plan."""


class AttentionCall(NamedTuple):
    """The arguments of one call of attention. See `attention`."""

    q_SBHE: Tensor
    k_SBKE: Tensor
    v_SBKE: Tensor
    visibility: Visibility
    dropout: float = 0.0
    packing_kernels: PackingKernels = gather_scatter_rows
    lengths_vary: bool = False
    rules: ScoreRules | None = None
    interval_kernels: KeyIntervalKernels = key_interval_attention


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """A way to compute attention: what it sees, for which tensors and lengths it is used, and the function.

    takes: whether it serves a call whose visibility it supports; None: any.
    """

    name: str
    visibility: VisibilitySupport
    takes: Callable[[AttentionCall], bool] | None
    run: Callable[[AttentionCall], Tensor]


def attention(
    q_SBHE: Tensor,
    k_SBKE: Tensor,
    v_SBKE: Tensor,
    visibility: Visibility = CAUSAL,
    *,
    dropout: float = 0.0,
    packing_kernels: PackingKernels = gather_scatter_rows,
    lengths_vary: bool = False,
    rules: ScoreRules | None = None,
    interval_kernels: KeyIntervalKernels = key_interval_attention,
) -> Tensor:
    """Softmax attention of each token to what it sees; in cross attention keys and values are those of another sequence.

    `packing_kernels` gathers tokens into padded rows and scatters them back: `gather_scatter_rows` or a faster implementation.
    `interval_kernels`: `key_interval_attention` or a faster implementation, which is used where no other fused kernel is.
    `lengths_vary`: hardly a length comes again. cuDNN builds a plan for each, so few of them are computed by it.
    """
    if not q_SBHE.numel() or not k_SBKE.numel():
        return _no_attention(q_SBHE, k_SBKE, v_SBKE)
    if visibility.window is not None or visibility.chunk is not None or visibility.first_k:
        visibility = _without_chunks(visibility.within(q_SBHE.shape[0]), q_SBHE)
    options = dropout, packing_kernels, lengths_vary, rules, interval_kernels
    call = AttentionCall(q_SBHE, k_SBKE, v_SBKE, visibility, *options)
    return chosen_kernel(call).run(call)


def chosen_kernel(call: AttentionCall) -> AttentionKernel:
    """Returns the first kernel that computes what the call sees and takes its tensors."""
    visibility, has_rules = call.visibility, call.rules is not None
    for kernel in KERNELS_OF_NEW_LENGTHS if call.lengths_vary else KERNELS:
        takes = kernel.takes
        if kernel.visibility.includes(visibility, score_rules=has_rules) and (takes is None or takes(call)):
            return kernel
    raise AssertionError("the last kernel computes everything")


def _without_chunks(visibility: Visibility, q_SBHE: Tensor) -> Visibility:
    """Cuts documents into chunks, which are then documents."""
    if visibility.chunk is None:
        return visibility
    length, batch = q_SBHE.shape[:2]
    cut = cut_into_chunks(visibility.documents, visibility.chunk, batch=batch, length=length, device=q_SBHE.device)
    return Visibility(visibility.kind, visibility.window, None, visibility.first_k, visibility.bias, cut)


def _no_attention(q_SBHE: Tensor, k_SBKE: Tensor, v_SBKE: Tensor) -> Tensor:
    """Returns the output where there are no queries or no keys, zeros with zero gradients: PyTorch's kernels for the CPU divide by both."""
    nothing = 0.0 * (q_SBHE.sum(dim=-1, keepdim=True) + k_SBKE.sum() + v_SBKE.sum())
    return nothing.expand(*q_SBHE.shape[:-1], v_SBKE.shape[-1])


def _has_no_plan(call: AttentionCall) -> bool:
    """Whether FlashAttention serves lengths for which cuDNN would build a plan each time."""
    if not flash.supports_varlen(call.q_SBHE, call.v_SBKE):
        return False
    documents = call.visibility.documents
    common = call.q_SBHE.shape[0] if documents is None else documents.equal_length
    return common is None or common % _PLANNED_LENGTHS != 0


def _has_equal_documents(call: AttentionCall) -> bool:
    documents = call.visibility.documents
    return documents is not None and documents.equal_length is not None and _cudnn_takes(call)


def _has_long_documents(call: AttentionCall) -> bool:
    documents = call.visibility.documents
    equal_widths = call.q_SBHE.shape[-1] == call.v_SBKE.shape[-1]
    return documents is not None and documents.padded_rows is not None and equal_widths and _cudnn_takes(call)


def _cudnn_takes(call: AttentionCall) -> bool:
    return call.dropout == 0.0 and cudnn.unsupported_tensors_reason(call.q_SBHE, call.v_SBKE) is None


def _varlen_takes(call: AttentionCall) -> bool:
    return flash.supports_varlen(call.q_SBHE, call.v_SBKE)


def _run_varlen(call: AttentionCall) -> Tensor:
    return flash.varlen_attention(call.q_SBHE, call.k_SBKE, call.v_SBKE, call.visibility, dropout=call.dropout)


def _run_dense(call: AttentionCall) -> Tensor:
    causal = call.visibility.kind == "causal"
    return dense_attention.dense_attention(call.q_SBHE, call.k_SBKE, call.v_SBKE, dropout=call.dropout, causal=causal)


def _run_equal_documents(call: AttentionCall) -> Tensor:
    documents, causal = call.visibility.documents, call.visibility.is_causal
    assert documents is not None and documents.equal_length is not None
    return dense_attention.equal_length_attention(
        call.q_SBHE, call.k_SBKE, call.v_SBKE, documents.equal_length, causal=causal
    )


def _run_long_documents(call: AttentionCall) -> Tensor:
    documents = call.visibility.documents
    assert documents is not None and documents.padded_rows is not None
    kernels = PaddedKernels(call.packing_kernels, cudnn, flash)
    return padded_attention(call.q_SBHE, call.k_SBKE, call.v_SBKE, documents.padded_rows, kernels)


def _intervals_take(call: AttentionCall) -> bool:
    """Whether there is a fast kernel of key intervals for the tensors, and nothing but biases modifies scores."""
    rules = call.rules
    if call.dropout > 0.0 or (rules is not None and (rules.softcap is not None or rules.sinks_H is not None)):
        return False
    return call.interval_kernels.unsupported_tensors_reason(call.q_SBHE, call.v_SBKE) is None


def _run_intervals(call: AttentionCall) -> Tensor:
    bias = None if call.rules is None else call.rules.bias_HD
    return key_interval_attention.key_interval_attention(
        call.q_SBHE, call.k_SBKE, call.v_SBKE, call.visibility, bias, call.interval_kernels
    )


def _run_blocks(call: AttentionCall) -> Tensor:
    length, bias = call.q_SBHE.shape[0], None if call.rules is None else call.rules.bias_HD
    visible = VisibleKeys.of(call.visibility, length, call.q_SBHE.device)
    mask = BlockMask((range(length),), (range(call.k_SBKE.shape[0]),), visible, keep_positions=bias is not None)
    return block_attention(call.q_SBHE, call.k_SBKE, call.v_SBKE, mask, dropout=call.dropout, rules=call.rules)


_DOCUMENTS = VisibilitySupport.of("causal", "full", documents=True)

KERNELS: tuple[AttentionKernel, ...] = (
    AttentionKernel("dense", dense_attention.VISIBILITY, None, _run_dense),
    AttentionKernel("dense, of equal documents", _DOCUMENTS, _has_equal_documents, _run_equal_documents),
    AttentionKernel(
        "dense, of padded documents", packed_document_attention.VISIBILITY, _has_long_documents, _run_long_documents
    ),
    AttentionKernel("FlashAttention of unequal lengths", flash.VARLEN_VISIBILITY, _varlen_takes, _run_varlen),
    AttentionKernel("of key intervals", key_interval_attention.VISIBILITY, _intervals_take, _run_intervals),
    AttentionKernel("blocks and tiles", blockwise_attention.VISIBILITY, None, _run_blocks),
)
"""The kernels, the fastest first; the first that computes a visibility and takes the tensors is used."""
KERNELS_OF_NEW_LENGTHS = (
    AttentionKernel("FlashAttention of new lengths", _DOCUMENTS, _has_no_plan, _run_varlen),
    *KERNELS,
)
"""The same where hardly a length comes again."""
