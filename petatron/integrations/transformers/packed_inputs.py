"""Packs the tokens of a padded batch: padding is left out before the model, and has no effect on anything.

B sequences, S columns, T tokens that are no padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from petatron.kernels.attention.document_layout import Documents
from petatron.models.batch import Batch

IGNORED = -100
"""The label of a column without a target."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedInputs:
    """Which columns of a batch are tokens, as its attention mask says: padding may be on the left, on the right, or anywhere.

    positions_BS: of a token among its sequence's, whatever padding is between. rows_BS: the packed row whose logits a column has: its
    own, or, after the last token, that token's, so that a prompt padded on the right is continued as it is; -1: none.
    """

    tokens_BS: Tensor
    is_token_BS: np.ndarray
    positions_BS: np.ndarray
    rows_BS: np.ndarray

    @classmethod
    def of(cls, tokens_BS: Tensor, mask: Tensor | None, *, seen_B: np.ndarray | None = None) -> PackedInputs:
        """`mask` is the attention mask of at least these columns, which are its last; `seen_B` tokens came before."""
        if mask is None:
            is_token = np.ones(tuple(tokens_BS.shape), dtype=np.bool_)
        else:
            first = mask.shape[1] - tokens_BS.shape[1]
            is_token = mask[:, first:].ne(0).cpu().numpy()
        before = np.zeros(tokens_BS.shape[0], dtype=np.int64) if seen_B is None else seen_B
        positions = before[:, None] + np.cumsum(is_token, axis=1) - 1
        numbers = np.where(is_token, np.cumsum(is_token).reshape(is_token.shape) - 1, -1)
        rows = np.maximum.accumulate(numbers, axis=1) if numbers.size else numbers
        return cls(tokens_BS, is_token, positions, rows)

    @property
    def num_tokens(self) -> int:
        return int(self.is_token_BS.sum())

    @property
    def is_dense(self) -> bool:
        return bool(self.is_token_BS.all())

    def batch(self, position_ids: Tensor | None) -> Batch:
        """Returns whole sequences: as they are if there is no padding, else as documents of one row."""
        if self.is_dense:
            positions = None if position_ids is None else position_ids.expand(self.tokens_BS.shape)
            return Batch(self.tokens_BS, positions=positions)
        device = self.tokens_BS.device
        lengths = self.is_token_BS.sum(axis=1)
        starts = np.repeat(np.cumsum(lengths) - lengths, lengths)[None].astype(np.int64)
        return Batch(
            self.packed(self.tokens_BS)[None],
            positions=self.packed_positions(position_ids),
            documents=Documents.build(starts).to(device),
        )

    def targets(self, labels_BS: Tensor) -> Tensor:
        """Returns the label that each column predicts: the next one. Padding neither predicts nor is predicted."""
        follows = np.zeros_like(self.is_token_BS)
        follows[:, :-1] = self.is_token_BS[:, :-1] & self.is_token_BS[:, 1:]
        return torch.roll(labels_BS, -1, dims=1).masked_fill(~torch.from_numpy(follows).to(labels_BS.device), IGNORED)

    def batches_of_sequences(self, position_ids: Tensor | None) -> list[Batch]:
        """Returns every sequence that has a token by itself, for layers that do not tell documents apart."""
        tokens, positions = self.packed(self.tokens_BS), self.packed_positions(position_ids)
        lengths = [int(count) for count in self.is_token_BS.sum(axis=1) if count]
        return [Batch(ids[None], positions=at) for ids, at in zip(tokens.split(lengths), positions.split(lengths))]

    def packed(self, values_BS: Tensor) -> Tensor:
        return values_BS[torch.from_numpy(self.is_token_BS).to(values_BS.device)]

    def packed_positions(self, position_ids: Tensor | None) -> Tensor:
        if position_ids is not None:
            return self.packed(position_ids.expand(self.tokens_BS.shape))
        return torch.from_numpy(self.positions_BS[self.is_token_BS]).to(self.tokens_BS.device)
