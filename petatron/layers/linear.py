"""Matrix products with seams.

A layer built here has its logical, whole shape. `parallel/tensor.py` may give it a smaller weight and fill `enter` (before
the product) and `leave` (after it, before the bias); nothing else in the layer changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petatron.layers.seam import Seam, same


class Linear(nn.Module):
    """x W^T + b. `sections` are the widths of the outputs fused into one product, as they lie on this device."""

    def __init__(self, in_features: int, sections: Sequence[int], *, bias: bool) -> None:
        super().__init__()
        self.sections = tuple(sections)
        self.weight = nn.Parameter(torch.empty(sum(sections), in_features))
        self.bias = nn.Parameter(torch.empty(sum(sections))) if bias else None
        self.enter: Seam = same
        self.leave: Seam = same

    def forward(self, x: Tensor) -> Tensor:
        y = self.leave(F.linear(self.enter(x), self.weight))
        return y if self.bias is None else y + self.bias
