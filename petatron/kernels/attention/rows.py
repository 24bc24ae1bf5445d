"""Moving tokens to the rows of a layout (`documents.py`) and back, for several tensors at once: the reference.

S sequence, B batch, H heads, E head width, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def gather_rows(tensors_SBHE: Sequence[Tensor], token_index_R: Tensor) -> list[Tensor]:
    """[R, H, E] of each: the token that a row asks for, zeros where it asks for none."""
    number, padding = token_index_R.long().clamp(min=0), (token_index_R < 0)[:, None, None]
    length = tensors_SBHE[0].shape[0]
    return [x[number % length, number // length].masked_fill_(padding, 0.0) for x in tensors_SBHE]


def scatter_rows(rows_RHE: Sequence[Tensor], token_index_R: Tensor, *, into_SBHE: Sequence[Tensor]) -> None:
    """Write rows to their tokens, as many tensors as there are to write into; padding goes nowhere."""
    real = token_index_R >= 0
    number = token_index_R[real].long()
    for rows, into in zip(rows_RHE, into_SBHE, strict=True):
        length = into.shape[0]
        into[number % length, number // length] = rows[real]
