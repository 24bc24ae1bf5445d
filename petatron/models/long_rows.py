"""Which sequences of a batch are longer than the original context of a model with LongRoPE, an array of the batch.

Whole sequences say it, so it is added before context parallelism splits them. B batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from petatron.models.batch import Batch

IS_LONG = "is_long"


def mark_long_rows(batch: Batch, original_context: int, lengths: Sequence[int] | None = None) -> Batch:
    """Adds the array, unless the batch has it: one value for all rows, of their common length, or one for each of `lengths`.

    >>> mark_long_rows(Batch(torch.zeros(2, 5)), 4)["is_long"], mark_long_rows(Batch(torch.zeros(2, 5)), 4, [3, 5])["is_long"]
    (tensor([True]), tensor([False,  True]))
    """
    if IS_LONG in batch:
        return batch
    counts = batch.tokens.shape[1:2] if lengths is None else lengths
    marks_B = torch.tensor([count > original_context for count in counts], device="cpu").to(batch.tokens.device)
    dims = {**batch.sequence_dims, IS_LONG: None}
    return replace(batch, arrays={**batch.arrays, IS_LONG: marks_B}, sequence_dims=dims)


def are_rows_long(batch: Batch, original_context: int) -> Tensor | bool:
    """Returns the array as [1, B or 1], or what the length of a whole batch says."""
    return batch[IS_LONG].unsqueeze(0) if IS_LONG in batch else batch.tokens.shape[1] > original_context
