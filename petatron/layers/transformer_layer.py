"""One pre-norm transformer layer: two residual branches."""

from __future__ import annotations

from torch import Tensor, nn

from petatron.config.schema.model import ModelConfig, MoEConfig
from petatron.layers.attention import Attention
from petatron.layers.dropout import Dropout
from petatron.layers.forward_context import ForwardContext
from petatron.layers.mlp import build_mlp
from petatron.layers.moe.moe_layer import MoELayer
from petatron.layers.norm import build_norm


class Residual:
    """The residual stream without its newest branch.

    Not a dataclass, which torch's fully_shard inspects: it would mistake this tensor's gradient, which arrives after that of
    the branch, for the start of a second backward of the layer.
    """

    __slots__ = ("x_SBD",)

    def __init__(self, x_SBD: Tensor) -> None:
        self.x_SBD = x_SBD


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the second may be an MoE layer."""

    def __init__(self, config: ModelConfig, moe: MoEConfig | None = None, *, layer_index: int = 0) -> None:
        super().__init__()
        self.attention_norm = build_norm(config, config.hidden_size)
        self.attention = Attention(config)
        self.attention_dropout = Dropout(config.hidden_dropout)
        self.mlp_norm = build_norm(config, config.hidden_size)
        self.mlp = build_mlp(config) if moe is None else MoELayer(config, moe, layer_index=layer_index)
        self.mlp_dropout = Dropout(config.hidden_dropout)

    def forward(
        self, x_SBD: Tensor, context: ForwardContext, residual: Residual | None = None
    ) -> tuple[Tensor, Residual]:
        """Takes and returns the residual stream as two summands, newest branch and residual: the next norm adds them."""
        x_SBD, normed = self.attention_norm.add_and_norm(*((x_SBD,) if residual is None else (residual.x_SBD, x_SBD)))
        x_SBD, normed = self.mlp_norm.add_and_norm(x_SBD, self.attention_dropout(self.attention(normed, context)))
        return self.mlp_dropout(self.mlp(normed, context)), Residual(x_SBD)
