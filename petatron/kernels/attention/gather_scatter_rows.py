"""Gathers tokens into the rows of a layout (`document_layout.py`) and scatters them back, for several tensors at once: the reference.

S sequence, B batch, H heads, E head dim, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def gather_rows(tensors_SBHE: Sequence[Tensor], token_index_R: Tensor) -> list[Tensor]:
    """Returns [R, H, E] of each tensor: the token of every row, zeros in padding."""
    index, padding = token_index_R.long().clamp(min=0), (token_index_R < 0)[:, None, None]
    length = tensors_SBHE[0].shape[0]
    return [x[index % length, index // length].masked_fill_(padding, 0.0) for x in tensors_SBHE]


def scatter_rows(rows_RHE: Sequence[Tensor], token_index_R: Tensor, *, into_SBHE: Sequence[Tensor]) -> None:
    """Writes rows to their tokens in `into_SBHE`; padding is dropped."""
    valid = token_index_R >= 0
    index = token_index_R[valid].long()
    for rows, into in zip(rows_RHE, into_SBHE, strict=True):
        length = into.shape[0]
        into[index % length, index // length] = rows[valid]
