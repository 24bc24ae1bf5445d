"""Matrix products with a seam.

A layer built here has its logical, whole shape. `parallel/tensor_parallel.py` may give it a smaller weight and another `product`,
which does its communication around (or inside) the multiplication; nothing else in the layer changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from petatron.layers.ops.linear_op import local_linear
from petatron.layers.ops.recompute_output import Recomputable

LinearOp = Callable[[Tensor | Recomputable, Tensor], Tensor]
"""(x, weight) to x W^T: the slot for tensor parallelism, low precision and where weight gradients go."""


class Linear(nn.Module):
    """x W^T + b. `sections` are the widths of the outputs fused into one product, as they lie on this device."""

    def __init__(self, in_features: int, sections: Sequence[int], *, bias: bool) -> None:
        super().__init__()
        self.sections = tuple(sections)
        self.weight = nn.Parameter(torch.empty(sum(sections), in_features))
        self.bias = nn.Parameter(torch.empty(sum(sections))) if bias else None
        self.linear_op: LinearOp = local_linear

    def forward(self, x: Tensor | Recomputable) -> Tensor:
        y = self.linear_op(x, self.weight)
        return y if self.bias is None else y + self.bias
