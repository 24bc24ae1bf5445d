"""Multi-head, grouped-query and multi-query self-attention: one layer, told apart by the number of key/value heads.

S sequence, B batch, D hidden, H query heads, K key/value heads, E head width, as many of each as lie on this device.
"""

from __future__ import annotations

from torch import Tensor, nn

from petatron.config.schema import ModelConfig
from petatron.kernels.attention import causal_attention
from petatron.layers.linear import Linear
from petatron.layers.norm import build_norm
from petatron.layers.passing import Pass
from petatron.layers.rope import rotate


class CoreAttention(nn.Module):
    """Softmax attention over heads that are whole on this device; the slot that context parallelism replaces."""

    def __init__(self, *, window: int | None, dropout: float) -> None:
        super().__init__()
        self.window = window
        self.dropout = dropout

    def forward(
        self, q_SBHE: Tensor, k_SBKE: Tensor, v_SBKE: Tensor, document_starts_BS: Tensor | None = None
    ) -> Tensor:
        return causal_attention(
            q_SBHE,
            k_SBKE,
            v_SBKE,
            window=self.window,
            dropout=self.dropout if self.training else 0.0,
            document_starts_BS=document_starts_BS,
        )


class Attention(nn.Module):
    """out(attend(q, k, v)); q, k and v are one product, stored as three logical tensors."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.kv_channels is not None and config.num_query_groups is not None
        self.head_width = config.kv_channels
        q_width = config.num_attention_heads * config.kv_channels
        kv_width = config.num_query_groups * config.kv_channels
        self.qkv = Linear(
            config.hidden_size, (q_width, kv_width, kv_width), bias=config.add_bias_linear or config.add_qkv_bias
        )
        self.q_norm = build_norm(config, self.head_width) if config.qk_layernorm else None
        self.k_norm = build_norm(config, self.head_width) if config.qk_layernorm else None
        self.core = CoreAttention(window=config.window_size, dropout=config.attention_dropout)
        self.out = Linear(q_width, (config.hidden_size,), bias=config.add_bias_linear)

    def forward(self, x_SBD: Tensor, passing: Pass) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self.head_width)) for part in self.qkv(x_SBD).split(self.qkv.sections, dim=-1)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if passing.rotation is not None:
            q, k = rotate(q, *passing.rotation), rotate(k, *passing.rotation)
        return self.out(self.core(q, k, v, passing.document_starts_BS).flatten(-2))
