"""The settings of attention: heads, windows and chunks, qk-norm, softmax and its scale, output gate, multipliers."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from petatron.config.schema.moe_layer_freq import unmarked_by_multiples
from petatron.config.schema.numeric_bounds import DropoutRate, PositiveFactor, SequenceLength, Size, Width
from petatron.config.schema.sections.hybrid import HAS_ATTENTION
from petatron.config.schema.sections.latent_attention import LATENT_HEADS, NOT_LATENT
from petatron.config.schema.sections.rope import ROTARY_ONLY, WINDOW_ONLY
from petatron.config.schema.setting_metadata import ComparedAs, Feature, NotWith, ToySize, UsedWhen, settings_section

_ROTARY_LAYERS = replace(ROTARY_ONLY, rule=f"is for layers with {ROTARY_ONLY.rule.removeprefix('is about ')}")
_WINDOWS = replace(WINDOW_ONLY, rule="says which layers have a window, but there is no --window-size", shown="{}")
_SHARED_HEADS = replace(
    NOT_LATENT,
    rule=f"{NOT_LATENT.rule}, which has no key/value heads to share",
    fix="Use --no-group-query-attention, or leave the other out.",
    shown="",
)
_HAS_BIAS = UsedWhen(
    lambda run: not run.model.multi_latent_attention,
    "latent attention's projections of queries, keys and values have none",
)
_UNSHARED = NotWith("group_query_attention", lambda shared: not shared)
_UNNORMED = NotWith(
    "qk_layernorm",
    lambda normed: not normed,
    "says what --qk-layernorm normalizes, which is not set",
    "Add --qk-layernorm, or leave it out.",
)
_TWO_NORMS = NotWith("qk_layernorm", rule="and --qk-layernorm are two norms of queries and keys", shown="")


@settings_section
class AttentionSettings:
    """Attention."""

    feature: ClassVar = Feature(
        "attention",
        (HAS_ATTENTION,),
        always_stored=True,
        recompute_modules=("attention", "core_attn"),
        offload_modules=("qkv_linear", "core_attn", "attn_proj"),
    )
    num_attention_heads: Width = 0
    """Number of query heads."""
    group_query_attention: Annotated[bool, "redundant", _SHARED_HEADS] = False
    """Share key/value heads between groups of query heads; `--num-query-groups` says how many groups."""
    num_query_groups: Annotated[Size, NotWith("multi_latent_attention"), _UNSHARED] | None = None
    """Number of key/value heads. Derived: 1 with `--group-query-attention` (multi-query), else the number of heads."""
    kv_channels: Annotated[Size, NotWith("multi_latent_attention"), LATENT_HEADS] | None = None
    """Width of one head. Derived: hidden size / heads."""
    add_qkv_bias: Annotated[bool, _HAS_BIAS] = False
    """Bias on the query/key/value projection even when the others have none (Qwen2)."""
    qk_layernorm: Annotated[bool, NotWith("qk_l2_norm")] = False
    """Normalize each query and key head (Qwen3); with `--multi-latent-attention` the latents (DeepSeek)."""
    window_size: Annotated[SequenceLength, "at least 1", ToySize(32)] | None = None
    """Sliding-window attention: how many tokens, itself included, a token sees (127,0 in Megatron is 128). Unset means all."""
    attention_dropout: Annotated[DropoutRate, "training"] = 0.1
    """Dropout on attention weights. Modern language models use 0."""


@settings_section
class AttentionVariants:
    """Variants of attention."""

    feature: ClassVar = Feature("attention", AttentionSettings.feature.used_when, variants=True, always_stored=True)
    window_attn_skip_freq: Annotated[str, _WINDOWS, ComparedAs(unmarked_by_multiples)] | None = None
    """Which layers have the `--window-size`: N means all but every N-th; or one 1 (window) or 0 per layer, as in ([1]*3+[0])*8."""
    qk_layernorm_scope: Annotated[Literal["head", "projection"], NOT_LATENT, _UNNORMED] = "head"
    """What `--qk-layernorm` normalizes: each head, or all heads together (OLMo 2)."""
    qk_l2_norm: Annotated[bool, NOT_LATENT, _ROTARY_LAYERS, _TWO_NORMS] = False
    """Layers with rotary positions divide each query and key head by its root mean square, without weights (Llama 4)."""
    softmax_type: Annotated[Literal["vanilla", "off-by-one", "learnable"], NOT_LATENT] = "vanilla"
    """Attention sinks: whether a head may attend to nothing, with the score 0 or with a learned one (gpt-oss)."""
    softmax_scale: Annotated[PositiveFactor, NOT_LATENT] | None = None
    """Factor on attention scores. Unset means 1 / sqrt(head width)."""
    attn_logit_softcapping: Annotated[PositiveFactor, NOT_LATENT] | None = None
    """Attention scores become cap x tanh(score / cap) (Gemma 2). Unset means that they stay as they are."""
    attention_output_gate: Annotated[bool, NOT_LATENT] = False
    """Multiply each channel of attention's output by a sigmoid gate that is projected with the queries (Qwen3-Next)."""
    clip_qkv: Annotated[PositiveFactor, NOT_LATENT] | None = None
    """Clip queries, keys and values to this size, as they are projected (MPT). Unset means not at all."""
    attention_in_multiplier: Annotated[PositiveFactor, NOT_LATENT] = 1.0
    """Factor on queries, keys and values (Falcon-H1, where it is one on their input)."""
    key_multiplier: Annotated[PositiveFactor, NOT_LATENT, NotWith("qk_layernorm"), NotWith("qk_l2_norm")] = 1.0
    """Factor on keys, besides `--attention-in-multiplier` (Falcon-H1)."""
    attention_out_multiplier: Annotated[PositiveFactor, NOT_LATENT] = 1.0
    """Factor on what attention adds to the residual stream (Falcon-H1)."""
    attention_chunk_size: Annotated[SequenceLength, "at least 1", ToySize(32), NOT_LATENT, _ROTARY_LAYERS] | None = None
    """Layers with rotary positions attend only within chunks of this many tokens of a document (Llama 4). Unset means in none."""
    attention_temperature_scale: Annotated[PositiveFactor, NOT_LATENT] | None = None
    """Layers without rotary positions: queries times 1 + this x log(1 + floor((position + 1) / floor)) (Llama 4). Unset means 1."""
    attention_temperature_floor: Annotated[SequenceLength, "at least 1"] = 8192
    """The floor of that: positions up to here have no factor."""
