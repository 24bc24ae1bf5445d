"""Linear layers with a replaceable GEMM.

A layer is built with its logical, whole shape. `parallel/tensor_parallel.py` may replace the weight by a shard and `linear_op`
by one that communicates before, after or during the GEMM; nothing else in the layer changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from petatron.layers.adapters.adapter import Adapter
from petatron.layers.ops.linear_op import local_linear
from petatron.layers.ops.recompute_output import RecomputableOutput
from petatron.layers.parallel_slots import TensorSlot

LinearOp = Callable[[Tensor | RecomputableOutput, Tensor, Tensor | None], Tensor]
"""(x, weight, bias or None) to x W^T + b: the slot for tensor parallelism, FP8 and the weight-gradient target."""


class Linear(nn.Module):
    """x W^T + b. `sections` are the widths of the outputs fused into one GEMM, of this rank's shard.

    `adapter` is a slot: trainable parameters of this module beside the weight (`layers/adapters/`).
    """

    tensor_slots: Mapping[str, TensorSlot] = {"linear_op": "linear", "sections": "sections"}

    def __init__(self, in_features: int, sections: Sequence[int], *, bias: bool) -> None:
        super().__init__()
        self.sections = tuple(sections)
        self.weight = nn.Parameter(torch.empty(sum(sections), in_features))
        self.bias = nn.Parameter(torch.empty(sum(sections))) if bias else None
        self.linear_op: LinearOp = local_linear
        self.adapter: Adapter | None = None

    def forward(self, x: Tensor | RecomputableOutput) -> Tensor:
        params = self._parameters  # nn.Module would look for each of them in Python
        weight, bias = params["weight"], params.get("bias")
        assert weight is not None
        if self.adapter is not None:
            return self.adapter.adapt_op(self, self.linear_op)(x, weight, bias)
        return self.linear_op(x, weight, bias)

    def merged_weight(self) -> Tensor:
        """Returns the weight with its adapter, if it has one, merged into it: for who multiplies by it, without gradients."""
        return self.weight if self.adapter is None else self.adapter.merged_weight(self)

    def weights(self) -> tuple[nn.Parameter | None, ...]:
        """Returns the parameters whose gradients a weight-gradient target gets."""
        return self.weight, self.bias, *(() if self.adapter is None else self.adapter.params(self))
