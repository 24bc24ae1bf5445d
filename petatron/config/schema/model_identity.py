"""Which settings of a model define the function of its weights, and which are a run's choice.

A checkpoint, a config.json and a resumed run must agree on the first; the others may differ. Of the first, a model does not use all:
where every layer has experts there is no MLP, and without rotary positions no rotary base. Settings are compared by what is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from petatron.base.untrusted_files import is_count
from petatron.config.schema.hybrid_pattern import ATTENTION, DELTA, MAMBA, MLP, branch_letters
from petatron.config.schema.layer_variants import variant_defaults
from petatron.config.schema.model import ModelConfig, MoEConfig
from petatron.config.schema.moe_layer_freq import MAX_PATTERN_LAYERS, MoELayerFreqError, parse_moe_layer_freq

# How a run shards or computes the model.
RUNTIME_FIELDS = frozenset(
    {
        "seq_length",
        "mamba_chunk_size",
        "linear_chunk_size",
        "make_vocab_size_divisible_by",
        "moe_grouped_gemm",
        "moe_token_dispatcher_type",
        "moe_pad_expert_input_to_capacity",
        "moe_router_force_load_balancing",
        "moe_shared_expert_overlap",
    }
)
# What matters only in training, or limits positions.
TRAINING_ONLY_FIELDS = frozenset(
    {
        "max_position_embeddings",
        "hidden_dropout",
        "attention_dropout",
        "init_method_std",
        "embedding_init_method_std",
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff",
        "moe_z_loss_coeff",
        "moe_router_bias_update_rate",
        "moe_input_jitter_eps",
    }
)
# Redundant with other settings.
REDUNDANT_FIELDS = frozenset({"group_query_attention", "is_hybrid_model", "hybrid_attention_ratio", "hybrid_mlp_ratio"})
_ROTARY_FIELDS = frozenset({"rotary_base", "rotary_percent", "use_rope_scaling"})
_LLAMA3_FIELDS = frozenset({"rope_low_freq_factor", "rope_high_freq_factor"})
_YARN_FIELDS = frozenset(
    {
        "yarn_beta_fast",
        "yarn_beta_slow",
        "yarn_mscale",
        "yarn_mscale_all_dim",
        "yarn_correction_range_round_to_int",
    }
)
# What models had before there was a setting for it.
_EARLIER_VALUES: Mapping[str, Any] = {
    "yarn_correction_range_round_to_int": True,
    "moe_router_linear_bias": False,
    "moe_apply_probs_on_input": False,
}
_LATENT_FIELDS = frozenset(
    {"multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"}
)
_ATTENTION_FIELDS = frozenset(
    {"num_attention_heads", "num_query_groups", "kv_channels", "window_size", "qk_layernorm", "add_qkv_bias"}
)
_LATENT_SIZES = _LATENT_FIELDS - {"multi_latent_attention"}
_MAMBA_FIELDS = frozenset(
    {"mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads", "mamba_norm_groups"}
)
_DELTA_FIELDS = frozenset(
    {
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
    }
)
_HYBRID_FIELDS = _MAMBA_FIELDS | {
    "is_hybrid_model",
    "hybrid_layer_pattern",
    "hybrid_attention_ratio",
    "hybrid_mlp_ratio",
}
_PREDICTION_FIELDS = frozenset({"mtp_num_layers", "mtp_loss_scaling_factor"})
_SCALING_FIELDS = frozenset({"rope_scaling_factor", "original_max_position_embeddings"})


def is_identity_field(name: str) -> bool:
    """Whether models that differ in this setting are different models.

    >>> is_identity_field("rotary_base"), is_identity_field("hidden_dropout")
    (True, False)
    """
    return name not in RUNTIME_FIELDS and name not in TRAINING_ONLY_FIELDS


def model_identity(model: ModelConfig, moe: MoEConfig | None) -> dict[str, Any]:
    """Returns the settings that define the function of a model's weights, as stored in a checkpoint.

    A dense model has no expert settings, a decoder no type, and a model without latent attention, multi-token prediction, layers of a
    pattern or a variant of its layers none of theirs, so that checkpoints from before there were others still match.
    """
    experts = asdict(moe) if moe is not None and moe.num_experts is not None else {}
    identity = {name: value for name, value in (asdict(model) | experts).items() if is_identity_field(name)}
    if identity["model_type"] == "decoder":
        del identity["model_type"]
    lacking = frozenset() if model.multi_latent_attention else _LATENT_FIELDS
    lacking |= _HYBRID_FIELDS if model.hybrid_layer_pattern is None else frozenset()
    lacking |= frozenset() if model.mtp_num_layers else _PREDICTION_FIELDS
    earlier = {**variant_defaults(), **_EARLIER_VALUES}
    lacking |= {name for name, default in earlier.items() if identity.get(name) == default}
    return {name: value for name, value in identity.items() if name not in lacking}


def identity_differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Returns the settings by which two models differ, by name, of those that both say and that the second one uses.

    `ours` are the settings of a model or more than these, by field name; JSON's lists count as tuples.

    >>> mixtral = dict(num_layers=2, num_experts=4, moe_layer_freq="1", ffn_hidden_size=48, moe_ffn_hidden_size=48)
    >>> identity_differences(mixtral, mixtral | dict(ffn_hidden_size=128, moe_layer_freq="[1, 1]", num_layers=3))
    ['num_layers']
    """
    ignored = REDUNDANT_FIELDS | _unused_fields(ours)
    absent = {"multi_latent_attention": False, "hybrid_layer_pattern": None, **_EARLIER_VALUES, **variant_defaults()}
    theirs, ours = ({**absent, **settings} for settings in (theirs, ours))
    return [
        name
        for name in sorted(theirs.keys() & ours.keys())
        if is_identity_field(name) and name not in ignored and not _same_value(name, theirs, ours)
    ]


def _same_value(name: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
    if name == "moe_layer_freq":
        return _moe_pattern(theirs) == _moe_pattern(ours)
    if name in ("window_attn_skip_freq", "linear_attention_freq", "no_rope_freq"):
        return _layer_pattern(name, theirs) == _layer_pattern(name, ours)
    first, second = (tuple(v) if isinstance(v, list) else v for v in (theirs[name], ours[name]))
    return first == second


def _unused_fields(settings: Mapping[str, Any]) -> frozenset[str]:
    """Returns the settings that a decoder with these ones does not use; what another kind of model uses is its own affair."""
    unused: frozenset[str] = frozenset()
    if settings.get("model_type", "decoder") != "decoder":
        return unused
    unused |= {"rotary_percent", "kv_channels"} if settings.get("multi_latent_attention") else _LATENT_SIZES
    pattern = settings.get("hybrid_layer_pattern")
    branches = branch_letters(pattern) if isinstance(pattern, str) else ""
    if MAMBA not in branches:
        unused |= _MAMBA_FIELDS
    delta = DELTA in pattern if isinstance(pattern, str) else settings.get("experimental_attention_variant") is not None
    unused |= frozenset() if delta else _DELTA_FIELDS
    if isinstance(pattern, str):
        unused |= {"moe_layer_freq"} | (frozenset() if MLP in pattern else {"ffn_hidden_size"})
    if isinstance(pattern, str) and ATTENTION not in branches:
        unused |= _ATTENTION_FIELDS
    positions = settings.get("position_embedding_type")
    if positions not in (None, "rope", "yarn"):
        unused |= _ROTARY_FIELDS
    if positions not in (None, "yarn"):
        unused |= _YARN_FIELDS
    if positions != "yarn" and not settings.get("use_rope_scaling"):
        unused |= _LLAMA3_FIELDS | (frozenset() if settings.get("longrope_short_factor") else _SCALING_FIELDS)
    if not isinstance(pattern, str) and settings.get("num_experts") is not None and all(_moe_pattern(settings)):
        unused |= {"ffn_hidden_size"}
    return unused


def _layer_pattern(name: str, settings: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns for each layer whether the pattern marks it; a pattern that means nothing stands for itself."""
    text, layers = settings[name], settings.get("num_layers", 0)
    if text is None:  # no layer, or every layer that there is: the same of any number of them
        return ()
    if not is_count(layers, 1) or layers > MAX_PATTERN_LAYERS:
        return ("", text, layers)
    try:
        pattern = parse_moe_layer_freq(str(text))
    except MoELayerFreqError:
        return ("", text)
    if isinstance(pattern, int):
        marks_others = name != "no_rope_freq"
        return tuple(((layer + 1) % max(pattern, 1) == 0) != marks_others for layer in range(layers))
    return tuple(bool(bit) for bit in pattern)


def _moe_pattern(settings: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns for each layer whether it has experts; a pattern that means nothing stands for itself."""
    text, layers = settings.get("moe_layer_freq") or "1", settings.get("num_layers", 0)
    try:
        pattern = parse_moe_layer_freq(str(text))
    except MoELayerFreqError:
        return ("", text)
    if isinstance(pattern, int):
        known = is_count(layers, 1) and layers <= MAX_PATTERN_LAYERS and pattern > 0
        return tuple(layer % pattern == 0 for layer in range(layers)) if known else ("", text, layers)
    return tuple(bool(bit) for bit in pattern)
