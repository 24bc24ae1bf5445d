"""Values of a preset that a typed flag makes meaningless: the flag wins, and they are as if the preset did not have them.

Only values that mean nothing beside the flag are dropped. A flag that contradicts what a preset is about (positions that latent attention
cannot have, a hybrid pattern beside experts) remains a problem of the validator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from petatron.config.schema.fields import FieldValue, fields_by_name
from petatron.config.schema.model import GATED_ACTIVATIONS
from petatron.config.value_origins import Setting, ValueOrigin

_ROTARY = ("rope", "yarn")


@dataclass(frozen=True, slots=True)
class _OverrideRule:
    """The field of a typed flag, the values of it that the rule is about, and the fields that then mean nothing."""

    typed: str
    applies: Callable[[Any], bool]
    meaningless: tuple[str, ...]


def _is_on(value: Any) -> bool:
    return value is True


def _is_off(value: Any) -> bool:
    return value is False


def _is_unset(value: Any) -> bool:
    return value is None


_RULES = (
    _OverrideRule(
        "multi_latent_attention",
        _is_on,
        (
            "group_query_attention",
            "num_query_groups",
            "kv_channels",
            "add_qkv_bias",
            "attention_output_gate",
            "attention_in_multiplier",
            "attention_out_multiplier",
            "key_multiplier",
            "clip_qkv",
            "softmax_scale",
            "softmax_type",
            "qk_layernorm_scope",
            "qk_l2_norm",
            "rotary_interleaved",
        ),
    ),
    _OverrideRule("group_query_attention", _is_off, ("num_query_groups",)),
    _OverrideRule(
        "activation", lambda name: name not in GATED_ACTIVATIONS, ("activation_func_clamp_value", "glu_linear_offset")
    ),
    _OverrideRule(
        "position_embedding_type",
        lambda kind: kind not in _ROTARY,
        ("use_rope_scaling", "rotary_base_local", "rotary_interleaved", "no_rope_freq", "qk_l2_norm"),
    ),
    _OverrideRule("position_embedding_type", lambda kind: kind == "yarn", ("use_rope_scaling",)),
    _OverrideRule("window_size", _is_unset, ("window_attn_skip_freq", "rotary_base_local")),
    _OverrideRule("experimental_attention_variant", _is_unset, ("linear_attention_freq",)),
    _OverrideRule("is_hybrid_model", _is_off, ("hybrid_layer_pattern",)),
    _OverrideRule("hybrid_layer_pattern", lambda pattern: pattern is not None, ("num_layers",)),
    _OverrideRule("qk_l2_norm", _is_on, ("qk_layernorm", "key_multiplier")),
    _OverrideRule("qk_layernorm", _is_on, ("qk_l2_norm", "key_multiplier")),
    _OverrideRule("scale_embeddings", _is_on, ("embedding_multiplier",)),
    _OverrideRule("residual_branches", lambda kind: kind != "sequential", ("norm_placement",)),
    _OverrideRule(
        "moe_router_load_balancing_type",
        lambda kind: kind == "sinkhorn",
        ("moe_aux_loss_coeff", "moe_router_enable_expert_bias", "moe_router_num_groups", "moe_router_group_topk"),
    ),
    _OverrideRule("moe_router_score_function", lambda name: name == "softmax", ("moe_router_enable_expert_bias",)),
    _OverrideRule("moe_router_num_groups", _is_unset, ("moe_router_group_topk", "moe_router_group_score_topk")),
)


def meaningless_values(
    values: Mapping[str, FieldValue],
    origins: Mapping[str, ValueOrigin],
    typed: Mapping[str, Setting],
    *,
    heads_may_follow: bool,
) -> tuple[list[str], list[str]]:
    """Returns the paths of a preset's values that typed flags make meaningless, and a notice for each of these flags.

    `heads_may_follow`: the number of key/value heads will be chosen for a typed number of heads.
    """
    paths: list[str] = []
    notices: list[str] = []
    for rule in (*_RULES, *([] if heads_may_follow else _indivisible_heads(values, typed))):
        setting = typed.get(fields_by_name()[rule.typed].path)
        if setting is None or not rule.applies(setting.value):
            continue
        infos = [fields_by_name()[name] for name in rule.meaningless]
        dropped = [
            info
            for info in infos
            if origins[info.path].kind == "preset" and info.path not in typed and values[info.path] != info.default
        ]
        if dropped:
            paths += [info.path for info in dropped]
            named = ", ".join(f"{info.flag} {values[info.path]}" for info in dropped)
            preset = origins[dropped[0].path].detail
            notices.append(
                f"{setting.origin.detail} makes values of preset {preset} meaningless, which are left out: {named}"
            )
    return paths, notices


def _indivisible_heads(values: Mapping[str, FieldValue], typed: Mapping[str, Setting]) -> list[_OverrideRule]:
    """A typed number of heads that the preset's key/value heads do not divide."""
    groups = values["model.num_query_groups"]
    if "model.num_query_groups" in typed or not isinstance(groups, int) or groups < 1:
        return []
    shared = ("num_query_groups", "group_query_attention")
    return [_OverrideRule("num_attention_heads", lambda heads: heads > 0 and heads % groups != 0, shared)]
