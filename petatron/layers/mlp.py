"""The feed-forward half of a block, plain or gated."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from petatron.config.schema import GATED_ACTIVATIONS, ModelConfig
from petatron.layers.linear import Linear
from petatron.layers.passing import Pass

PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * (1.702 * x).sigmoid(),
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
    "silu": F.silu,
}
GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": PLAIN["gelu_tanh"],
    "reglu": F.relu,
}


class MLP(nn.Module):
    """down(act(up(x)))."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.act = PLAIN[config.activation]
        self.up = Linear(config.hidden_size, (width,), bias=config.add_bias_linear)
        self.down = Linear(width, (config.hidden_size,), bias=config.add_bias_linear)

    def forward(self, x_SBD: Tensor, passing: Pass | None = None) -> Tensor:
        return self.down(self.act(self.up(x_SBD)))


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)); gate and up are one product, stored as two logical tensors."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.act = GATED[config.activation]
        self.gate_up = Linear(config.hidden_size, (width, width), bias=config.add_bias_linear)
        self.down = Linear(width, (config.hidden_size,), bias=config.add_bias_linear)

    def forward(self, x_SBD: Tensor, passing: Pass | None = None) -> Tensor:
        gate, up = self.gate_up(x_SBD).chunk(2, dim=-1)
        return self.down(self.act(gate) * up)


def build_mlp(config: ModelConfig, width: int | None = None) -> MLP | GatedMLP:
    """The dense MLP of a config, or one of another inner width."""
    width = width or config.ffn_hidden_size
    assert width is not None
    return GatedMLP(config, width) if config.activation in GATED_ACTIVATIONS else MLP(config, width)
