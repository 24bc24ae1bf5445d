"""The settings of positions: how they enter, rotary frequencies, and how these are scaled for longer contexts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from petatron.config.schema.metadata import ComparedAs, Feature, NotWith, UsedWhen
from petatron.config.schema.moe_layer_freq import marked_by_multiples
from petatron.config.schema.numeric_bounds import (
    Above,
    AtLeast,
    Factor,
    Fraction,
    PositiveFactor,
    RotaryBase,
    SequenceLength,
    SignedFactor,
)
from petatron.config.schema.sections.latent_attention import LATENT_HEADS, NOT_LATENT

if TYPE_CHECKING:
    from petatron.config.schema.run import RawRunConfig

ROTARY_TYPES = ("rope", "yarn")
PositionEmbeddingType = Literal["learned_absolute", "rope", "yarn", "alibi", "none"]


def has_rotary_positions(run: RawRunConfig) -> bool:
    return run.model.position_embedding_type in ROTARY_TYPES


def _is_scaled(run: RawRunConfig) -> bool:
    """Whether rotary frequencies are scaled from an original context, in one of three ways."""
    model = run.model
    return model.position_embedding_type == "yarn" or model.use_rope_scaling or model.longrope_short_factor is not None


def rotary_only(rule: str) -> NotWith:
    """Returns the note of a setting that needs rotary positions."""
    rule += ", but --position-embedding-type is {value}"
    fix = "Use --position-embedding-type rope, or leave it out."
    return NotWith("position_embedding_type", lambda kind: kind not in ROTARY_TYPES, rule, fix)


def without_window(rule: str) -> NotWith:
    """Returns the note of a setting that needs a window."""
    rule += ", but there is no --window-size"
    return NotWith("window_size", lambda size: size is None, rule, "Give --window-size, or leave it out.")


_ROTARY = rotary_only("is about rotary positions")
_ROTARY_KEYS = "cannot be combined with --multi-latent-attention, whose keys have a rotary part in every layer"
_SCALED = UsedWhen(_is_scaled, "the rotary embedding is not scaled")
_LLAMA3 = UsedWhen(lambda run: run.model.use_rope_scaling, "it is for --use-rope-scaling")
_LLAMA3_ROPE = NotWith(
    "position_embedding_type",
    lambda kind: kind != "rope",
    "scales rotary embedding, but --position-embedding-type is {value}",
    "Use --position-embedding-type rope, or leave it out.",
    shown="",
)


@dataclass(frozen=True, kw_only=True)
class RopeSettings:
    """Positions."""

    feature: ClassVar = Feature(
        "rotary positions",
        (UsedWhen(has_rotary_positions, "positions are {run.model.position_embedding_type}"),),
        always_stored=True,
    )
    position_embedding_type: Annotated[PositionEmbeddingType, "selects"] = "learned_absolute"
    """How positions enter: a learned table, rotary embedding, rotary with YaRN scaling, biases of scores (ALiBi), or not at all."""
    rotary_base: Annotated[RotaryBase, Above(1)] = 10000.0
    """Base of the rotary frequencies (theta)."""
    rotary_percent: Annotated[Fraction, LATENT_HEADS] = 1.0
    """Fraction of each head that is rotated."""


@dataclass(frozen=True, kw_only=True)
class RopeVariants:
    """Variants of rotary positions."""

    feature: ClassVar = Feature("rotary positions", variants=True)
    rotary_interleaved: Annotated[bool, _ROTARY, NOT_LATENT] = False
    """Rotary positions rotate neighbouring channels instead of those half a head apart."""
    no_rope_freq: (
        Annotated[str, _ROTARY, NotWith("multi_latent_attention", rule=_ROTARY_KEYS), ComparedAs(marked_by_multiples)]
        | None
    ) = None
    """Which layers have no rotary positions: N means every N-th; or one 1 (no positions) or 0 per layer (SmolLM3, Llama 4)."""
    rotary_base_local: (
        Annotated[RotaryBase, Above(1), _ROTARY, replace(without_window("is for layers with a window"), shown="{:g}")]
        | None
    ) = None
    """Base of the rotary frequencies in layers with a window, which are then not scaled (Gemma 3). Unset means that of all layers."""
    rotary_seq_len_interpolation_factor: Annotated[Factor, AtLeast(1), _ROTARY] | None = None
    """Linear interpolation: positions are divided by this. Unset means not at all."""
    longrope_short_factor: Annotated[str, _ROTARY] | None = None
    """LongRoPE (Phi-3): what each rotary frequency is divided by in sequences up to the original context, as [1.0,1.02]."""
    longrope_long_factor: Annotated[str, replace(_ROTARY, rule="")] | None = None
    """LongRoPE: the same in longer sequences."""
    longrope_attention_factor: PositiveFactor | None = None
    """LongRoPE: factor on cos and sin. Unset means sqrt(1 + log(scaling factor) / log(original context))."""


@dataclass(frozen=True, kw_only=True)
class RopeScalingSettings:
    """Rotary frequencies for contexts longer than the one first trained on."""

    feature: ClassVar = Feature("rotary scaling")
    use_rope_scaling: Annotated[bool, UsedWhen(has_rotary_positions), _LLAMA3_ROPE] = False
    """Llama-3 frequency scaling for contexts longer than the one first trained on."""
    rope_scaling_factor: Annotated[Factor, AtLeast(1), _SCALED] = 8.0
    """Context extension factor of Llama-3 or YaRN scaling."""
    original_max_position_embeddings: Annotated[SequenceLength, AtLeast(1), _SCALED] = 8192
    """Context length before extension, for Llama-3 and YaRN scaling."""
    rope_low_freq_factor: Annotated[PositiveFactor, _LLAMA3] = 1.0
    """Llama-3 scaling: wavelengths longer than original context / this are fully scaled."""
    rope_high_freq_factor: Annotated[Factor, _LLAMA3] = 4.0
    """Llama-3 scaling: wavelengths shorter than original context / this are left alone."""


@dataclass(frozen=True, kw_only=True)
class YarnSettings:
    """YaRN scaling of rotary frequencies."""

    feature: ClassVar = Feature(
        "YaRN",
        (
            UsedWhen(
                lambda run: run.model.position_embedding_type == "yarn", "it is for --position-embedding-type yarn"
            ),
        ),
        always_stored=True,
    )
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
