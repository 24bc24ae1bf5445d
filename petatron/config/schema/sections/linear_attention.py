"""The settings of linear attention: which layers mix the sequence with a state of fixed size, and its sizes."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from petatron.config.schema.moe_layer_freq import unmarked_by_multiples
from petatron.config.schema.numeric_bounds import PositiveFactor, SequenceLength, Size, Width
from petatron.config.schema.sections.hybrid import DELTA, all_symbols
from petatron.config.schema.sections.norm import STREAM
from petatron.config.schema.setting_metadata import ComparedAs, Feature, NotWith, ToySize, UsedWhen, settings_section

LinearAttentionName = Literal["gated_delta_net", "kimi_delta_attention", "lightning_attention"]
AttentionVariantName = Literal["gated_delta_net", "kimi_delta_attention", "lightning_attention", "dsa"]
DELTA_NETS = ("gated_delta_net", "kimi_delta_attention")
_NO_VARIANT = NotWith(
    "experimental_attention_variant",
    lambda variant: variant not in get_args(LinearAttentionName),
    "says which layers have linear attention, but there is no --experimental-attention-variant of that kind",
    f"Add --experimental-attention-variant {' or '.join(get_args(LinearAttentionName))}, or leave it out.",
)

_LIGHTNING = UsedWhen(
    lambda run: run.model.experimental_attention_variant == "lightning_attention", "no layer is lightning attention"
)


def has_delta_layers(model: Any) -> bool:
    """Whether some layer is a gated delta net, by the layer pattern of a hybrid or by the variant."""
    if model.hybrid_layer_pattern is not None:
        return DELTA in all_symbols(model)
    return model.experimental_attention_variant in DELTA_NETS


def has_linear_variant(model: Any) -> bool:
    """Whether `--experimental-attention-variant` is a kind of linear attention."""
    return model.experimental_attention_variant in get_args(LinearAttentionName)


def has_linear_attention(model: Any) -> bool:
    """Whether some layer has linear attention of any kind."""
    return has_linear_variant(model) or has_delta_layers(model)


@settings_section
class LinearAttentionSettings:
    """Layers of linear attention between those of attention (Qwen3-Next, Kimi-Linear, MiniMax-Text-01)."""

    feature: ClassVar = Feature(
        "linear attention",
        (UsedWhen(lambda run: has_linear_attention(run.model), "no layer has linear attention"),),
        variants=True,
    )
    experimental_attention_variant: Annotated[AttentionVariantName, "selects"] | None = None
    """Linear attention in some layers: the gated delta net, that with a decay of every key channel, or lightning attention, which has the
    heads of attention; or dsa, sparse latent attention in all. Unset means attention in all."""
    linear_attention_freq: Annotated[str, "selects", _NO_VARIANT, ComparedAs(unmarked_by_multiples)] | None = None
    """Which layers have linear attention: N means all but every N-th; or one 1 (linear) or 0 per layer, as in ([1]*3+[0])*12."""
    linear_chunk_size: Annotated[SequenceLength, "at least 1", ToySize(32), "runtime"] = 64
    """Linear attention: tokens of a chunk of its recurrence; of speed and memory only."""
    lightning_out_multiplier: Annotated[PositiveFactor, _LIGHTNING] = 1.0
    """Factor on what lightning attention adds to the residual stream (MiniMax-Text-01)."""
    lightning_stream_multiplier: Annotated[PositiveFactor, _LIGHTNING, STREAM] = 1.0
    """Factor on the residual stream that lightning attention is added to, with `--norm-placement stream` (MiniMax-Text-01)."""


@settings_section
class DeltaNetSettings:
    """Gated delta nets."""

    feature: ClassVar = Feature(
        "gated delta nets",
        (UsedWhen(lambda run: has_delta_layers(run.model), "no layer is a gated delta net"),),
        variants=True,
        recompute_modules=("delta",),
        offload_modules=("delta",),
    )
    linear_conv_kernel_dim: Annotated[Width, "at least 2"] = 4
    """Gated delta net: tokens that its convolution sees, the newest included."""
    linear_key_head_dim: Annotated[Size, ToySize(16)] = 128
    """Gated delta net: width of a query or key head."""
    linear_value_head_dim: Annotated[Size, ToySize(16)] = 128
    """Gated delta net: width of a value head."""
    linear_num_key_heads: Annotated[Size, ToySize(8)] = 16
    """Gated delta net: number of query and key heads."""
    linear_num_value_heads: Size = 32
    """Gated delta net: number of value heads, a multiple of the key heads."""
