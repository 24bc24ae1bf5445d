"""Arrays that models add to a batch of whole sequences, before context parallelism splits them. B batch, S sequence.

Multi-token prediction needs tokens, labels and loss mask, shifted by each depth; LongRoPE which sequences exceed the original context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from petatron.models.batch import Batch

LOSS_WEIGHTS = "loss_weights"
"""The array of factors on token losses that a batch may have."""


def tokens_name(depth: int) -> str:
    return f"mtp_{depth}_tokens"


def labels_name(depth: int) -> str:
    return f"mtp_{depth}_labels"


def mask_name(depth: int) -> str:
    return f"mtp_{depth}_loss_mask"


def weights_name(depth: int) -> str:
    return f"mtp_{depth}_{LOSS_WEIGHTS}"


def add_shifted_arrays(batch: Batch, *, depths: int) -> Batch:
    """Adds what every depth predicts from and predicts, of whole sequences.

    Depth k has at position i the token i + k, the label of position i + k, and its mask; 0 beyond the end of the sequence, and a
    mask of 0 where that token is of another document; and the weight of its loss, where the batch has weights. Without labels only
    tokens are added.

    >>> batch = Batch(torch.tensor([[5, 6, 7]]), torch.tensor([[6, 7, 8]]), torch.ones(1, 3))
    >>> shifted = add_shifted_arrays(batch, depths=1)
    >>> [shifted[name].tolist() for name in (tokens_name(1), labels_name(1), mask_name(1))]
    [[[6, 7, 8]], [[7, 8, 0]], [[1.0, 1.0, 0.0]]]
    """
    arrays = dict(batch.arrays)
    for depth in range(1, depths + 1):
        if "labels" not in batch:
            arrays[tokens_name(depth)] = _shifted(batch.tokens, depth)
            continue
        arrays[tokens_name(depth)] = _shifted(batch.labels, depth - 1)
        arrays[labels_name(depth)] = _shifted(batch.labels, depth)
        if "loss_mask" in batch:
            arrays[mask_name(depth)] = _shifted(batch.loss_mask, depth) * _same_document(batch, depth)
        if LOSS_WEIGHTS in batch:
            arrays[weights_name(depth)] = _shifted(batch[LOSS_WEIGHTS], depth)
    return replace(batch, arrays=arrays)


def _shifted(x_BS: Tensor, by: int) -> Tensor:
    """Returns the values `by` positions later, and 0 at the end."""
    by = min(by, x_BS.shape[1])
    return torch.cat((x_BS[:, by:], x_BS.new_zeros(x_BS.shape[0], by)), dim=1) if by else x_BS


def _same_document(batch: Batch, by: int) -> Tensor | float:
    if batch.documents is None:
        return 1.0
    starts_BS = batch.documents.starts_BS
    return (starts_BS == _shifted(starts_BS, by)).to(batch.loss_mask.dtype)


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
