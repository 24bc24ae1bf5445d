"""Nemotron-H and Nemotron 3: layers of one branch each, in any order: Mamba-2, attention without positions, MLPs of squared ReLU, experts.

Here the names are ours: `hybrid_override_pattern` is Megatron's pattern, and `layers_block_type` the same as a list. The gated norm is over
as many groups as B and C have. Experts are routed as DeepSeek-V3's, may work in a latent space, and are not gated; one more is shared.

transformers bounds step sizes below by `time_step_min`, for whole sequences and not for single tokens. The model's own code, Megatron's,
does not, and neither do we; a folder that is written has a bound that is never met. Nor can it run a model without attention, so none is
written as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from petatron.base.errors import Problem
from petatron.models.hf.check_claimed_counts import MAX_LAYERS
from petatron.models.hf.families.deepseek import V3_MOE_KEYS, V3_ROUTER_FIXED
from petatron.models.hf.families.hybrid.mamba_tables import (
    HYBRID_FIXED,
    LAYER_KEYS,
    LAYER_TYPES,
    attention_mappings,
    has_mamba,
    mixer_mappings,
    read_layer_kinds,
    time_step_problems,
)
from petatron.models.hf.family import OWN_FOLDER_FIX, Family, HybridLayers, ModuleMapping, unsupported_setting
from petatron.models.hf.shared_tables import EXPERTS, LLAMA_KEYS
from petatron.models.model_spec import ModelSpec

_NO_BOUND = 1e-30
_LAYER = "backbone.layers.*"
_MIXER = f"{_LAYER}.mixer"
_EXPERTS_IN_FILES = (
    ModuleMapping((f"{EXPERTS}.up",), f"{_MIXER}.experts.#.up_proj"),
    ModuleMapping((f"{EXPERTS}.down",), f"{_MIXER}.experts.#.down_proj"),
)
_EXPERTS_IN_MEMORY = (
    ModuleMapping((f"{EXPERTS}.up",), f"{_MIXER}.experts.up_proj", no_weight_suffix=True),
    ModuleMapping((f"{EXPERTS}.down",), f"{_MIXER}.experts.down_proj", no_weight_suffix=True),
)
_MAPPINGS = (
    ModuleMapping(("embedding",), "backbone.embeddings"),
    ModuleMapping(("layers.*.mamba_norm",), f"{_LAYER}.norm"),
    ModuleMapping(("layers.*.attention_norm",), f"{_LAYER}.norm"),
    ModuleMapping(("layers.*.mlp_norm",), f"{_LAYER}.norm"),
    *mixer_mappings(_MIXER),
    *attention_mappings(_MIXER),
    ModuleMapping(("layers.*.mlp.up",), f"{_MIXER}.up_proj"),
    ModuleMapping(("layers.*.mlp.down",), f"{_MIXER}.down_proj"),
    ModuleMapping(("layers.*.mlp.router",), f"{_MIXER}.gate"),
    ModuleMapping(
        ("layers.*.mlp.router",), f"{_MIXER}.gate.e_score_correction_bias", no_weight_suffix=True, leaf="expert_bias"
    ),
    ModuleMapping(("layers.*.mlp.latent_down",), f"{_MIXER}.fc1_latent_proj"),
    ModuleMapping(("layers.*.mlp.latent_up",), f"{_MIXER}.fc2_latent_proj"),
    ModuleMapping(("layers.*.mlp.shared.up",), f"{_MIXER}.shared_experts.up_proj"),
    ModuleMapping(("layers.*.mlp.shared.down",), f"{_MIXER}.shared_experts.down_proj"),
    ModuleMapping(("norm",), "backbone.norm_f"),
    ModuleMapping(("head",), "lm_head"),
)


_LETTERS = "".join(LAYER_TYPES)


def _read_layers(hf_config: Mapping[str, Any]) -> str | Problem:
    pattern = hf_config.get("hybrid_override_pattern")
    if pattern is None or any(hf_config.get(key) is not None for key in LAYER_KEYS):
        return read_layer_kinds(hf_config, "layers_block_type", _LETTERS)
    if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_LAYERS or set(pattern) - set(_LETTERS):
        return Problem(
            "hybrid_override_pattern", f"{pattern!r:.40}", f"is no pattern of the letters {_LETTERS}", OWN_FOLDER_FIX
        )
    return pattern


def _write_layers(pattern: str) -> Mapping[str, Any]:
    kinds = [LAYER_TYPES[letter] for letter in pattern]
    return {"layers_block_type": kinds, "hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}


def _read_more(hf_config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    return {"mamba_norm_groups": hf_config["n_groups"]}, time_step_problems(hf_config)


def _unsupported(spec: ModelSpec) -> list[Problem]:
    model = spec.config
    if model.mamba_norm_groups == model.mamba_num_groups or not has_mamba(spec):
        return []
    allowed = "a gated norm over as many groups as B and C have"
    return [unsupported_setting("mamba_norm_groups", model.mamba_norm_groups, NEMOTRON_H, allowed)]


def _write_more(spec: ModelSpec) -> Mapping[str, Any]:
    return {"time_step_min": _NO_BOUND, "num_nextn_predict_layers": 0}


def _in_memory(mapping: ModuleMapping) -> ModuleMapping:
    return replace(mapping, hf_module=mapping.hf_module.replace("backbone.", "model."))


NEMOTRON_H = Family(
    name="nemotron_h",
    architecture="NemotronHForCausalLM",
    models="Nemotron-H, Nemotron 3 (2025)",
    what_differs="a [hybrid](mamba.md) with one branch a layer; attention without positions, squared ReLU, experts",
    prefix="backbone.",
    mappings=(*_MAPPINGS, *_EXPERTS_IN_FILES),
    in_memory_mappings=tuple(map(_in_memory, (*_MAPPINGS, *_EXPERTS_IN_MEMORY))),
    ignored_tensors=("mtp.*",),
    keys={
        **{ours: key for ours, key in LLAMA_KEYS.items() if ours != "num_layers"},
        "norm_epsilon": "layer_norm_epsilon",
        "mamba_num_heads": "mamba_num_heads",
        "mamba_head_dim": "mamba_head_dim",
        "mamba_num_groups": "n_groups",
        "mamba_state_dim": "ssm_state_size",
        "mamba_chunk_size": "chunk_size",
    },
    activation_key="mlp_hidden_act",
    activations={"relu2": "squared_relu", "relu": "relu", "gelu": "gelu", "silu": "silu"},
    defaults={
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "intermediate_size": 21504,
        "attention_dropout": 0.0,
        "attention_bias": False,
        "mlp_bias": False,
        "use_bias": False,
        "use_conv_bias": True,
        "mamba_proj_bias": False,
        "mamba_hidden_act": "silu",
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "chunk_size": 128,
        "conv_kernel": 4,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "moe_latent_size": None,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    },
    fixed={**HYBRID_FIXED, "position_embedding_type": "none", "untie_embeddings_and_output_weights": True},
    single_values={
        "conv_kernel": 4,
        "attention_bias": False,
        "mlp_bias": False,
        "use_bias": False,
        "use_conv_bias": True,
        "mamba_proj_bias": False,
        "mamba_hidden_act": "silu",
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    aliases={
        "n_routed_experts": "num_local_experts",
        "n_groups": "mamba_n_groups",
        "conv_kernel": "mamba_d_conv",
        "chunk_size": "mamba_chunk_size",
        "use_conv_bias": "mamba_conv_bias",
        "time_step_limit": "mamba_dt_limit",
    },
    has_rope=False,
    moe_keys={**V3_MOE_KEYS, "moe_shared_expert_intermediate_size": "moe_shared_expert_intermediate_size"},
    moe_fixed=V3_ROUTER_FIXED,
    group_score_topk=2,
    read_more=_read_more,
    write_more=_write_more,
    unsupported=_unsupported,
    more_settings=("mamba_norm_groups",),
    hybrid=HybridLayers(
        1, r"[ME-]*\*[M*E-]*", _read_layers, _write_layers, {"hybrid_override_pattern": "M*", "layers_block_type": None}
    ),
)
