"""Tokens as rows. Activations are [S, B, ...] to look at; in memory either dimension may come first.

Norms, products and activations do not care which token a row is, so they take the rows as they lie and give back a tensor
that lies the same way. Batch first is what attention kernels like; sequence first is what communication along the sequence
needs, and makes. With one sequence, or one token, both are the same.
"""

from __future__ import annotations

from torch import Tensor


def is_batch_first(x: Tensor) -> bool:
    """Whether a tensor [S, B, ...] has its sequences one after the other in memory."""
    return x.dim() > 2 and not x.is_contiguous() and x.transpose(0, 1).is_contiguous()


def to_rows(x: Tensor, *, batch_first: bool) -> Tensor:
    """[S, B, ..., D] to [R, D] in the order that is asked for; a view where the tensor lies that way."""
    if x.dim() <= 2:
        return x.contiguous()
    return (x.transpose(0, 1) if batch_first else x).contiguous().flatten(0, -2)


def from_rows(rows: Tensor, like: Tensor, *, batch_first: bool) -> Tensor:
    """[R, O] to [S, B, ..., O], the other dimensions being those of `like`."""
    if like.dim() <= 2:
        return rows
    first, second, *rest = like.shape[:-1]
    if batch_first:
        return rows.unflatten(0, (second, first, *rest)).transpose(0, 1)
    return rows.unflatten(0, (first, second, *rest))


def to_row_order(x_SB: Tensor, *, batch_first: bool) -> Tensor:
    """One number per token, [S, B] to [R], in the order of the rows."""
    return (x_SB.t() if batch_first else x_SB).reshape(-1)


def from_row_order(x_R: Tensor, like_SB: Tensor, *, batch_first: bool) -> Tensor:
    length, batch = like_SB.shape
    return x_R.view(batch, length).t() if batch_first else x_R.view(length, batch)
