"""The part of the schema that says how the layers of a decoder depart from those of GPT and LLaMA, and from each other.

Every default here is the plain layer, so a model, a checkpoint or a family that does not mention a setting does not have it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal

from petatron.config.schema.linear_attention import LinearAttention
from petatron.config.schema.numeric_bounds import Factor, RotaryBase, SequenceLength


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerVariants(LinearAttention):
    """Variants of attention, MLPs, norms and residuals."""

    window_attn_skip_freq: str | None = None
    """Which layers have the `--window-size`: N means all but every N-th; or one 1 (window) or 0 per layer, as in ([1]*3+[0])*8."""
    no_rope_freq: str | None = None
    """Which layers have no rotary positions: N means every N-th; or one 1 (no positions) or 0 per layer (SmolLM3, Llama 4)."""
    rotary_base_local: RotaryBase | None = None
    """Base of the rotary frequencies in layers with a window, which are then not scaled (Gemma 3). Unset means that of all layers."""
    rotary_seq_len_interpolation_factor: Factor | None = None
    """Linear interpolation: positions are divided by this. Unset means not at all."""
    longrope_short_factor: str | None = None
    """LongRoPE (Phi-3): what each rotary frequency is divided by in sequences up to the original context, as [1.0,1.02]."""
    longrope_long_factor: str | None = None
    """LongRoPE: the same in longer sequences."""
    longrope_attention_factor: Factor | None = None
    """LongRoPE: factor on cos and sin. Unset means sqrt(1 + log(scaling factor) / log(original context))."""
    norm_bias: bool = True
    """Biases of LayerNorms (`--no-norm-bias` leaves them out, as MPT does)."""
    embed_layernorm: bool = False
    """Normalise embeddings before the first layer (BLOOM)."""
    norm_placement: Literal["pre", "both", "output"] = "pre"
    """Where a layer's norms are: before each branch, before and after it (Gemma 2), or after it only (OLMo 2)."""
    residual_branches: Literal["sequential", "parallel", "parallel_shared_norm"] = "sequential"
    """Whether the MLP takes what attention made of the stream, or both take the same, with a norm each (GPT-NeoX) or one for both."""
    qk_layernorm_scope: Literal["head", "projection"] = "head"
    """What `--qk-layernorm` normalises: each head, or all heads together (OLMo 2)."""
    rotary_interleaved: bool = False
    """Rotary positions rotate neighbouring channels instead of those half a head apart."""
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    """Attention sinks: whether a head may attend to nothing, with the score 0 or with a learned one (gpt-oss)."""
    attention_output_gate: bool = False
    """Multiply each channel of attention's output by a sigmoid gate that is projected with the queries (Qwen3-Next)."""
    clip_qkv: Factor | None = None
    """Clip queries, keys and values to this size, as they are projected (MPT). Unset means not at all."""
    softmax_scale: Factor | None = None
    """Factor on attention scores. Unset means 1 / sqrt(head width)."""
    attn_logit_softcapping: Factor | None = None
    """Attention scores become cap x tanh(score / cap) (Gemma 2). Unset means that they stay as they are."""
    final_logit_softcapping: Factor | None = None
    """Logits become cap x tanh(logit / cap) (Gemma 2). Unset means that they stay as they are."""
    embedding_multiplier: Factor = 1.0
    """Factor on embeddings (Granite)."""
    residual_multiplier: Factor = 1.0
    """Factor on what each branch adds to the residual stream (Granite)."""
    logits_scaling: Factor = 1.0
    """Logits are divided by this (Granite)."""
    attention_in_multiplier: Factor = 1.0
    """Factor on queries, keys and values (Falcon-H1, where it is one on their input)."""
    key_multiplier: Factor = 1.0
    """Factor on keys, besides `--attention-in-multiplier` (Falcon-H1)."""
    attention_out_multiplier: Factor = 1.0
    """Factor on what attention adds to the residual stream (Falcon-H1)."""
    ssm_in_multiplier: Factor = 1.0
    """Factor on all of Mamba-2's first projection (Falcon-H1, where it is one on its input)."""
    ssm_multipliers: tuple[Factor, ...] = (1.0,) * 5
    """Factors on the parts of Mamba-2's first projection, besides `--ssm-in-multiplier`: z, x, B, C and dt (Falcon-H1)."""
    ssm_out_multiplier: Factor = 1.0
    """Factor on what Mamba-2 adds to the residual stream (Falcon-H1)."""
    mlp_multipliers: tuple[Factor, ...] = (1.0,) * 2
    """Factors on the gate of a gated MLP, and on what an MLP adds to the residual stream (Falcon-H1)."""
    mamba_gated_norm: Literal["gate_then_norm", "norm_then_gate", "none"] = "gate_then_norm"
    """Mamba-2: the norm of the scan's output y, which z gates in any case: norm(y silu(z)), norm(y) silu(z), or with none y silu(z), gated
    without a norm (Falcon-H1)."""
    latent_norm_epsilon: Factor | None = None
    """Latent attention: added to the variance inside the norms of latents (Kimi-Linear). Unset means `--norm-epsilon`."""
    attention_chunk_size: SequenceLength | None = None
    """Layers with rotary positions attend within chunks of so many tokens of a document only (Llama 4). Unset means in none."""
    attention_temperature_scale: Factor | None = None
    """Layers without rotary positions: queries times 1 + this x log(1 + floor((position + 1) / floor)) (Llama 4). Unset means 1."""
    attention_temperature_floor: SequenceLength = 8192
    """The floor of that: positions up to here have no factor."""
    qk_l2_norm: bool = False
    """Layers with rotary positions divide each query and key head by its root mean square, without weights (Llama 4)."""
    activation_func_clamp_value: Factor | None = None
    """Gated activations: the gate is clamped from above and what it multiplies on both sides (gpt-oss). Unset means not at all."""
    glu_linear_offset: Factor = 0.0
    """Gated activations: added to what the gate multiplies (gpt-oss)."""


@cache
def variant_defaults() -> dict[str, Any]:
    """Returns the default of every variant: the plain layer."""
    return {item.name: item.default for item in fields(LayerVariants)}
