"""MiniMax-Text-01: lightning attention in most layers, attention in the others, Mixtral's experts in all of them.

The stream of a layer is the output of its norms, times a factor (alpha), and what a branch adds has another (beta). The norm inside of
lightning attention has an epsilon of 1e-6 whatever `rms_norm_eps` says; slopes follow from heads and layers, and are not read.

Folders with the model's own code have other spellings (`layernorm_*`, `attn_type_list`), which are read too. These models rotate
`rotary_dim` channels of each head: so do we, while transformers' MiniMax passes over that key and rotates whole heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petatron.base.errors import Problem
from petatron.base.untrusted_files import is_count
from petatron.config.schema.layer_patterns import format_layers, linear_layers
from petatron.models.hf.families.hybrid.qwen3_next import LINEAR
from petatron.models.hf.families.llama import like_llama
from petatron.models.hf.families.mistral import MIXTRAL
from petatron.models.hf.family import OWN_FOLDER_FIX, Family, ModuleMapping, unsupported_setting
from petatron.models.hf.shared_tables import FUSED_EXPERT_MAPPINGS, LLAMA_FIXED, LLAMA_KEYS, SILU_ALONE
from petatron.models.hf.window_config_json import FULL
from petatron.models.model_spec import ModelSpec

_OURS, _THEIRS = "layers.*.lightning", "model.layers.*.self_attn"
_LIGHTNING = (
    ModuleMapping(("layers.*.lightning_norm",), "model.layers.*.input_layernorm"),
    ModuleMapping((f"{_OURS}.in_q", f"{_OURS}.in_k", f"{_OURS}.in_v"), f"{_THEIRS}.qkv_proj", fused_by_head=True),
    ModuleMapping((f"{_OURS}.in_z",), f"{_THEIRS}.output_gate"),
    ModuleMapping((f"{_OURS}.norm",), f"{_THEIRS}.norm"),
    ModuleMapping((f"{_OURS}.out_proj",), f"{_THEIRS}.out_proj"),
)
_FACTORS = {
    "attention_stream_multiplier": "full_attn_alpha_factor",
    "attention_out_multiplier": "full_attn_beta_factor",
    "lightning_stream_multiplier": "linear_attn_alpha_factor",
    "lightning_out_multiplier": "linear_attn_beta_factor",
    "mlp_stream_multiplier": "mlp_alpha_factor",
}
_MLP_OUTPUT = "mlp_beta_factor"
_PUBLISHED_FACTORS = {
    f"{theirs}_{part}_factor": f"layernorm_{published}_{part}"
    for theirs, published in (("full_attn", "full_attention"), ("linear_attn", "linear_attention"), ("mlp", "mlp"))
    for part in ("alpha", "beta")
}


def _read_layers(hf_config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Which layers are linear, by name or by number (`attn_type_list`, where 0 is linear), or every second one; and what has no table."""
    layers, kinds, numbers = (hf_config.get(key) for key in ("num_hidden_layers", "layer_types", "attn_type_list"))
    if kinds is None:
        kinds = [FULL, LINEAR] * layers if numbers is None else numbers
        kinds = [{0: LINEAR, 1: FULL}.get(kind, kind) for kind in kinds[:layers]] if isinstance(kinds, list) else kinds
    problems: list[Problem] = []
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (FULL, LINEAR) for kind in kinds):
        problems.append(
            Problem("layer_types", "", f"does not name each of the {layers} layers {FULL} or {LINEAR}", OWN_FOLDER_FIX)
        )
        kinds = []
    head_dim = hf_config["head_dim"] or hf_config["hidden_size"] // hf_config["num_attention_heads"]
    rotary_dim = hf_config["rotary_dim"] or head_dim
    if not is_count(rotary_dim, 2) or rotary_dim % 2 or rotary_dim > head_dim:
        rule = f"is not an even number of the {head_dim} channels of a head"
        problems.append(Problem("rotary_dim", f"{rotary_dim!r:.40}", rule, OWN_FOLDER_FIX))
    if hf_config.get("sliding_window") is not None:
        rule = "is a window in the layers of attention, which this family does not have here"
        problems.append(Problem("sliding_window", f"{hf_config['sliding_window']!r:.40}", rule, "Use another model."))
    if hf_config.get("shared_intermediate_size"):
        rule = "is a shared expert with a coefficient of its own, which the decoder does not have"
        problems.append(
            Problem(
                "shared_intermediate_size",
                f"{hf_config['shared_intermediate_size']!r:.40}",
                rule,
                "Use another model.",
            )
        )
    if problems:
        return {}, problems
    return {
        "linear_attention_freq": format_layers([kind == LINEAR for kind in kinds]),
        "rotary_percent": rotary_dim / head_dim,
        "mlp_multipliers": (1.0, float(hf_config[_MLP_OUTPUT])),
    }, []


def _write_layers(spec: ModelSpec) -> dict[str, Any]:
    model = spec.config
    return {
        "layer_types": [LINEAR if linear else FULL for linear in linear_layers(model)],
        "rotary_dim": int(model.kv_channels * model.rotary_percent),
        _MLP_OUTPUT: model.mlp_multipliers[-1],
    }


def _gate_factor(spec: ModelSpec) -> list[Problem]:
    factors = spec.config.mlp_multipliers
    return [] if factors[0] == 1.0 else [unsupported_setting("mlp_multipliers", factors, MINIMAX, "no factor on gates")]


MINIMAX: Family = like_llama(
    name="minimax",
    architecture="MiniMaxForCausalLM",
    other_names=("minimax_text_01", "minimax_m1"),
    models="MiniMax-Text-01, MiniMax-M1 (`minimax_text_01`, `minimax_m1`)",
    what_differs="[lightning attention](lightning.md) and attention in some layers, norms on the stream, factors on residuals, experts",
    mappings=(*MIXTRAL.mappings, *_LIGHTNING),
    in_memory_mappings=(*FUSED_EXPERT_MAPPINGS, *_LIGHTNING),
    ignored_tensors=(
        "*rotary_emb.inv_freq",
        *(f"*.self_attn.{name}" for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay")),
    ),
    keys={**LLAMA_KEYS, **_FACTORS},
    activations=SILU_ALONE,  # of queries, keys and values of lightning attention too
    defaults={
        **{key: value for key, value in MIXTRAL.defaults.items() if key != "sliding_window"},
        **dict.fromkeys((*_FACTORS.values(), _MLP_OUTPUT), 1.0),
        "layer_types": None,
        "rotary_dim": None,
        "postnorm": True,
    },
    fixed={
        **{name: value for name, value in LLAMA_FIXED.items() if name != "rotary_percent"},
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "norm_placement": "stream",
        "experimental_attention_variant": "lightning_attention",
    },
    aliases={**MIXTRAL.aliases, **_PUBLISHED_FACTORS},
    single_values={**MIXTRAL.single_values, "postnorm": True},
    read_more=_read_layers,
    write_more=_write_layers,
    more_settings=("linear_attention_freq", "rotary_percent", "mlp_multipliers"),
    required=("linear_attention_freq",),
    unsupported=_gate_factor,
    moe_keys=MIXTRAL.moe_keys,
    moe_fixed=MIXTRAL.moe_fixed,
)
