"""`Batch`, which every model shares."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from petatron.kernels.attention.documents import Documents


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch on one rank, passed from the loader to the model.

    tokens, labels and loss_mask are [batch, sequence]; labels are the tokens shifted by one, and loss_mask is 1.0 where
    a position counts. positions is None when they are 0, 1, 2, ... in every row; else [sequence] or [batch, sequence].
    documents is None when a row is one document; else it has their boundaries in the whole sequence, also where context
    parallelism shards the others.

    >>> text = torch.tensor([[5, 6, 7, 8]])
    >>> Batch(text[:, :-1], text[:, 1:], torch.ones(1, 3)).labels
    tensor([[6, 7, 8]])
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    positions: Tensor | None = None
    documents: Documents | None = None

    def to(self, device: torch.device) -> Batch:
        """Copies the batch to a device; asynchronous from pinned memory."""

        values = (getattr(self, part.name) for part in fields(self))
        return Batch(*(None if x is None else x.to(device, non_blocking=True) for x in values))
