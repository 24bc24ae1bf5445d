"""The settings of maximal update parametrization (muP), and the multipliers that follow from them.

muP (Yang et al., Tensor Programs V) says how initial weights, learning rates and three multipliers of a model change with its width, so
that activations and their updates keep their size, and the best learning rate of a narrow model is that of a wide one. The width is
relative to a base model: w = hidden size / `--mup-base-hidden-size`. It is applied in three places, and layers do not depend on it:

    forward multipliers  on embeddings, scores and logits (`mup_multipliers`); they are settings of the model like any other
    initial weights      of matrices that read hidden activations are smaller by sqrt(w) (`ModelSpec.params`)
    updates              each optimizer declares how a learning rate changes with fan-in and fan-out (`UpdateRuleSpec.width_scaling`)

So a checkpoint is a model with multipliers: generation and conversion need not know that it was trained with muP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from petatron.config.schema.numeric_bounds import Factor, PositiveFactor, Size
from petatron.config.schema.sections.hybrid import HAS_ATTENTION
from petatron.config.schema.setting_metadata import Feature, NotWith, UsedWhen, settings_section, used_with

_SCORES = UsedWhen(lambda run: not run.model.multi_latent_attention, "latent attention sets its own softmax scale")
_TWO_FACTORS = NotWith("scale_embeddings", rule="and --scale-embeddings are two factors on embeddings", shown="{:g}")


@settings_section
class MupSettings:
    """Maximal update parametrization (muP): training with the learning rate of a narrower model."""

    feature: ClassVar = Feature("muP", (used_with("model.use_mup"),), role="training")
    use_mup: Annotated[bool, "selects"] = False
    """Maximal update parametrization (muP): initial weights, learning rates and multipliers of the model depend on its width such that the
    best learning rate of a narrow model is that of a wide one."""
    mup_base_hidden_size: Size | None = None
    """muP: hidden size of the model whose learning rate this one uses. Derived: `--hidden-size`, which makes this one the base."""
    mup_base_head_dim: Annotated[PositiveFactor, HAS_ATTENTION, _SCORES] | None = None
    """muP: base head dim d; attention scores are scaled so that the softmax scale equals 1/sqrt(d) at the base head dim. Unset means 1."""
    mup_width_mult: PositiveFactor | None = None
    """muP: width relative to the base. Derived: hidden size / `--mup-base-hidden-size`, and nothing else is accepted."""
    mup_embedding_mult: Annotated[PositiveFactor, _TWO_FACTORS] = 1.0
    """muP: multiplier on embeddings; becomes `--embedding-multiplier`."""
    mup_output_mult: PositiveFactor = 1.0
    """muP: multiplier on logits, as 1 / `--logits-scaling`. Unset (1): 1 / `--mup-width-mult`."""
    mup_attn_scale_power: Annotated[Factor, "at least 0", HAS_ATTENTION, _SCORES] = 1.0
    """muP: attention scores are divided by the head width to this power; becomes `--softmax-scale`. 0.5 is usual without muP."""


@dataclass(frozen=True, slots=True)
class MupMultipliers:
    """The multipliers of a model that follow from muP's settings, under the names of the model's settings."""

    embedding_multiplier: float
    logits_scaling: float
    softmax_scale: float | None


def relative_width(model: MupSettings, hidden_size: int) -> float:
    """Returns the width relative to muP's base model; 1 without muP.

    >>> from petatron.config.schema.model import RawModelConfig
    >>> relative_width(RawModelConfig(use_mup=True, mup_base_hidden_size=64), 256)
    4.0
    """
    base = model.mup_base_hidden_size if model.use_mup else None
    return hidden_size / base if base else 1.0


def mup_multipliers(settings: MupSettings, hidden_size: int, head_dim: int | None) -> MupMultipliers:
    """Returns the multipliers of a model of this size, as Megatron-LM defines them; without a head width, no softmax scale.

    >>> from petatron.config.schema.model import RawModelConfig
    >>> settings = RawModelConfig(use_mup=True, mup_base_hidden_size=64, mup_base_head_dim=16)
    >>> mup_multipliers(settings, hidden_size=256, head_dim=32)
    MupMultipliers(embedding_multiplier=1.0, logits_scaling=4.0, softmax_scale=0.125)
    """
    scaling = 1.0 / settings.mup_output_mult
    if settings.mup_output_mult == 1.0:
        scaling = relative_width(settings, hidden_size)
    base = 1.0 if settings.mup_base_head_dim is None else settings.mup_base_head_dim**0.5
    scores = None if not head_dim else base / head_dim**settings.mup_attn_scale_power
    return MupMultipliers(settings.mup_embedding_mult, scaling, scores)
