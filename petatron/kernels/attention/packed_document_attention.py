"""Attention of packed documents as dense causal batches of long documents and one varlen call for short ones (`document_layout.py`).

    q, k, v  ->  rows  ->  a dense call per group of long documents, a varlen call for the short ones  ->  tokens

The rows of q, k and v are saved for backward. Those of the output are not: the GEMM after attention saves it as tokens anyway, and
gathering it again is cheap. In backward the padding of the output's gradient is zero, and with it every gradient that padding
could contribute:

    dV = P^T dO     dP = dO V^T     dS = P * (dP - rowsum(dO * O))       zero rows of dO add nothing to any of them

S sequence, B batch, H query heads, K kv heads, E head dim, R rows, N documents of a group, L their padded length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from torch import Tensor

from petatron.base.autograd_op import AutogradOp, first_derivative
from petatron.kernels.attention.document_layout import DocumentGroup, PaddedRows
from petatron.kernels.attention.visibility import VisibilitySupport
from petatron.kernels.strides import empty_heads

VISIBILITY = VisibilitySupport.of("causal", documents=True)
"""A token of full attention would see the padding after its document."""

SavedTensors = tuple[Tensor, ...]
"""What a kernel's forward saves for its backward, besides its inputs and its output."""


class PackingKernels(Protocol):
    """The interface of `gather_scatter_rows.py` and its faster implementations."""

    def gather_rows(self, tensors_SBHE: Sequence[Tensor], token_index_R: Tensor) -> list[Tensor]: ...

    def scatter_rows(
        self, rows_RHE: Sequence[Tensor], token_index_R: Tensor, *, into_SBHE: Sequence[Tensor]
    ) -> None: ...


class VarlenAttention(Protocol):
    """`flash.py`: causal attention of concatenated documents, [R, H, E]."""

    def varlen_forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor, max_seqlen: int
    ) -> tuple[Tensor, SavedTensors]: ...

    def varlen_backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        out: Tensor,
        saved: SavedTensors,
        cu_seqlens: Tensor,
        max_seqlen: int,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class PaddedKernels:
    """The kernels of padded attention. dense: `cudnn.py` or `flash.py`, attention of a dense batch, [N, H, L, E]."""

    packing: PackingKernels
    dense: ModuleType
    varlen: VarlenAttention


def padded_attention(
    q_SBHE: Tensor, k_SBKE: Tensor, v_SBKE: Tensor, rows: PaddedRows, kernels: PaddedKernels
) -> Tensor:
    """Causal attention inside documents. The output has the memory order of q."""
    return _PaddedAttention.apply(q_SBHE, k_SBKE, v_SBKE, rows, kernels)  # pyright: ignore[reportReturnType]


class _PaddedAttention(AutogradOp):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rows: PaddedRows, kernels: PaddedKernels) -> Tensor:
        row_qkv = kernels.packing.gather_rows((q, k, v), rows.token_index)
        ctx.orders = [(x.shape, x.stride(1) > x.stride(0)) for x in (q, k, v)]
        out = empty_heads(q, *q.shape, batch_first=ctx.orders[0][1])
        saved: list[Tensor] = []
        for group in rows.groups:
            group_out, lse = kernels.dense.forward(*(_heads_first(x, group) for x in row_qkv), causal=True)
            kernels.packing.scatter_rows((_flat(group_out),), _group_rows(rows.token_index, group), into_SBHE=(out,))
            saved.append(lse)
        if rows.short_max_seqlen:
            first = rows.first_short_row
            short, short_saved = kernels.varlen.varlen_forward(
                *(x[first:] for x in row_qkv), cu_seqlens=rows.short_cu_seqlens, max_seqlen=rows.short_max_seqlen
            )
            kernels.packing.scatter_rows((short,), rows.token_index[first:], into_SBHE=(out,))
            saved += short_saved
        ctx.save_for_backward(*row_qkv, out, rows.token_index, rows.short_cu_seqlens, *saved)
        ctx.groups, ctx.short_max_seqlen, ctx.kernels = rows.groups, rows.short_max_seqlen, kernels
        return out

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # unpacked once: in a recomputed region unpacking runs the region
        *row_tensors, out, token_index, short_cu_seqlens = saved[:6]
        kernel_saved = saved[6:]
        rows, kernels = PaddedRows(token_index, ctx.groups, short_cu_seqlens, ctx.short_max_seqlen), ctx.kernels
        row_tensors += kernels.packing.gather_rows((grads[0], out), token_index)
        input_grads = [empty_heads(out, *shape, batch_first=batch_first) for shape, batch_first in ctx.orders]
        for group, lse in zip(rows.groups, kernel_saved):
            q, k, v, grad, row_out = (_heads_first(x, group) for x in row_tensors)
            row_grads = kernels.dense.backward(grad, q, k, v, out=row_out, lse=lse, causal=True)
            kernels.packing.scatter_rows(
                [_flat(x) for x in row_grads], _group_rows(token_index, group), into_SBHE=input_grads
            )
        if rows.short_max_seqlen:
            first = rows.first_short_row
            q, k, v, grad, row_out = (x[first:] for x in row_tensors)
            short_saved, max_seqlen = kernel_saved[len(rows.groups) :], rows.short_max_seqlen
            row_grads = kernels.varlen.varlen_backward(
                grad, q, k, v, out=row_out, saved=short_saved, cu_seqlens=short_cu_seqlens, max_seqlen=max_seqlen
            )
            kernels.packing.scatter_rows(row_grads, token_index[first:], into_SBHE=input_grads)
        return *input_grads, None, None


def _group_rows(x_R: Tensor, group: DocumentGroup) -> Tensor:
    return x_R[group.first_row : group.first_row + group.count * group.length]


def _heads_first(rows_RHE: Tensor, group: DocumentGroup) -> Tensor:
    """[N, H, L, E] of one group."""
    return _group_rows(rows_RHE, group).unflatten(0, (group.count, group.length)).transpose(1, 2)


def _flat(x_NHLE: Tensor) -> Tensor:
    """[N L, H, E]: a view if memory has the order of `_heads_first`."""
    return x_NHLE.transpose(1, 2).flatten(0, 1)
