"""Kimi-Linear: Kimi delta attention in most layers, latent attention without positions in the others, DeepSeek-V3's experts.

Latents are normalised with an epsilon of 1e-6 whatever `rms_norm_eps` says. A published config.json has the sizes of linear attention, and
which layers have it counted from 1, in a table (`linear_attn_config`); transformers writes `linear_*` and `layer_types`. Both are read, and
both are written, since each is what some program reads.

The files have the convolutions of queries, keys and values apart, experts one by one under `block_sparse_moe`, and the MLP of a dense layer
under `mlp`; transformers writes that one under `block_sparse_moe` too, which is read as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petatron.base.errors import Problem
from petatron.base.untrusted_files import is_count
from petatron.config.schema.layer_patterns import format_layers, linear_layers
from petatron.models.hf.check_claimed_counts import MAX_HEADS
from petatron.models.hf.families.deepseek import (
    EXPERT_BIAS_MAPPING,
    FUSED_EXPERTS,
    LATENT_KEYS,
    LATENT_MAPPINGS,
    SHARED_EXPERTS,
    V3_MOE_FIXED,
)
from petatron.models.hf.families.hybrid.qwen3_next import LINEAR
from petatron.models.hf.families.llama import like_llama
from petatron.models.hf.family import OWN_FOLDER_FIX, Family, ModuleMapping, unsupported_setting
from petatron.models.hf.shared_tables import EXPERTS, LLAMA_DEFAULTS, LLAMA_FIXED, SILU_ALONE
from petatron.models.hf.window_config_json import FULL
from petatron.models.model_spec import ModelSpec

_TABLE = "linear_attn_config"
_NET, _HF_NET = "layers.*.delta", "model.layers.*.self_attn"
_MOE = "block_sparse_moe"
_SIZES = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_OURS = {
    "linear_head_dim": ("linear_key_head_dim", "linear_value_head_dim"),
    "linear_num_heads": ("linear_num_key_heads", "linear_num_value_heads"),
    "linear_conv_kernel_dim": ("linear_conv_kernel_dim",),
}
_NET_MAPPINGS = (
    ModuleMapping(("layers.*.delta_norm",), "model.layers.*.input_layernorm"),
    *(ModuleMapping((f"{_NET}.in_{name}",), f"{_HF_NET}.{name}_proj") for name in ("q", "k", "v", "b")),
    ModuleMapping((f"{_NET}.gate_down",), f"{_HF_NET}.g_a_proj"),
    ModuleMapping((f"{_NET}.gate_up",), f"{_HF_NET}.g_b_proj"),
    ModuleMapping((f"{_NET}.norm",), f"{_HF_NET}.o_norm"),
    ModuleMapping((f"{_NET}.out_proj",), f"{_HF_NET}.o_proj"),
)


def _decay_mappings(module: str) -> tuple[ModuleMapping, ...]:
    """Returns the mappings of decays, which are in a module of their own in memory."""
    return (
        ModuleMapping((f"{_NET}.decay_down",), f"{module}.f_a_proj"),
        ModuleMapping((f"{_NET}.decay_up",), f"{module}.f_b_proj"),
        ModuleMapping((_NET,), f"{module}.A_log", no_weight_suffix=True, leaf="A_log"),
        ModuleMapping((_NET,), f"{module}.dt_bias", no_weight_suffix=True, leaf="dt_bias"),
    )


def _in_files(mapping: ModuleMapping) -> ModuleMapping:
    """Returns the mapping of a part of an MoE layer as files name it."""
    return ModuleMapping(
        mapping.logical_modules,
        mapping.hf_module.replace(".mlp.", f".{_MOE}."),
        no_weight_suffix=mapping.no_weight_suffix,
        leaf=mapping.leaf,
    )


_FILES = (
    *LATENT_MAPPINGS,
    *_NET_MAPPINGS,
    *_decay_mappings(_HF_NET),
    *(ModuleMapping((f"{_NET}.conv_{name}",), f"{_HF_NET}.{name}_conv1d") for name in ("q", "k", "v")),
    *(_in_files(mapping) for mapping in (*SHARED_EXPERTS, EXPERT_BIAS_MAPPING)),
    ModuleMapping((f"{EXPERTS}.gate",), f"model.layers.*.{_MOE}.experts.#.w1"),
    ModuleMapping((f"{EXPERTS}.up",), f"model.layers.*.{_MOE}.experts.#.w3"),
    ModuleMapping((f"{EXPERTS}.down",), f"model.layers.*.{_MOE}.experts.#.w2"),
)
_MEMORY = (
    *LATENT_MAPPINGS,
    *_NET_MAPPINGS,
    *_decay_mappings(f"{_HF_NET}.forget_gate"),
    ModuleMapping((f"{_NET}.conv_q", f"{_NET}.conv_k", f"{_NET}.conv_v"), f"{_HF_NET}.conv1d"),
    *SHARED_EXPERTS,
    EXPERT_BIAS_MAPPING,
    *FUSED_EXPERTS,
)


def _read_linear_attention(hf_config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Sizes and layers of linear attention: of the table, where there is one; `layer_types` names layers before it does."""
    table = hf_config[_TABLE]
    if not isinstance(table, Mapping | None):
        return {}, [Problem(_TABLE, f"{table!r:.40}", "is not a table of settings", OWN_FOLDER_FIX)]
    table = table or {}
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, key in _SIZES.items():
        size = table.get(name, hf_config[key])
        if not is_count(size, 1) or size > MAX_HEADS:
            rule = "is not a positive whole number that a model may have"
            problems.append(Problem(f"{_TABLE}.{name}", f"{size!r:.40}", rule, OWN_FOLDER_FIX))
        values |= dict.fromkeys(_OURS[key], size)
    linear = _read_layers(hf_config, table)
    if isinstance(linear, Problem):
        return {}, [*problems, linear]
    return ({}, problems) if problems else (values | {"linear_attention_freq": format_layers(linear)}, [])


def _read_layers(hf_config: Mapping[str, Any], table: Mapping[str, Any]) -> list[bool] | Problem:
    """Returns for each layer whether it has linear attention."""
    layers, kinds = hf_config["num_hidden_layers"], hf_config["layer_types"]
    if kinds is not None:
        if isinstance(kinds, list) and len(kinds) == layers and not {str(kind) for kind in kinds} - {FULL, LINEAR}:
            return [kind == LINEAR for kind in kinds]
        return Problem(
            "layer_types", "", f"does not name each of the {layers} layers {FULL} or {LINEAR}", OWN_FOLDER_FIX
        )
    full, linear = table.get("full_attn_layers"), table.get("kda_layers")
    if full is None or linear is None:
        return [layer == 0 or layer % 4 != 0 for layer in range(layers)]
    named = [*full, *linear] if isinstance(full, list) and isinstance(linear, list) else []
    if len(named) != layers or any(layer not in named for layer in range(1, layers + 1)):
        rule = f"and kda_layers do not have each of the {layers} layers, which are counted from 1, once"
        return Problem(f"{_TABLE}.full_attn_layers", f"{full!r:.40}", rule, OWN_FOLDER_FIX)
    return [layer + 1 in linear for layer in range(layers)]


def _write_linear_attention(spec: ModelSpec) -> dict[str, Any]:
    model, linear = spec.config, linear_layers(spec.config)
    sizes = {key: getattr(model, ours[0]) for key, ours in _OURS.items()}
    table = {name: sizes[key] for name, key in _SIZES.items()}
    table["full_attn_layers"] = [layer + 1 for layer, chosen in enumerate(linear) if not chosen]
    table["kda_layers"] = [layer + 1 for layer, chosen in enumerate(linear) if chosen]
    return {**sizes, "layer_types": [LINEAR if chosen else FULL for chosen in linear], _TABLE: table}


def _unequal_heads(spec: ModelSpec) -> list[Problem]:
    """Keys and values have the same heads in every model of the family."""
    model = spec.config
    pairs = (names for names in _OURS.values() if len(names) == 2)
    return [
        unsupported_setting(keys, getattr(model, keys), KIMI_LINEAR, f"the value of {values} there")
        for keys, values in pairs
        if getattr(model, keys) != getattr(model, values)
    ]


KIMI_LINEAR: Family = like_llama(
    name="kimi_linear",
    architecture="KimiLinearForCausalLM",
    models="Kimi-Linear",
    what_differs="[delta nets with a decay of every channel](delta.md), [latent attention](mla.md) without positions, "
    "experts as in DeepSeek-V3",
    mappings=_FILES,
    in_memory_mappings=_MEMORY,
    tensor_aliases={f".{_MOE}.{name}_proj.": f".mlp.{name}_proj." for name in ("gate", "up", "down")},
    keys={
        **{ours: key for ours, key in LATENT_KEYS.items() if ours != "max_position_embeddings"},
        "max_position_embeddings": "model_max_length",
        "norm_epsilon": "rms_norm_eps",
    },
    activations=SILU_ALONE,  # of the convolution too
    defaults={
        **{key: value for key, value in LLAMA_DEFAULTS.items() if key not in ("head_dim", "max_position_embeddings")},
        "model_max_length": 1048576,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        _TABLE: None,
        "layer_types": None,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
        "mla_use_nope": True,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 1024,
        "mlp_layer_types": None,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.446,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
    },
    fixed={
        **{name: value for name, value in LLAMA_FIXED.items() if name != "rotary_percent"},
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": True,
        "multi_latent_attention": True,
        "latent_norm_epsilon": 1e-6,
        "position_embedding_type": "none",
        "experimental_attention_variant": "kimi_delta_attention",
    },
    aliases={
        "model_max_length": "max_position_embeddings",
        "num_experts": "num_local_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
        "num_expert_group": "n_group",
        "moe_renormalize": "norm_topk_prob",
    },
    single_values={
        "attention_bias": False,
        "mla_use_nope": True,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
    },
    has_rope=False,
    read_more=_read_linear_attention,
    write_more=_write_linear_attention,
    more_settings=("linear_attention_freq", *(name for names in _OURS.values() for name in names)),
    required=("linear_attention_freq",),
    unsupported=_unequal_heads,
    moe_keys={
        "num_experts": "num_experts",
        "moe_router_topk": "num_experts_per_token",
        "moe_ffn_hidden_size": "moe_intermediate_size",
    },
    moe_fixed=V3_MOE_FIXED,
    group_score_topk=2,
    routing_keys={"n_shared_experts": "num_shared_experts", "n_group": "num_expert_group"},
)
