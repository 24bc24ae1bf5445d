"""The most likely id of each row of logits: the reference. R rows, V vocabulary."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class LogitsArgmaxKernels(Protocol):
    """The interface of this module and its faster implementation."""

    def most_likely(self, logits_RV: Tensor) -> Tensor: ...


def most_likely(logits_RV: Tensor) -> Tensor:
    """Returns the id with the largest logit, the smaller of two.

    >>> import torch
    >>> most_likely(torch.tensor([[1.0, 3.0, 3.0, 2.0]])).tolist()
    [1]
    """
    return logits_RV.max(dim=1).indices
