"""Rules about gated delta nets: which layers have one, their sizes, and which layouts share them out evenly."""

from __future__ import annotations

from collections.abc import Iterator

from petatron.base.errors import Problem
from petatron.config.checks.rule_helpers import check_recurrent_layout, multiples_near, number_problems
from petatron.config.schema.hybrid_pattern import DELTA
from petatron.config.schema.layer_patterns import layer_pattern_problems
from petatron.config.schema.model import RawModelConfig
from petatron.config.schema.run import RawRunConfig
from petatron.config.schema.sections.linear_attention import (
    DeltaNetSettings,
    LinearAttentionSettings,
    has_delta_layers,
)

_VARIANT, _FREQ = "--experimental-attention-variant", "--linear-attention-freq"


def check_linear_attention(config: RawRunConfig) -> Iterator[Problem]:
    model = config.model
    yield from _which_layers(model)
    if not has_delta_layers(model):
        return
    wrong_sizes = list(_heads(model))
    yield from wrong_sizes
    if not wrong_sizes and not any(number_problems(config, LinearAttentionSettings, DeltaNetSettings)):
        yield from check_recurrent_layout(
            config,
            heads="linear_num_value_heads",
            groups="linear_num_key_heads",
            halo_tokens=model.linear_conv_kernel_dim - 1,
        )


def _which_layers(model: RawModelConfig) -> Iterator[Problem]:
    variant, freq = model.experimental_attention_variant, model.linear_attention_freq
    yield from layer_pattern_problems("linear_attention_freq", model)
    if variant is not None and model.hybrid_layer_pattern is not None:
        rule = f"and --hybrid-layer-pattern, where {DELTA} is a gated delta net, both say which layers have one"
        yield Problem(_VARIANT, variant, rule, "Leave one out.")
    elif variant is not None and freq is None:
        fix = f"Give {_FREQ}: 4 is three such layers before each one of attention."
        yield Problem(_VARIANT, variant, "needs to know which layers it is for", fix)


def _heads(model: RawModelConfig) -> Iterator[Problem]:
    keys, values = model.linear_num_key_heads, model.linear_num_value_heads
    if keys > 0 and values % keys:
        rule = f"is not a multiple of --linear-num-key-heads {keys}"
        yield Problem("--linear-num-value-heads", str(values), rule, f"Nearest: {multiples_near(values, keys)}.")
