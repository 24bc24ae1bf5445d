"""The part of the schema that says which layers mix the sequence with a state of fixed size instead of attention, and its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from petatron.config.schema.numeric_bounds import Width


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Layers of linear attention between those of attention (Qwen3-Next, Kimi-Linear)."""

    experimental_attention_variant: Literal["gated_delta_net", "kimi_delta_attention"] | None = None
    """Linear attention in some layers: the gated delta net, or that with a decay of every key channel. Unset means attention in all."""
    linear_attention_freq: str | None = None
    """Which layers have linear attention: N means all but every N-th; or one 1 (linear) or 0 per layer, as in ([1]*3+[0])*12."""
    linear_conv_kernel_dim: Width = 4
    """Gated delta net: tokens that its convolution sees, the newest included."""
    linear_key_head_dim: Width = 128
    """Gated delta net: width of a query or key head."""
    linear_value_head_dim: Width = 128
    """Gated delta net: width of a value head."""
    linear_num_key_heads: Width = 16
    """Gated delta net: number of query and key heads."""
    linear_num_value_heads: Width = 32
    """Gated delta net: number of value heads, a multiple of the key heads."""
