"""Rules about which layers are of which kind: the pattern of hybrid models, and the layers with linear attention."""

from __future__ import annotations

from collections.abc import Iterator

from petatron.base.errors import Problem
from petatron.config.schema.hybrid_pattern import (
    ATTENTION,
    DELTA,
    EXPERTS,
    MLP,
    PARALLEL,
    PREDICTION_DEPTH,
    STAGE_BOUNDARY,
    SYMBOLS,
)
from petatron.config.schema.layer_patterns import layer_pattern_problems
from petatron.config.schema.model import RawModelConfig
from petatron.config.schema.run import RawRunConfig

_PATTERN = "--hybrid-layer-pattern"
_VARIANT, _FREQ = "--experimental-attention-variant", "--linear-attention-freq"


def check_hybrid(config: RawRunConfig) -> Iterator[Problem]:
    model, pattern = config.model, config.model.hybrid_layer_pattern
    yield from _ratios(model)
    yield from _delta_layers(model)
    if pattern is None:
        return
    if not model.is_hybrid_model:
        rule = f"is turned off, but {_PATTERN} is set"
        yield Problem("--is-hybrid-model", "", rule, "Leave one out.")
    if model.residual_branches != "sequential":
        rule = f"needs layers with two branches, and those of {_PATTERN} have one"
        yield Problem("--residual-branches", model.residual_branches, rule, "Use sequential.")
    if model.mtp_num_layers:
        rule = f"repeats the last layer, and those of {_PATTERN} have one branch"
        yield Problem("--mtp-num-layers", str(model.mtp_num_layers), rule, "Leave it out.")
    wrong_letters = list(_letters(pattern, model))
    yield from wrong_letters
    if not wrong_letters:
        yield from _experts(config, pattern)
        yield from _ratios_of_pattern(model, pattern)
    if PARALLEL in pattern and model.norm_placement != "pre":
        rule = f"puts norms after branches, and the two of a {PARALLEL} in {_PATTERN} share the one before them"
        yield Problem("--norm-placement", model.norm_placement, rule, "Use pre.")


def _delta_layers(model: RawModelConfig) -> Iterator[Problem]:
    variant, freq = model.experimental_attention_variant, model.linear_attention_freq
    yield from layer_pattern_problems("linear_attention_freq", model)
    if variant is not None and model.hybrid_layer_pattern is not None:
        rule = f"and --hybrid-layer-pattern, where {DELTA} is a gated delta net, both say which layers have one"
        yield Problem(_VARIANT, variant, rule, "Leave one out.")
    elif variant is not None and freq is None:
        fix = f"Give {_FREQ}: 4 is three such layers before each one of attention."
        yield Problem(_VARIANT, variant, "needs to know which layers it is for", fix)


def _ratios(model: RawModelConfig) -> Iterator[Problem]:
    attention, mlp = model.hybrid_attention_ratio, model.hybrid_mlp_ratio
    if attention + mlp > 1:
        rule = f"and --hybrid-mlp-ratio {mlp:g} leave no layer for Mamba-2: they add up to {attention + mlp:g}"
        yield Problem("--hybrid-attention-ratio", f"{attention:g}", rule, "Use ratios whose sum is at most 1.")


def _ratios_of_pattern(model: RawModelConfig, pattern: str) -> Iterator[Problem]:
    """Ratios beside a pattern must be those of the pattern."""
    for flag, ratio, symbol, kind in (
        ("--hybrid-attention-ratio", model.hybrid_attention_ratio, ATTENTION, "attention"),
        ("--hybrid-mlp-ratio", model.hybrid_mlp_ratio, MLP, "MLPs"),
    ):
        asked = round(ratio * len(pattern))
        if ratio > 0 and asked != pattern.count(symbol):
            rule = f"gives {asked} of {len(pattern)} layers to {kind}, but {_PATTERN} {pattern} has {pattern.count(symbol)}"
            yield Problem(flag, f"{ratio:g}", rule, "Leave one out.")


def _letters(pattern: str, model: RawModelConfig) -> Iterator[Problem]:
    kinds = "Mamba-2, gated delta net, attention, MLP, experts, attention and Mamba-2 in parallel"
    fix = f"Write one of {' '.join(SYMBOLS)} ({kinds}) for each layer."
    for symbol, rule in (
        (STAGE_BOUNDARY, "marks pipeline stages, which are set with --pipeline-model-parallel-layout here"),
        (PREDICTION_DEPTH, "marks layers of multi-token prediction, which this version does not have"),
    ):
        if symbol in pattern:
            yield Problem(_PATTERN, pattern, f"has a {symbol!r}, which {rule}", fix)
            return
    unknown = sorted(set(pattern) - set(SYMBOLS))
    if unknown or not pattern:
        rule = f"has {', '.join(map(repr, unknown))}, which is no kind of layer" if unknown else "has no layers"
        yield Problem(_PATTERN, pattern or "''", rule, fix)
    elif model.num_layers != len(pattern):
        rule = f"is a pattern of {len(pattern)} layers, but --num-layers is {model.num_layers}"
        yield Problem(_PATTERN, pattern, rule, f"Use --num-layers {len(pattern)}, or write one letter per layer.")


def _experts(config: RawRunConfig, pattern: str) -> Iterator[Problem]:
    experts = config.moe.num_experts
    if EXPERTS in pattern and experts is None:
        yield Problem(_PATTERN, pattern, f"has layers of experts ({EXPERTS}), but no --num-experts", "Give it.")
    elif EXPERTS not in pattern and experts is not None:
        rule = f"has no place in --hybrid-layer-pattern {pattern}, where {EXPERTS} is a layer of experts"
        yield Problem("--num-experts", str(experts), rule, f"Leave it out, or write an {EXPERTS}.")
