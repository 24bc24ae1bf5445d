"""The settings of MLPs."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from petatron.config.schema.moe_layer_freq import every_layer_has_experts
from petatron.config.schema.numeric_bounds import Factor, PositiveFactor, Size
from petatron.config.schema.sections.hybrid import EXPERTS, MLP, all_symbols
from petatron.config.schema.setting_metadata import Feature, NotWith, RunSettings, ToySize, UsedWhen, settings_section

GATED_ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "quick_geglu", "reglu")
PlainActivationName = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu", "silu"]
ActivationName = Literal[
    "gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu", "silu", "swiglu", "geglu", "geglu_tanh", "quick_geglu", "reglu"
]  # fmt: skip
_GATED = NotWith(
    "activation",
    lambda name: name not in GATED_ACTIVATIONS,
    "is about gated activations, but --activation is {value}",
    "Use --quick-geglu or --swiglu, or leave it out.",
    shown="{:g}",
)


def _has_layers(run: RunSettings, symbols: str) -> bool:
    """Whether some layer of a hybrid has one of these symbols; other models have all kinds."""
    return run.model.hybrid_layer_pattern is None or any(symbol in all_symbols(run.model) for symbol in symbols)


_HAS_MLPS = UsedWhen(lambda run: _has_layers(run, MLP), "no layer is an MLP")
_HAS_ANY_MLPS = UsedWhen(lambda run: _has_layers(run, MLP + EXPERTS), "no layer is an MLP")
_NOT_ALL_EXPERTS = UsedWhen(lambda run: not every_layer_has_experts(run))  # which have this width by default


@settings_section
class MlpSettings:
    """MLPs and linear layers."""

    feature: ClassVar = Feature("MLP")
    ffn_hidden_size: Annotated[Size, ToySize(256), _HAS_MLPS, _NOT_ALL_EXPERTS] | None = None
    """Width inside the MLP. Derived: 4 x hidden; for gated activations other than quick_geglu 8/3 x hidden, rounded down to a
    multiple of 64."""
    activation: ActivationName = "gelu"
    """MLP activation; the names with glu are gated and use three matrices."""
    add_bias_linear: bool = True
    """Biases on the linear layers (`--disable-bias-linear` turns them off)."""
    activation_func_clamp_value: Annotated[PositiveFactor, "variant", _GATED] | None = None
    """Gated activations: the gate is clamped from above and what it multiplies on both sides (gpt-oss). Unset means not at all."""
    glu_linear_offset: Annotated[Factor, "variant", _GATED] = 0.0
    """Gated activations: added to what the gate multiplies (gpt-oss)."""
    mlp_multipliers: tuple[Annotated[Factor, "variant", _HAS_ANY_MLPS], ...] = (1.0,) * 2
    """Factors on the gate of a gated MLP, and on what an MLP adds to the residual stream (Falcon-H1)."""
