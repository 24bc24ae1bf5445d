"""Rules about hybrid models: their pattern of layers, the sizes of Mamba-2, and which layouts share them out evenly."""

from __future__ import annotations

from collections.abc import Iterator

from petatron.base.errors import Problem
from petatron.config.checks.rule_helpers import check_recurrent_layout, divisors, number_problems
from petatron.config.schema.hybrid_pattern import (
    ATTENTION,
    EXPERTS,
    MAMBA,
    MLP,
    PARALLEL,
    PREDICTION_DEPTH,
    STAGE_BOUNDARY,
    SYMBOLS,
    branch_letters,
)
from petatron.config.schema.model import RawModelConfig
from petatron.config.schema.run import RawRunConfig
from petatron.config.schema.sections.mamba2 import Mamba2Settings

_PATTERN = "--hybrid-layer-pattern"
HALO_TOKENS = 3
"""What the convolution of a context-parallel rank needs of the part before."""


def check_hybrid(config: RawRunConfig) -> Iterator[Problem]:
    model, pattern = config.model, config.model.hybrid_layer_pattern
    yield from _ratios(model)
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
    if MAMBA in branch_letters(pattern):
        wrong_sizes = list(_mamba_sizes(model))
        yield from wrong_sizes
        if not wrong_sizes and not any(number_problems(config, Mamba2Settings)):
            yield from check_recurrent_layout(
                config, heads="mamba_num_heads", groups="mamba_num_groups", halo_tokens=HALO_TOKENS
            )


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


def _mamba_sizes(model: RawModelConfig) -> Iterator[Problem]:
    heads, groups, head_dim = model.mamba_num_heads, model.mamba_num_groups, model.mamba_head_dim
    if heads is None:
        rule = f"does not divide 2 x --hidden-size {model.hidden_size}, and --mamba-num-heads is not set"
        yield Problem("--mamba-head-dim", str(head_dim), rule, "Use a divisor, or set --mamba-num-heads.")
    elif groups > 0 and heads % groups:
        rule = f"does not divide --mamba-num-heads {heads}"
        yield Problem("--mamba-num-groups", str(groups), rule, f"Use {divisors(heads)}.")
    if model.mamba_norm_groups not in (1, groups):
        rule = f"is neither 1 nor --mamba-num-groups {groups}"
        yield Problem("--mamba-norm-groups", str(model.mamba_norm_groups), rule, "Use one of them.")
