"""Tokens as rows. Activations have shape [S, B, ...]; in memory either dimension may come first.

Norms, GEMMs and activations do not depend on which token a row is, so they use the rows in memory order and return a tensor in
the same order. Attention kernels prefer batch first; communication along the sequence needs, and produces, sequence first.
With one sequence, or one token, both are the same.
"""

from __future__ import annotations

from torch import Tensor


def is_batch_first(x: Tensor) -> bool:
    """Whether a tensor [S, B, ...] has its sequences one after the other in memory."""
    return x.dim() > 2 and not x.is_contiguous() and x.transpose(0, 1).is_contiguous()


def rows_in_memory_order(x: Tensor) -> tuple[Tensor, bool]:
    """Flattens [S, B, ..., D] to [R, D] in its memory order, and returns whether that is batch first."""
    if x.dim() <= 2:
        return x.contiguous(), False
    if not x.is_contiguous():
        swapped = x.transpose(0, 1)
        if swapped.is_contiguous():
            return swapped.view(-1, x.shape[-1]), True
        x = x.contiguous()
    return x.view(-1, x.shape[-1]), False


def to_rows(x: Tensor, *, batch_first: bool) -> Tensor:
    """Flattens [S, B, ..., D] to [R, D] in the given order; a view where memory has that order."""
    if x.dim() <= 2:
        return x.contiguous()
    x = (x.transpose(0, 1) if batch_first else x).contiguous()
    return x.view(-1, x.shape[-1])


def from_rows(rows: Tensor, like: Tensor, *, batch_first: bool) -> Tensor:
    """Unflattens [R, O] to [S, B, ..., O], the other dimensions being those of `like`."""
    if like.dim() <= 2:
        return rows
    if batch_first:
        first, second, *rest = like.shape[:-1]
        return rows.view(second, first, *rest, rows.shape[-1]).transpose(0, 1)
    return rows.view(*like.shape[:-1], rows.shape[-1])


def to_row_order(x_SB: Tensor, *, batch_first: bool) -> Tensor:
    """Flattens one value per token, [S, B] to [R], in the order of the rows."""
    return (x_SB.t() if batch_first else x_SB).reshape(-1)


def from_row_order(x_R: Tensor, like_SB: Tensor, *, batch_first: bool) -> Tensor:
    length, batch = like_SB.shape
    return x_R.view(batch, length).t() if batch_first else x_R.view(length, batch)
