"""The layer of experts that `petatron bench kernels` measures, one expert after the other in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.bench.ops.moe import BenchMoELayer


def experts_by_loop(layer: BenchMoELayer) -> list[Tensor]:
    """Returns the output and the gradients of x, the router's weights and the experts'."""
    leaves = [t.double().requires_grad_() for t in (layer.x_TD, layer.weights_TK, layer.gate_up, layer.down)]
    x, weights, gate_up, down = leaves
    y = torch.zeros_like(x)
    for expert in range(layer.shape.num_experts):
        token, place = torch.where(layer.experts_TK == expert)
        gate, up = (x[token] @ gate_up[expert].t()).chunk(2, dim=-1)
        y = y.index_add(0, token, (F.silu(gate) * up) @ down[expert].t() * weights[token, place, None])
    return [y, *torch.autograd.grad(y, leaves, layer.grad_TD.double())]
