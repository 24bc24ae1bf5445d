"""Attention of packed documents as dense causal batches of long documents and one call for short ones (`documents.py`).

    q, k, v  ->  rows  ->  a dense call per group of long documents, a ragged call for the short ones  ->  tokens

The rows of q, k and v are kept for the backward pass. Those of the output are not: the product behind attention keeps it as
tokens anyway, and moving it again is cheap. In the backward pass the padding of the output's gradient is zero, and with it
every gradient that padding could give:

    dV = P^T dO     dP = dO V^T     dS = P * (dP - rowsum(dO * O))       rows of dO that are zero add nothing to any of them

S sequence, B batch, H query heads, K key/value heads, E head width, R rows, N documents of a group, L their padded length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from petatron.kernels.attention.documents import Group, Rows

Kept = tuple[Tensor, ...]
"""What a kernel's forward pass leaves for its backward pass, besides its inputs and its output."""


class RowMoves(Protocol):
    """`rows.py` or a faster twin."""

    def gather_rows(self, tensors_SBHE: Sequence[Tensor], source_R: Tensor) -> list[Tensor]: ...

    def scatter_rows(self, rows_RHE: Sequence[Tensor], source_R: Tensor, *, into_SBHE: Sequence[Tensor]) -> None: ...


class DenseAttention(Protocol):
    """`cudnn.py` or `flash.py`: attention of a dense batch, [N, H, L, E]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class RaggedAttention(Protocol):
    """`flash.py`: causal attention of documents one behind the other, [R, H, E]."""

    def ragged_forward(self, q: Tensor, k: Tensor, v: Tensor, *, ends: Tensor, longest: int) -> tuple[Tensor, Kept]: ...

    def ragged_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, kept: Kept, ends: Tensor, longest: int
    ) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class PaddedKernels:
    """What the work is done with."""

    moves: RowMoves
    dense: DenseAttention
    ragged: RaggedAttention


def padded_attention(q_SBHE: Tensor, k_SBKE: Tensor, v_SBKE: Tensor, rows: Rows, kernels: PaddedKernels) -> Tensor:
    """Causal attention inside documents. The output has the memory order of q."""
    return _PaddedAttention.apply(q_SBHE, k_SBKE, v_SBKE, rows, kernels)  # pyright: ignore[reportReturnType]


class _PaddedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rows: Rows, kernels: PaddedKernels) -> Tensor:
        moved = kernels.moves.gather_rows((q, k, v), rows.source)
        ctx.orders = [_Order.of(x) for x in (q, k, v)]
        out = ctx.orders[0].empty(q)
        kept: list[Tensor] = []
        for group in rows.groups:
            found, lse = kernels.dense.forward(*(_heads_first(x, group) for x in moved), causal=True)
            kernels.moves.scatter_rows((_flat(found),), _part(rows.source, group), into_SBHE=(out,))
            kept.append(lse)
        if rows.longest_short:
            first = rows.first_short_row
            short, more = kernels.ragged.ragged_forward(
                *(x[first:] for x in moved), ends=rows.short_ends, longest=rows.longest_short
            )
            kernels.moves.scatter_rows((short,), rows.source[first:], into_SBHE=(out,))
            kept += more
        ctx.save_for_backward(*moved, out, rows.source, rows.short_ends, *kept)
        ctx.groups, ctx.longest_short, ctx.kernels = rows.groups, rows.longest_short, kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # asked for once: in a recomputed region asking makes the region run
        *moved, out, source, short_ends = saved[:6]
        kept = saved[6:]
        rows, kernels = Rows(source, ctx.groups, short_ends, ctx.longest_short), ctx.kernels
        moved += kernels.moves.gather_rows((grads[0], out), source)
        into = [order.empty(out) for order in ctx.orders]
        for group, lse in zip(rows.groups, kept):
            q, k, v, grad, answer = (_heads_first(x, group) for x in moved)
            found = kernels.dense.backward(grad, q, k, v, out=answer, lse=lse, causal=True)
            kernels.moves.scatter_rows([_flat(x) for x in found], _part(source, group), into_SBHE=into)
        if rows.longest_short:
            first = rows.first_short_row
            q, k, v, grad, answer = (x[first:] for x in moved)
            more, longest = kept[len(rows.groups) :], rows.longest_short
            found = kernels.ragged.ragged_backward(
                grad, q, k, v, out=answer, kept=more, ends=short_ends, longest=longest
            )
            kernels.moves.scatter_rows(found, source[first:], into_SBHE=into)
        return *into, None, None


@dataclass(frozen=True, slots=True)
class _Order:
    """Shape and memory order of a tensor that is not kept."""

    shape: torch.Size
    batch_first: bool

    @classmethod
    def of(cls, x_SBHE: Tensor) -> _Order:
        return cls(x_SBHE.shape, x_SBHE.stride(1) > x_SBHE.stride(0))

    def empty(self, like: Tensor) -> Tensor:
        length, batch, *heads = self.shape
        if self.batch_first:
            return like.new_empty((batch, length, *heads)).transpose(0, 1)
        return like.new_empty(self.shape)


def _part(x_R: Tensor, group: Group) -> Tensor:
    return x_R[group.first_row : group.first_row + group.count * group.length]


def _heads_first(rows_RHE: Tensor, group: Group) -> Tensor:
    """[N, H, L, E] of one group."""
    return _part(rows_RHE, group).unflatten(0, (group.count, group.length)).transpose(1, 2)


def _flat(x_NHLE: Tensor) -> Tensor:
    """[N L, H, E]: without a copy, if memory is in the order of what `_heads_first` gave."""
    return x_NHLE.transpose(1, 2).flatten(0, 1)
