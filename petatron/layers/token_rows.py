"""Tokens as rows. Activations have shape [S, B, ...]; in memory either dimension may come first.

Norms, GEMMs and activations do not depend on which token a row is, so they use the rows in memory order and return a tensor in
the same order. Attention kernels prefer batch first; communication along the sequence needs, and produces, sequence first.
With one sequence, or one token, both are the same.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from petatron.kernels.strides import tokens_of_rows


class TokenRows(NamedTuple):
    """How [S, B, ...] is flattened to rows [R, ...]: `batch` sequences, one after the other if `batch_first`, else token by token."""

    batch: int
    batch_first: bool

    @classmethod
    def of(cls, x: Tensor) -> TokenRows:
        """Takes the order in which a tensor [S, B, ...] is in memory."""
        return cls(x.shape[1], is_batch_first(x))

    def flatten(self, x: Tensor) -> Tensor:
        return (x.transpose(0, 1) if self.batch_first else x).flatten(0, 1)

    def flatten_heads(self, x_SBHE: Tensor) -> Tensor:
        """Flattens the heads of each token too."""
        return (x_SBHE.transpose(0, 1) if self.batch_first else x_SBHE).reshape(-1, x_SBHE.shape[2] * x_SBHE.shape[3])

    def unflatten(self, rows: Tensor) -> Tensor:
        return tokens_of_rows(rows, batch=self.batch, batch_first=self.batch_first)


def is_batch_first(x: Tensor) -> bool:
    """Whether a tensor [S, B, ...] has its sequences one after the other in memory."""
    if x.dim() <= 2 or x.is_contiguous():
        return False
    dense, sizes, strides = 1, x.shape, x.stride()
    for dim in (*range(x.dim() - 1, 1, -1), 0, 1):  # a transposed view would know too, but takes longer to make
        if sizes[dim] != 1 and strides[dim] != dense:
            return False
        dense *= sizes[dim]
    return True


def rows_in_memory_order(x: Tensor) -> tuple[Tensor, bool]:
    """Flattens [S, B, ..., D] to [R, D] in its memory order, and returns whether that is batch first."""
    if x.is_contiguous():
        return (x if x.dim() <= 2 else x.view(-1, x.shape[-1])), False
    if x.dim() == 3:  # in one view where two would do: each is a call of a microsecond, and a layer has dozens
        length, batch, width = x.shape
        if x.stride() == (width, length * width, 1):
            return x.as_strided((length * batch, width), (width, 1)), True
    batch_first = is_batch_first(x)
    return to_rows(x, batch_first=batch_first), batch_first


def to_rows(x: Tensor, *, batch_first: bool) -> Tensor:
    """Flattens [S, B, ..., D] to [R, D] in the given order; a view where memory has that order."""
    dims = x.dim()
    if dims <= 2:
        return x.contiguous()
    if batch_first:
        if dims == 3:
            length, batch, width = x.shape
            if x.stride() == (width, length * width, 1):
                return x.as_strided((length * batch, width), (width, 1))
        x = x.transpose(0, 1)
    x = x.contiguous()
    return x.view(-1, x.shape[-1])


def from_rows(rows: Tensor, like: Tensor, *, batch_first: bool) -> Tensor:
    """Unflattens [R, O] to [S, B, ..., O], the other dimensions being those of `like`."""
    tokens, width = like.shape[:-1], rows.shape[-1]
    if len(tokens) <= 1:
        return rows
    if not batch_first:
        return rows.view(*tokens, width)
    if len(tokens) == 2 and rows.is_contiguous():
        length, batch = tokens
        return rows.as_strided((length, batch, width), (width, length * width, 1))
    first, second, *rest = tokens
    return rows.view(second, first, *rest, width).transpose(0, 1)


def to_row_order(x_SB: Tensor, *, batch_first: bool) -> Tensor:
    """Flattens one value per token, [S, B] to [R], in the order of the rows."""
    return (x_SB.t() if batch_first else x_SB).reshape(-1)


def from_row_order(x_R: Tensor, like_SB: Tensor, *, batch_first: bool) -> Tensor:
    length, batch = like_SB.shape
    return x_R.view(batch, length).t() if batch_first else x_R.view(length, batch)
