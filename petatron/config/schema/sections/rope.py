"""The settings of positions: how they enter, rotary frequencies, and how these are scaled for longer contexts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from petatron.config.schema.moe_layer_freq import marked_by_multiples
from petatron.config.schema.numeric_bounds import (
    Factor,
    Fraction,
    PositiveFactor,
    RotaryBase,
    SequenceLength,
    SignedFactor,
    Width,
)
from petatron.config.schema.sections.latent_attention import LATENT_HEADS, NOT_LATENT
from petatron.config.schema.setting_metadata import (
    ComparedAs,
    Feature,
    NotWith,
    RunSettings,
    UsedWhen,
    settings_section,
    used_with,
)

ROTARY_TYPES = ("rope", "yarn")
PositionEmbeddingType = Literal["learned_absolute", "rope", "yarn", "alibi", "relative", "none"]


def has_rotary_positions(run: RunSettings) -> bool:
    return run.model.position_embedding_type in ROTARY_TYPES


ROTARY_ONLY = NotWith(
    "position_embedding_type",
    lambda kind: kind not in ROTARY_TYPES,
    "is about rotary positions, but --position-embedding-type is {value}",
    "Use --position-embedding-type rope, or leave it out.",
)
WINDOW_ONLY = NotWith(
    "window_size",
    lambda size: size is None,
    "is for layers with a window, but there is no --window-size",
    "Give --window-size, or leave it out.",
    shown="{:g}",
)
_LLAMA3_ROPE = replace(
    ROTARY_ONLY,
    when=lambda kind: kind != "rope",
    rule="scales rotary embedding, but --position-embedding-type is {value}",
    shown="",
)
_ROTARY_KEYS = replace(NOT_LATENT, rule=f"{NOT_LATENT.rule}, whose keys have a rotary part in every layer")
_LLAMA3, _YARN = used_with("model.use_rope_scaling"), used_with("model.position_embedding_type", value="yarn")
_SCALING = used_with("model.use_rope_scaling", "model.longrope_short_factor")
_SCALED = UsedWhen(lambda run: _YARN.holds(run) or _SCALING.holds(run), "the rotary embedding is not scaled")


@settings_section
class RopeSettings:
    """Positions."""

    feature: ClassVar = Feature(
        "rotary positions",
        (UsedWhen(has_rotary_positions, "positions are {run.model.position_embedding_type}"),),
        always_stored=True,
    )
    position_embedding_type: Annotated[PositionEmbeddingType, "selects"] = "learned_absolute"
    """How positions enter: a learned table, rotary embedding, rotary with YaRN scaling, biases of scores (ALiBi; T5's
    tables, `relative`), or not at all."""
    rotary_base: Annotated[RotaryBase, "above 1"] = 10000.0
    """Base of the rotary frequencies (theta)."""
    rotary_percent: Annotated[Fraction, LATENT_HEADS] = 1.0
    """Fraction of each head that is rotated."""


@settings_section
class RopeVariants:
    """Variants of rotary positions."""

    feature: ClassVar = Feature("rotary positions", variants=True)
    rotary_interleaved: Annotated[bool, ROTARY_ONLY, NOT_LATENT] = False
    """Rotary positions rotate neighboring channels instead of those half a head apart."""
    no_rope_freq: Annotated[str, ROTARY_ONLY, _ROTARY_KEYS, ComparedAs(marked_by_multiples)] | None = None
    """Which layers have no rotary positions: N means every N-th; or one 1 (no positions) or 0 per layer (SmolLM3, Llama 4)."""
    rotary_base_local: Annotated[RotaryBase, "above 1", ROTARY_ONLY, WINDOW_ONLY] | None = None
    """Base of the rotary frequencies in layers with a window, which are then not scaled (Gemma 3). Unset means that of all layers."""
    rotary_seq_len_interpolation_factor: Annotated[Factor, "at least 1", ROTARY_ONLY] | None = None
    """Linear interpolation: positions are divided by this. Unset means not at all."""
    mrope_section: tuple[Annotated[Width, ROTARY_ONLY, NOT_LATENT], ...] = ()
    """Pairs of channels that are rotated by a token's place in time, by its row and by its column, for images beside text (Qwen2-VL). Unset
    means by its position alone."""
    learned_position_table: Annotated[bool, ROTARY_ONLY] = False
    """Adds a learned table of positions to the embedding as well, as Megatron's latent attention does unless other positions are named."""
    longrope_short_factor: Annotated[str, ROTARY_ONLY] | None = None
    """LongRoPE (Phi-3): what each rotary frequency is divided by in sequences up to the original context, as [1.0,1.02]."""
    longrope_long_factor: Annotated[str, replace(ROTARY_ONLY, rule="")] | None = None
    """LongRoPE: the same in longer sequences."""
    longrope_attention_factor: PositiveFactor | None = None
    """LongRoPE: factor on cos and sin. Unset means sqrt(1 + log(scaling factor) / log(original context))."""


@settings_section
class RopeScalingSettings:
    """Rotary frequencies for contexts longer than the one first trained on."""

    feature: ClassVar = Feature("rotary scaling")
    use_rope_scaling: Annotated[bool, UsedWhen(has_rotary_positions), _LLAMA3_ROPE] = False
    """Llama-3 frequency scaling for contexts longer than the one first trained on."""
    rope_scaling_factor: Annotated[Factor, "at least 1", _SCALED] = 8.0
    """Context extension factor of Llama-3 or YaRN scaling."""
    original_max_position_embeddings: Annotated[SequenceLength, "at least 1", _SCALED] = 8192
    """Context length before extension, for Llama-3 and YaRN scaling."""
    rope_low_freq_factor: Annotated[PositiveFactor, _LLAMA3] = 1.0
    """Llama-3 scaling: wavelengths longer than original context / this are fully scaled."""
    rope_high_freq_factor: Annotated[Factor, _LLAMA3] = 4.0
    """Llama-3 scaling: wavelengths shorter than original context / this are left alone."""


@settings_section
class YarnSettings:
    """YaRN scaling of rotary frequencies."""

    feature: ClassVar = Feature("YaRN", (_YARN,), always_stored=True)
    yarn_beta_fast: Factor = 32.0
    """YaRN: rotations over the original context above which a frequency is kept."""
    yarn_beta_slow: PositiveFactor = 1.0
    """YaRN: rotations over the original context below which a frequency is interpolated."""
    yarn_mscale: SignedFactor = 1.0
    """YaRN: scale of the attention temperature correction; below 0 for a temperature below 1."""
    yarn_mscale_all_dim: Factor = 0.0
    """YaRN: second scale of the temperature correction (DeepSeek); 0 leaves it out."""
    yarn_correction_range_round_to_int: Annotated[bool, "later"] = True
    """YaRN: the ramp between kept and interpolated frequencies begins and ends at a pair; off: between two of them (gpt-oss)."""


MAX_FACTORS = 1 << 16


class LongRopeFactorError(ValueError):
    """A text that is not a list of factors; the message tells what is wrong with it."""


def parse_longrope_factors(text: str) -> tuple[float, ...]:
    """Returns the factors.

    >>> parse_longrope_factors("[1.0, 2.5]")
    (1.0, 2.5)
    """
    try:
        factors = json.loads(text)
    except (ValueError, RecursionError):
        raise LongRopeFactorError("is not a list of numbers such as [1.0, 1.5]") from None
    if not isinstance(factors, list) or not 0 < len(factors) <= MAX_FACTORS:
        raise LongRopeFactorError("is not a list of numbers such as [1.0, 1.5]")
    if not all(is_factor(number) for number in factors):
        raise LongRopeFactorError("holds something else than positive numbers")
    return tuple(float(number) for number in factors)


def is_factor(number: object) -> bool:
    """Whether a value of JSON is a positive number."""
    return isinstance(number, int | float) and not isinstance(number, bool) and number > 0 and math.isfinite(number)


def format_longrope_factors(factors: Sequence[float]) -> str:
    """Returns the text of factors.

    >>> format_longrope_factors((1, 2.5))
    '[1.0, 2.5]'
    """
    return json.dumps([float(number) for number in factors])
