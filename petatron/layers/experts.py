"""The experts of a layer: as many MLPs as there are, each product done for all of them at once.

R rows in the order of their experts, D width, O output width, E experts, as many as lie on this device.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from petatron.config.schema import GATED_ACTIVATIONS, ModelConfig, MoEConfig
from petatron.kernels.moe import Counts, GroupedProduct, grouped_linear, looped_linear
from petatron.layers.mlp import GATED, PLAIN


class GroupedLinear(nn.Module):
    """x W^T + b with a W and b per expert; `product` is the slot for other kernels.

    `bias_share` is what the bias is multiplied by: 0 on all but one of the ranks whose outputs are summands of one result.
    """

    def __init__(
        self, experts: int, in_features: int, out_features: int, *, bias: bool, product: GroupedProduct
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(experts, out_features)) if bias else None
        self.bias_share = 1.0
        self.product = product

    def forward(self, x_RD: Tensor, counts: Counts) -> Tensor:
        y_RO = self.product(x_RD, self.weight, counts)
        if self.bias is None:
            return y_RO
        bias = self.bias if self.bias_share == 1.0 else self.bias * self.bias_share
        if isinstance(counts, int):
            return (y_RO.unflatten(0, (-1, counts)) + bias[:, None]).flatten(0, 1)
        return y_RO + bias.repeat_interleave(counts, dim=0, output_size=y_RO.shape[0])


class Experts(nn.Module):
    """down(act(up(x))) of every row's expert."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, width: int) -> None:
        super().__init__()
        self.act = PLAIN[config.activation]
        self.up, self.down = _pair(config, moe, width, fused=1)

    def forward(self, x_RD: Tensor, counts: Counts) -> Tensor:
        return self.down(self.act(self.up(x_RD, counts)), counts)


class GatedExperts(nn.Module):
    """down(act(gate(x)) * up(x)) of every row's expert; gate and up are one product."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, width: int) -> None:
        super().__init__()
        self.act = GATED[config.activation]
        self.gate_up, self.down = _pair(config, moe, width, fused=2)

    def forward(self, x_RD: Tensor, counts: Counts) -> Tensor:
        gate, up = self.gate_up(x_RD, counts).chunk(2, dim=-1)
        return self.down(self.act(gate) * up, counts)


def _pair(config: ModelConfig, moe: MoEConfig, width: int, *, fused: int) -> tuple[GroupedLinear, GroupedLinear]:
    experts, inner = moe.num_experts, moe.moe_ffn_hidden_size
    assert experts is not None and inner is not None, "the config is not derived"
    product = grouped_linear if moe.moe_grouped_gemm else looped_linear
    bias = config.add_bias_linear
    up = GroupedLinear(experts, width, fused * inner, bias=bias, product=product)
    return up, GroupedLinear(experts, inner, width, bias=bias, product=product)


def build_experts(config: ModelConfig, moe: MoEConfig, width: int) -> Experts | GatedExperts:
    """The routed experts of a layer, over inputs of a width."""
    kind = GatedExperts if config.activation in GATED_ACTIVATIONS else Experts
    return kind(config, moe, width)
