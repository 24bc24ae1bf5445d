"""Rules about layer kinds: which variants combine, layer patterns, and layouts of recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from petatron.base.errors import Problem
from petatron.config.schema.attention_layer_freq import layer_pattern_problems
from petatron.config.schema.fields import flag_name
from petatron.config.schema.model import RawModelConfig
from petatron.config.schema.run import RawRunConfig
from petatron.config.schema.sections.encoder_decoder import ENCODER_DECODER_MODEL
from petatron.config.schema.sections.hybrid import (
    ATTENTION,
    DELTA,
    EXPERTS,
    MLP,
    PARALLEL,
    PREDICTION_DEPTH,
    STAGE_BOUNDARY,
    SYMBOLS,
    all_symbols,
)
from petatron.config.schema.sections.linear_attention import DeltaNetSettings, has_linear_variant
from petatron.config.schema.sections.mamba2 import MAMBA_CONV_WIDTH, Mamba2Settings
from petatron.config.schema.sections.mlp import GATED_ACTIVATIONS
from petatron.config.schema.sections.rope import ROTARY_TYPES, LongRopeFactorError, parse_longrope_factors
from petatron.config.setting_bounds_and_conflicts import divisors, multiples_near, number_problems
from petatron.kernels.size_limits import MAX_ALIBI_POSITIONS

_FACTOR_LISTS = {"ssm_multipliers": ("z", "x", "B", "C", "dt"), "mlp_multipliers": ("the gate", "the output")}


def check_layer_variants(model: RawModelConfig) -> Iterator[Problem]:
    yield from layer_pattern_problems("window_attn_skip_freq", model)
    yield from layer_pattern_problems("no_rope_freq", model)
    yield from _rotary(model)
    yield from _norms_and_residuals(model)
    yield from _input_factors(model)
    gate, *_ = (*model.mlp_multipliers, 1.0)
    if gate != 1.0 and model.activation not in GATED_ACTIVATIONS:
        rule = f"begins with a factor on gates, but --activation is {model.activation}"
        yield Problem("--mlp-multipliers", f"{gate:g}", rule, "Use --swiglu, or begin with 1.")
    scale, rotary = model.attention_temperature_scale, model.position_embedding_type in ROTARY_TYPES
    if scale is not None and rotary and model.no_rope_freq is None:
        rule = "is for layers without rotary positions, and all have them"
        yield Problem("--attention-temperature-scale", f"{scale:g}", rule, "Give --no-rope-freq, or leave it out.")
    if model.position_embedding_type == "alibi":
        yield from _alibi(model)


def _rotary(model: RawModelConfig) -> Iterator[Problem]:
    yield from _longrope(model)
    factor = model.rotary_seq_len_interpolation_factor
    yarn, longrope = model.position_embedding_type == "yarn", model.longrope_short_factor is not None
    if factor is not None and (yarn or longrope or model.use_rope_scaling):
        rule = "is one way to scale rotary positions, and another is set"
        yield Problem("--rotary-seq-len-interpolation-factor", f"{factor:g}", rule, "Leave one out.")


def _longrope(model: RawModelConfig) -> Iterator[Problem]:
    lists = {
        "--longrope-short-factor": model.longrope_short_factor,
        "--longrope-long-factor": model.longrope_long_factor,
    }
    if all(text is None for text in lists.values()):
        return
    latent = model.multi_latent_attention
    width = model.qk_pos_emb_head_dim if latent else int((model.kv_channels or 0) * model.rotary_percent)
    pairs = width // 2
    for flag, text in lists.items():
        try:
            count = None if text is None else len(parse_longrope_factors(text))
        except LongRopeFactorError as error:
            yield Problem(flag, f"{text:.40}", str(error), "Give one number per rotary pair.")
            continue
        if count is None:
            yield Problem(flag, "", "is missing, and LongRoPE has two lists of factors", "Give both, or neither.")
        elif width and count != pairs:
            rule = f"has {count} numbers, and a head has {pairs} rotary pairs"
            yield Problem(flag, f"{text:.40}", rule, "Give one number per rotary pair.")
    if model.position_embedding_type != "rope" or model.use_rope_scaling:
        rule = "is one way to scale rotary positions, and another is set"
        yield Problem("--longrope-short-factor", f"{model.longrope_short_factor or '':.40}", rule, "Leave one out.")


def _norms_and_residuals(model: RawModelConfig) -> Iterator[Problem]:
    branches, placement = model.residual_branches, model.norm_placement
    if branches != "sequential" and placement != "pre":
        rule = f"needs norms before the branches, but --norm-placement is {placement}"
        yield Problem("--residual-branches", branches, rule, "Use --norm-placement pre.")
    if placement == "post" and model.model_type in ("decoder", ENCODER_DECODER_MODEL):
        rule = "has no norm left for the end of a decoder"
        yield Problem("--norm-placement", placement, rule, "Use another placement, or --model-type bert.")
    if not model.first_attention_norm and placement != "pre":
        rule = f"is about norms before branches, and --norm-placement is {placement}"
        yield Problem("--no-first-attention-norm", "", rule, "Leave one out.")
    if model.qk_layernorm_scope == "projection" and model.normalization != "RMSNorm":
        rule = f"is an RMSNorm, but --normalization is {model.normalization}"
        yield Problem("--qk-layernorm-scope", "projection", rule, "Use --normalization RMSNorm.")
    for name, parts in _FACTOR_LISTS.items():
        given: tuple[float, ...] = getattr(model, name)
        if len(given) != len(parts) or min(given) <= 0:
            rule, fix = f"is not {len(parts)} positive numbers", f"Give one each for {', '.join(parts)}."
            yield Problem(flag_name(name), " ".join(f"{factor:g}" for factor in given), rule, fix)


def _input_factors(model: RawModelConfig) -> Iterator[Problem]:
    """Refuses what makes factors on attention's input and keys differ from factors on its scores and output, where they are applied."""
    on_heads = {
        "--qk-layernorm": model.qk_layernorm,
        "--qk-l2-norm": model.qk_l2_norm,
        "--clip-qkv": model.clip_qkv is not None,
    }
    on_input = on_heads | {
        "biases of attention": bool(model.add_bias_linear or model.add_qkv_bias),
        "--attention-output-gate": model.attention_output_gate,
        "a norm after attention": model.norm_placement in ("both", "output"),
    }
    for name, others in (("attention_in_multiplier", on_input), ("key_multiplier", on_heads)):
        rivals = [other for other, is_set in others.items() if is_set]
        if getattr(model, name) != 1.0 and rivals:
            rule = f"cannot be combined with {' and '.join(rivals)}"
            yield Problem(flag_name(name), f"{getattr(model, name):g}", rule, "Leave one out.")


def _alibi(model: RawModelConfig) -> Iterator[Problem]:
    """Checks ALiBi: its biases come before other changes of scores, and are exact in half precision up to some position."""
    where = "--position-embedding-type"
    longest = model.max_position_embeddings or model.seq_length
    if longest > MAX_ALIBI_POSITIONS:
        rule = f"has positions below {MAX_ALIBI_POSITIONS:,}, and --max-position-embeddings is {longest:,}"
        yield Problem(where, "alibi", rule, "Use rope for longer contexts.")
    for flag, given in (
        ("--attn-logit-softcapping", model.attn_logit_softcapping is not None),
        (f"--softmax-type {model.softmax_type}", model.softmax_type != "vanilla"),
    ):
        if given:
            rule = f"cannot be combined with {flag}, whose scores would have the biases"
            yield Problem(where, "alibi", rule, "Leave one out.")


_PATTERN, _DEPTH_PATTERN = "--hybrid-layer-pattern", "--mtp-hybrid-override-pattern"
_VARIANT, _FREQ = "--experimental-attention-variant", "--linear-attention-freq"


def check_hybrid(config: RawRunConfig) -> Iterator[Problem]:
    model, pattern = config.model, config.model.hybrid_layer_pattern
    attention, mlp = model.hybrid_attention_ratio, model.hybrid_mlp_ratio
    if attention + mlp > 1:
        rule = f"and --hybrid-mlp-ratio {mlp:g} leave no layer for Mamba-2: they add up to {attention + mlp:g}"
        yield Problem("--hybrid-attention-ratio", f"{attention:g}", rule, "Use ratios whose sum is at most 1.")
    yield from _delta_layers(model)
    if pattern is None:
        return
    if not model.is_hybrid_model:
        rule = f"is turned off, but {_PATTERN} is set"
        yield Problem("--is-hybrid-model", "", rule, "Leave one out.")
    if model.residual_branches != "sequential":
        rule = f"needs layers with two branches, and those of {_PATTERN} have one"
        yield Problem("--residual-branches", model.residual_branches, rule, "Use sequential.")
    wrong_symbols = [*_symbols(pattern, model), *_depth_symbols(model)]
    yield from wrong_symbols
    if not wrong_symbols:
        yield from _experts(config)
        yield from _ratios_of_pattern(model, pattern)
    if PARALLEL in all_symbols(model) and model.norm_placement != "pre":
        rule = f"puts norms after branches, and the two of a {PARALLEL} in {_PATTERN} share the one before them"
        yield Problem("--norm-placement", model.norm_placement, rule, "Use pre.")


def _delta_layers(model: RawModelConfig) -> Iterator[Problem]:
    variant, freq = model.experimental_attention_variant, model.linear_attention_freq
    yield from layer_pattern_problems("linear_attention_freq", model)
    if has_linear_variant(model) and model.hybrid_layer_pattern is not None:
        rule = f"and --hybrid-layer-pattern, where {DELTA} is a gated delta net, both say which layers have one"
        yield Problem(_VARIANT, str(variant), rule, "Leave one out.")
    elif has_linear_variant(model) and freq is None:
        fix = f"Give {_FREQ}: 4 is three such layers before each one of attention."
        yield Problem(_VARIANT, str(variant), "needs to know which layers it is for", fix)


def _ratios_of_pattern(model: RawModelConfig, pattern: str) -> Iterator[Problem]:
    """Checks that ratios given beside a layer pattern agree with it."""
    for flag, ratio, symbol, kind in (
        ("--hybrid-attention-ratio", model.hybrid_attention_ratio, ATTENTION, "attention"),
        ("--hybrid-mlp-ratio", model.hybrid_mlp_ratio, MLP, "MLPs"),
    ):
        asked = round(ratio * len(pattern))
        if ratio > 0 and asked != pattern.count(symbol):
            rule = f"gives {asked} of {len(pattern)} layers to {kind}, but {_PATTERN} {pattern} has {pattern.count(symbol)}"
            yield Problem(flag, f"{ratio:g}", rule, "Leave one out.")


_KINDS = "Mamba-2, gated delta net, attention, MLP, experts, attention and Mamba-2 in parallel"
_SYMBOLS_FIX = f"Write one of {' '.join(SYMBOLS)} ({_KINDS}) for each layer."


def _symbols(pattern: str, model: RawModelConfig) -> Iterator[Problem]:
    for symbol, rule in (
        (STAGE_BOUNDARY, "marks pipeline stages, which are set with --pipeline-model-parallel-layout here"),
        (PREDICTION_DEPTH, f"marks depths, which are set with {_DEPTH_PATTERN} and --mtp-num-layers here"),
    ):
        if symbol in pattern:
            yield Problem(_PATTERN, pattern, f"has a {symbol!r}, which {rule}", _SYMBOLS_FIX)
            return
    if problem := _unknown_symbols(_PATTERN, pattern):
        yield problem
    elif model.num_layers != len(pattern):
        rule = f"is a pattern of {len(pattern)} layers, but --num-layers is {model.num_layers}"
        yield Problem(_PATTERN, pattern, rule, f"Use --num-layers {len(pattern)}, or write one symbol per layer.")


def _depth_symbols(model: RawModelConfig) -> Iterator[Problem]:
    """Yields problems of the MTP depths in a hybrid layer pattern."""
    if not model.mtp_num_layers:
        return
    if model.mtp_hybrid_override_pattern is None:
        rule = f"needs the layers of a depth, which no layer of {_PATTERN} is by itself: each has one branch"
        fix = f"Give {_DEPTH_PATTERN}, for instance *-, or write them after a / for each depth."
        yield Problem("--mtp-num-layers", str(model.mtp_num_layers), rule, fix)
    elif problem := _unknown_symbols(_DEPTH_PATTERN, model.mtp_hybrid_override_pattern):
        yield problem


def _unknown_symbols(flag: str, pattern: str) -> Problem | None:
    unknown = sorted(set(pattern) - set(SYMBOLS))
    if pattern and not unknown:
        return None
    rule = f"has {', '.join(map(repr, unknown))}, which is no kind of layer" if unknown else "has no layers"
    return Problem(flag, pattern or "''", rule, _SYMBOLS_FIX)


def _experts(config: RawRunConfig) -> Iterator[Problem]:
    model, experts = config.model, config.moe.num_experts
    pattern, symbols = model.hybrid_layer_pattern or "", all_symbols(model)
    if EXPERTS in symbols and experts is None:
        flag, where = (_PATTERN, pattern) if EXPERTS in pattern else (_DEPTH_PATTERN, model.mtp_hybrid_override_pattern)
        yield Problem(flag, str(where), f"has layers of experts ({EXPERTS}), but no --num-experts", "Give it.")
    elif EXPERTS not in symbols and experts is not None:
        rule = f"has no place in --hybrid-layer-pattern {pattern}, where {EXPERTS} is a layer of experts"
        yield Problem("--num-experts", str(experts), rule, f"Leave it out, or write an {EXPERTS}.")


@dataclass(frozen=True, slots=True)
class RecurrentKind:
    """A recurrent layer kind: the settings that count its heads and groups (or key heads), and its convolution's width."""

    settings: type
    heads: str
    groups: str
    conv_width: Callable[[RawModelConfig], int]
    size_problems: Callable[[RawModelConfig], Iterator[Problem]]


def check_recurrent_layers(config: RawRunConfig) -> Iterator[Problem]:
    for kind in RECURRENT_KINDS:
        if vars(kind.settings)["feature"].unused_reason(config):
            continue
        wrong_sizes = list(kind.size_problems(config.model))
        yield from wrong_sizes
        if not wrong_sizes and not any(number_problems(config, kind.settings)):
            yield from _layout(config, kind)


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


def _delta_sizes(model: RawModelConfig) -> Iterator[Problem]:
    keys, values = model.linear_num_key_heads, model.linear_num_value_heads
    if keys > 0 and values % keys:
        rule = f"is not a multiple of --linear-num-key-heads {keys}"
        yield Problem("--linear-num-value-heads", str(values), rule, f"Nearest: {multiples_near(values, keys)}.")


def _layout(config: RawRunConfig, kind: RecurrentKind) -> Iterator[Problem]:
    """Yields layouts that do not divide recurrent layers evenly.

    Tensor-parallel ranks have equal numbers of heads, and whole groups (or key heads) or equal parts of one. A context-parallel rank
    takes the halo of its convolution from one neighbor only.
    """
    parallel, length, heads, groups = config.parallel, config.model.seq_length, kind.heads, kind.groups
    halo_tokens = kind.conv_width(config.model) - 1
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    num_heads, num_groups = getattr(config.model, heads) or 0, getattr(config.model, groups)
    if tp >= 1 and (num_heads % tp or (num_groups % tp and tp % num_groups)):
        sizes = (size for size in range(1, num_heads + 1) if num_heads % size == 0)
        usable = islice((size for size in sizes if not (num_groups % size and size % num_groups)), 12)
        rule = f"is neither a multiple nor a divisor of {flag_name(groups)} {num_groups}"
        if num_heads % tp:
            rule = f"does not divide {flag_name(heads)} {num_heads}"
        yield Problem("--tensor-model-parallel-size", str(tp), rule, f"Use {', '.join(map(str, usable))}.")
    if cp > 1 and length > 0 and length // cp < halo_tokens:
        rule = f"leaves a rank {length // cp} tokens, fewer than the {halo_tokens} that the convolution of the next one sees"
        fix = f"Use --seq-length {2 * cp * -(-halo_tokens // 2)} or more."
        yield Problem("--context-parallel-size", str(cp), rule, fix)


RECURRENT_KINDS = (
    RecurrentKind(Mamba2Settings, "mamba_num_heads", "mamba_num_groups", lambda _: MAMBA_CONV_WIDTH, _mamba_sizes),
    RecurrentKind(
        DeltaNetSettings,
        "linear_num_value_heads",
        "linear_num_key_heads",
        lambda model: model.linear_conv_kernel_dim,
        _delta_sizes,
    ),
)
