"""One transformer layer: two residual branches, each normalised at its entrance."""

from __future__ import annotations

from torch import Tensor, nn

from petatron.config.schema import ModelConfig, MoEConfig
from petatron.layers.attention import Attention
from petatron.layers.dropout import Dropout
from petatron.layers.mlp import build_mlp
from petatron.layers.moe import MoE
from petatron.layers.norm import build_norm
from petatron.layers.passing import Pass


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the second may be a mixture of experts."""

    def __init__(self, config: ModelConfig, moe: MoEConfig | None = None, *, number: int = 0) -> None:
        super().__init__()
        self.attention_norm = build_norm(config, config.hidden_size)
        self.attention = Attention(config)
        self.attention_dropout = Dropout(config.hidden_dropout)
        self.mlp_norm = build_norm(config, config.hidden_size)
        self.mlp = build_mlp(config) if moe is None else MoE(config, moe, number=number)
        self.mlp_dropout = Dropout(config.hidden_dropout)

    def forward(self, x_SBD: Tensor, passing: Pass) -> Tensor:
        x_SBD, normal = self.attention_norm.join(x_SBD)
        x_SBD, normal = self.mlp_norm.join(x_SBD, self.attention_dropout(self.attention(normal, passing)))
        return x_SBD + self.mlp_dropout(self.mlp(normal, passing))
