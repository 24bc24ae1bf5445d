"""Rules about variants of layers: what one needs, and what cannot be combined."""

from __future__ import annotations

from collections.abc import Iterator

from petatron.base.errors import Problem
from petatron.config.schema.fields import flag_name
from petatron.config.schema.layer_patterns import layer_pattern_problems
from petatron.config.schema.longrope_factors import LongRopeFactorError, parse_longrope_factors
from petatron.config.schema.model import RawModelConfig
from petatron.config.schema.sections.mlp import GATED_ACTIVATIONS
from petatron.config.schema.sections.rope import ROTARY_TYPES
from petatron.kernels.limits import MAX_ALIBI_POSITIONS

_FACTOR_LISTS = {"ssm_multipliers": ("z", "x", "B", "C", "dt"), "mlp_multipliers": ("the gate", "the output")}


def check_layer_variants(model: RawModelConfig) -> Iterator[Problem]:
    yield from _patterns(model)
    yield from _rotary(model)
    yield from _norms_and_residuals(model)
    yield from _input_factors(model)
    yield from _gates(model)
    yield from _temperature(model)
    if model.position_embedding_type == "alibi":
        yield from _alibi(model)


def _patterns(model: RawModelConfig) -> Iterator[Problem]:
    yield from layer_pattern_problems("window_attn_skip_freq", model)
    yield from layer_pattern_problems("no_rope_freq", model)


def _rotary(model: RawModelConfig) -> Iterator[Problem]:
    yield from _longrope(model)
    factor = model.rotary_seq_len_interpolation_factor
    scaled = (
        model.position_embedding_type == "yarn" or model.use_rope_scaling or model.longrope_short_factor is not None
    )
    if factor is not None and scaled:
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
    if model.qk_layernorm_scope == "projection" and model.normalization != "RMSNorm":
        rule = f"is an RMSNorm, but --normalization is {model.normalization}"
        yield Problem("--qk-layernorm-scope", "projection", rule, "Use --normalization RMSNorm.")
    for name, parts in _FACTOR_LISTS.items():
        given: tuple[float, ...] = getattr(model, name)
        if len(given) != len(parts) or min(given) <= 0:
            rule = f"is not {len(parts)} positive numbers"
            yield Problem(
                flag_name(name), " ".join(f"{each:g}" for each in given), rule, f"Give one each for {', '.join(parts)}."
            )


def _input_factors(model: RawModelConfig) -> Iterator[Problem]:
    """Factors on attention's input and keys are applied to scores and output, which is the same if nothing in between says otherwise."""
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
        found = [other for other, is_set in others.items() if is_set]
        if getattr(model, name) != 1.0 and found:
            rule = f"cannot be combined with {' and '.join(found)}"
            yield Problem(flag_name(name), f"{getattr(model, name):g}", rule, "Leave one out.")


def _gates(model: RawModelConfig) -> Iterator[Problem]:
    gate, *_ = (*model.mlp_multipliers, 1.0)
    if gate != 1.0 and model.activation not in GATED_ACTIVATIONS:
        rule = f"begins with a factor on gates, but --activation is {model.activation}"
        yield Problem("--mlp-multipliers", f"{gate:g}", rule, "Use --swiglu, or begin with 1.")


def _temperature(model: RawModelConfig) -> Iterator[Problem]:
    scale, rotary = model.attention_temperature_scale, model.position_embedding_type in ROTARY_TYPES
    if scale is not None and rotary and model.no_rope_freq is None:
        rule = "is for layers without rotary positions, and all have them"
        yield Problem("--attention-temperature-scale", f"{scale:g}", rule, "Give --no-rope-freq, or leave it out.")


def _alibi(model: RawModelConfig) -> Iterator[Problem]:
    """Biases of scores are there before what else changes them, and are exact in half precision up to a position."""
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
