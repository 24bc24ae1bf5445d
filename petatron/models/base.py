"""What every model shares: the batch it eats."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch on one rank: the noun passed from the loader to the model.

    tokens, labels and loss_mask are [batch, sequence]; labels are the tokens shifted by one, and loss_mask is 1.0 where
    a position counts. positions is None when they are 0, 1, 2, ... in every row.

    >>> text = torch.tensor([[5, 6, 7, 8]])
    >>> Batch(text[:, :-1], text[:, 1:], torch.ones(1, 3)).labels
    tensor([[6, 7, 8]])
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    positions: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; the copy from pinned memory does not wait."""

        def moved(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=True)

        positions = None if self.positions is None else moved(self.positions)
        return Batch(moved(self.tokens), moved(self.labels), moved(self.loss_mask), positions)
