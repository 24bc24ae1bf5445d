"""Draws an id from each row of logits by a uniform number: the reference. R rows, V vocabulary.

The id is the first at which the cumulative probability exceeds the number, so a draw is a function of the row and its number alone.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class RandomIdKernels(Protocol):
    """The interface of this module and its faster implementation."""

    def draw_ids(self, logits_RV: Tensor, temperatures_R: Tensor, uniform_R: Tensor) -> Tensor: ...


def draw_ids(logits_RV: Tensor, temperatures_R: Tensor, uniform_R: Tensor) -> Tensor:
    """Returns an id of each row, by its temperature and its number in [0, 1), which is in float64.

    >>> logits = torch.tensor([[0.0, 1.0, 0.0]] * 4)
    >>> draw_ids(logits, torch.ones(4), torch.tensor([0.0, 0.3, 0.7, 0.99], dtype=torch.float64)).tolist()
    [0, 1, 1, 2]
    """
    scaled = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32)) / temperatures_R.unsqueeze(1)
    cumulative = scaled.double().softmax(dim=-1).cumsum(dim=-1)
    threshold = uniform_R.unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(1).clamp_(max=logits_RV.shape[1] - 1)
