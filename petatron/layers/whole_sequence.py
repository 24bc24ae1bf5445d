"""Whole sequences on every tensor-parallel rank, for what all of them compute alike. S sequence, B batch, D hidden."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from petatron.layers.parallel_slots import CommSlot, TensorRank, TensorSlot, identity


class WholeSequence(nn.Module):
    """Gives every tensor-parallel rank the hidden states of whole sequences, with which all compute the same."""

    tensor_slots: Mapping[str, TensorSlot] = {"total": "sum of sequence shards", "rank": "tensor rank"}

    def __init__(self) -> None:
        super().__init__()
        self.total: CommSlot = identity
        self.rank: TensorRank = (0, 1)

    def forward(self, x_SBD: Tensor, length: int) -> Tensor:
        part = x_SBD.shape[0]
        if part == length:
            return x_SBD
        before = self.rank[0] * part
        return self.total(F.pad(x_SBD, (0, 0, 0, 0, before, length - before - part)))
