"""The part of the schema that says how the layers of a decoder depart from those of GPT and LLaMA, and from each other.

Every default here is the plain layer, so a model, a checkpoint or a family that does not mention a setting does not have it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from petatron.config.schema.numeric_bounds import Factor, RotaryBase


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerVariants:
    """Variants of attention, norms and residuals."""

    window_attn_skip_freq: str | None = None
    """Which layers have the `--window-size`: N means all but every N-th; or one 1 (window) or 0 per layer, as in ([1]*3+[0])*8."""
    no_rope_freq: str | None = None
    """Which layers have no rotary positions: N means every N-th; or one 1 (no positions) or 0 per layer (SmolLM3, Llama 4)."""
    rotary_base_local: RotaryBase | None = None
    """Base of the rotary frequencies in layers with a window, which are then not scaled (Gemma 3). Unset means that of all layers."""
    rotary_seq_len_interpolation_factor: Factor | None = None
    """Linear interpolation: positions are divided by this. Unset means not at all."""


@cache
def variant_defaults() -> dict[str, Any]:
    """Returns the default of every variant: the plain layer."""
    return {item.name: item.default for item in fields(LayerVariants)}
