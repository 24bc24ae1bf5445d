"""Rules about variants of layers: what one needs, and what cannot be combined."""

from __future__ import annotations

from collections.abc import Iterator

from petatron.base.errors import Problem
from petatron.config.checks.rule_helpers import above, at_least
from petatron.config.schema.fields import flag_name
from petatron.config.schema.layer_patterns import layer_pattern_problems
from petatron.config.schema.layer_variants import variant_defaults
from petatron.config.schema.longrope_factors import LongRopeFactorError, parse_longrope_factors
from petatron.config.schema.model import GATED_ACTIVATIONS, RawModelConfig

_ROTARY_TYPES = ("rope", "yarn")
_NOT_LATENT = (
    *("qk_layernorm_scope", "rotary_interleaved", "softmax_type", "softmax_scale", "attn_logit_softcapping"),
    *("clip_qkv", "attention_in_multiplier", "key_multiplier", "attention_out_multiplier"),
    *("attention_output_gate", "attention_chunk_size", "attention_temperature_scale", "qk_l2_norm"),
)
_FACTORS = (
    *("embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_in_multiplier", "key_multiplier"),
    *("attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
)
_FACTOR_LISTS = {"ssm_multipliers": ("z", "x", "B", "C", "dt"), "mlp_multipliers": ("the gate", "the output")}
_MAX_ALIBI_POSITIONS = 1 << 16


def check_layer_variants(model: RawModelConfig) -> Iterator[Problem]:
    yield from _patterns(model)
    yield from _rotary(model)
    yield from _norms_and_residuals(model)
    yield from _scores(model)
    yield from _input_factors(model)
    yield from _gates(model)
    yield from _chunks(model)
    if model.position_embedding_type == "alibi":
        yield from _alibi(model)


def _patterns(model: RawModelConfig) -> Iterator[Problem]:
    yield from layer_pattern_problems("window_attn_skip_freq", model)
    yield from layer_pattern_problems("no_rope_freq", model)
    if model.window_attn_skip_freq is not None and model.window_size is None:
        rule = "says which layers have a window, but there is no --window-size"
        yield Problem(
            "--window-attn-skip-freq", model.window_attn_skip_freq, rule, "Give --window-size, or leave it out."
        )
    if model.no_rope_freq is not None and model.multi_latent_attention:
        rule = "cannot be combined with --multi-latent-attention, whose keys have a rotary part in every layer"
        yield Problem("--no-rope-freq", model.no_rope_freq, rule, "Leave one out.")


def _rotary(model: RawModelConfig) -> Iterator[Problem]:
    positions = model.position_embedding_type
    settings = {
        "--no-rope-freq": model.no_rope_freq,
        "--rotary-base-local": model.rotary_base_local,
        "--rotary-seq-len-interpolation-factor": model.rotary_seq_len_interpolation_factor,
        "--rotary-interleaved": model.rotary_interleaved or None,
        "--longrope-short-factor": model.longrope_short_factor,
    }
    for flag, value in settings.items():
        if value is not None and positions not in _ROTARY_TYPES:
            rule = f"is about rotary positions, but --position-embedding-type is {positions}"
            yield Problem(flag, f"{value}", rule, "Use --position-embedding-type rope, or leave it out.")
    if model.rotary_base_local is not None:
        yield from above("rotary_base_local", model.rotary_base_local, 1)
        if model.window_size is None:
            rule = "is for layers with a window, but there is no --window-size"
            yield Problem(
                "--rotary-base-local", f"{model.rotary_base_local:g}", rule, "Give --window-size, or leave it out."
            )
    yield from _longrope(model)
    factor = model.rotary_seq_len_interpolation_factor
    if factor is not None:
        yield from at_least("rotary_seq_len_interpolation_factor", factor, 1)
        if positions == "yarn" or model.use_rope_scaling or model.longrope_short_factor is not None:
            rule = "is one way to scale rotary positions, and another is set"
            yield Problem("--rotary-seq-len-interpolation-factor", f"{factor:g}", rule, "Leave one out.")


def _longrope(model: RawModelConfig) -> Iterator[Problem]:
    lists = {
        "--longrope-short-factor": model.longrope_short_factor,
        "--longrope-long-factor": model.longrope_long_factor,
    }
    yield from above("longrope_attention_factor", model.longrope_attention_factor, 0)
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
        yield Problem("--longrope-short-factor", f"{model.longrope_short_factor:.40}", rule, "Leave one out.")


def _norms_and_residuals(model: RawModelConfig) -> Iterator[Problem]:
    branches, placement = model.residual_branches, model.norm_placement
    if branches != "sequential" and placement != "pre":
        rule = f"needs norms before the branches, but --norm-placement is {placement}"
        yield Problem("--residual-branches", branches, rule, "Use --norm-placement pre.")
    if model.qk_layernorm_scope == "projection" and not model.qk_layernorm:
        rule = "says what --qk-layernorm normalises, which is not set"
        yield Problem("--qk-layernorm-scope", "projection", rule, "Add --qk-layernorm, or leave it out.")
    if model.qk_layernorm_scope == "projection" and model.normalization != "RMSNorm":
        rule = f"is an RMSNorm, but --normalization is {model.normalization}"
        yield Problem("--qk-layernorm-scope", "projection", rule, "Use --normalization RMSNorm.")
    for name in _FACTORS:
        yield from above(name, getattr(model, name), 0)
    for name, parts in _FACTOR_LISTS.items():
        given: tuple[float, ...] = getattr(model, name)
        if len(given) != len(parts) or min(given) <= 0:
            rule = f"is not {len(parts)} positive numbers"
            yield Problem(
                flag_name(name), " ".join(f"{each:g}" for each in given), rule, f"Give one each for {', '.join(parts)}."
            )
    if model.scale_embeddings and model.embedding_multiplier != 1.0:
        rule = "and --scale-embeddings are two factors on embeddings"
        yield Problem("--embedding-multiplier", f"{model.embedding_multiplier:g}", rule, "Leave one out.")


def _scores(model: RawModelConfig) -> Iterator[Problem]:
    for name in ("clip_qkv", "softmax_scale", "attn_logit_softcapping", "final_logit_softcapping"):
        yield from above(name, getattr(model, name), 0)
    plain = variant_defaults()
    for name in _NOT_LATENT if model.multi_latent_attention else ():
        value = getattr(model, name)
        if value != plain[name]:
            rule = "cannot be combined with --multi-latent-attention"
            yield Problem(flag_name(name), f"{value}", rule, "Leave one out.")


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
        "a norm after attention": model.norm_placement != "pre",
    }
    for name, others in (("attention_in_multiplier", on_input), ("key_multiplier", on_heads)):
        found = [other for other, is_set in others.items() if is_set]
        if getattr(model, name) != 1.0 and found:
            rule = f"cannot be combined with {' and '.join(found)}"
            yield Problem(flag_name(name), f"{getattr(model, name):g}", rule, "Leave one out.")


def _gates(model: RawModelConfig) -> Iterator[Problem]:
    yield from above("activation_func_clamp_value", model.activation_func_clamp_value, 0)
    for name in ("activation_func_clamp_value", "glu_linear_offset"):
        value = getattr(model, name)
        if value != variant_defaults()[name] and model.activation not in GATED_ACTIVATIONS:
            rule = f"is about gated activations, but --activation is {model.activation}"
            yield Problem(flag_name(name), f"{value:g}", rule, "Use --quick-geglu or --swiglu, or leave it out.")
    gate, *_ = (*model.mlp_multipliers, 1.0)
    if gate != 1.0 and model.activation not in GATED_ACTIVATIONS:
        rule = f"begins with a factor on gates, but --activation is {model.activation}"
        yield Problem("--mlp-multipliers", f"{gate:g}", rule, "Use --swiglu, or begin with 1.")


def _chunks(model: RawModelConfig) -> Iterator[Problem]:
    """Rules of what layers with rotary positions have, or those without."""
    yield from at_least("attention_chunk_size", model.attention_chunk_size, 1)
    yield from above("attention_temperature_scale", model.attention_temperature_scale, 0)
    yield from at_least("attention_temperature_floor", model.attention_temperature_floor, 1)
    rotary = model.position_embedding_type in _ROTARY_TYPES
    for name in ("attention_chunk_size", "qk_l2_norm"):
        if getattr(model, name) and not rotary:
            rule = (
                f"is for layers with rotary positions, but --position-embedding-type is {model.position_embedding_type}"
            )
            fix = "Use --position-embedding-type rope, or leave it out."
            yield Problem(flag_name(name), f"{getattr(model, name)}", rule, fix)
    scale = model.attention_temperature_scale
    if scale is not None and rotary and model.no_rope_freq is None:
        rule = "is for layers without rotary positions, and all have them"
        yield Problem("--attention-temperature-scale", f"{scale:g}", rule, "Give --no-rope-freq, or leave it out.")
    if model.qk_l2_norm and model.qk_layernorm:
        yield Problem("--qk-l2-norm", "", "and --qk-layernorm are two norms of queries and keys", "Leave one out.")


def _alibi(model: RawModelConfig) -> Iterator[Problem]:
    """Biases of scores are there before what else changes them, and are exact in half precision up to a position."""
    where = "--position-embedding-type"
    longest = model.max_position_embeddings or model.seq_length
    if longest > _MAX_ALIBI_POSITIONS:
        rule = f"has positions below {_MAX_ALIBI_POSITIONS:,}, and --max-position-embeddings is {longest:,}"
        yield Problem(where, "alibi", rule, "Use rope for longer contexts.")
    for flag, given in (
        ("--attn-logit-softcapping", model.attn_logit_softcapping is not None),
        (f"--softmax-type {model.softmax_type}", model.softmax_type != "vanilla"),
    ):
        if given:
            rule = f"cannot be combined with {flag}, whose scores would have the biases"
            yield Problem(where, "alibi", rule, "Leave one out.")
