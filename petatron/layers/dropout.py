"""Dropout with an optional generator, shared by ranks that hold the same activation."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petatron.layers.parallel_slots import TensorSlot


class Dropout(nn.Module):
    """Zeroes elements with `probability` and scales the others by 1 / (1 - probability). `generator` None: the rank's own RNG stream."""

    tensor_slots: Mapping[str, TensorSlot] = {"generator": "shared generator"}

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability
        self.generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.probability == 0.0:
            return x
        if self.generator is None:
            return F.dropout(x, self.probability)
        keep = 1.0 - self.probability
        return x * torch.empty_like(x).bernoulli_(keep, generator=self.generator).div_(keep)
