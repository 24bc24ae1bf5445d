"""One transformer layer: two residual branches, each normalised at its entrance."""

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
    """The residual stream but for its newest branch.

    Not a dataclass, which torch's fully_shard looks into: it would take this tensor's gradient, which comes behind that of
    the branch, for the beginning of a second backward pass of the layer.
    """

    __slots__ = ("x_SBD",)

    def __init__(self, x_SBD: Tensor) -> None:
        self.x_SBD = x_SBD


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the second may be a mixture of experts."""

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
        """Takes and gives the residual stream as two summands, its newest branch and the rest: the next norm adds them up."""
        x_SBD, normal = self.attention_norm.add_and_norm(*((x_SBD,) if residual is None else (residual.x_SBD, x_SBD)))
        x_SBD, normal = self.mlp_norm.add_and_norm(x_SBD, self.attention_dropout(self.attention(normal, context)))
        return self.mlp_dropout(self.mlp(normal, context)), Residual(x_SBD)
