"""Families with experts: Mixtral, Qwen2-MoE (a gated shared expert) and Qwen3-MoE (qk-norm). Attention is Llama's.

Files hold each expert's matrices as separate tensors. transformers 5 fuses them when it loads a model, so that a model in memory
has all experts of a layer in one tensor, gate and up fused, and for Mixtral under another module's name.

All three compute a softmax over all experts and choose the top K of it. Mixtral then divides the chosen weights by their sum,
the Qwens do so if `norm_topk_prob` is set. The result is the softmax over the chosen logits, which is our routing without
`moe_router_pre_softmax`; not dividing is our routing with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from petatron.models.hf.family import Family, ModuleMapping
from petatron.models.hf.llama import (
    LLAMA,
    LLAMA_DEFAULTS,
    LLAMA_FIXED,
    LLAMA_KEYS,
    LLAMA_MAPPINGS,
    SLIDING_WINDOW_DEFAULTS,
)

_EXPERTS = "layers.*.mlp.experts"
_IN_MEMORY_MAPPINGS = (
    *LLAMA_MAPPINGS,
    ModuleMapping(("layers.*.mlp.router",), "model.layers.*.mlp.gate"),
    ModuleMapping(
        (f"{_EXPERTS}.gate", f"{_EXPERTS}.up"), "model.layers.*.mlp.experts.gate_up_proj", no_weight_suffix=True
    ),
    ModuleMapping((f"{_EXPERTS}.down",), "model.layers.*.mlp.experts.down_proj", no_weight_suffix=True),
)
_MIXTRAL_MAPPINGS = (
    *LLAMA_MAPPINGS,
    ModuleMapping(("layers.*.mlp.router",), "model.layers.*.block_sparse_moe.gate"),
    ModuleMapping((f"{_EXPERTS}.gate",), "model.layers.*.block_sparse_moe.experts.#.w1"),
    ModuleMapping((f"{_EXPERTS}.up",), "model.layers.*.block_sparse_moe.experts.#.w3"),
    ModuleMapping((f"{_EXPERTS}.down",), "model.layers.*.block_sparse_moe.experts.#.w2"),
)
_QWEN_MAPPINGS = (
    *LLAMA_MAPPINGS,
    ModuleMapping(("layers.*.mlp.router",), "model.layers.*.mlp.gate"),
    ModuleMapping((f"{_EXPERTS}.gate",), "model.layers.*.mlp.experts.#.gate_proj"),
    ModuleMapping((f"{_EXPERTS}.up",), "model.layers.*.mlp.experts.#.up_proj"),
    ModuleMapping((f"{_EXPERTS}.down",), "model.layers.*.mlp.experts.#.down_proj"),
)
_SHARED_EXPERT_MAPPINGS = (
    ModuleMapping(("layers.*.mlp.shared.gate",), "model.layers.*.mlp.shared_expert.gate_proj"),
    ModuleMapping(("layers.*.mlp.shared.up",), "model.layers.*.mlp.shared_expert.up_proj"),
    ModuleMapping(("layers.*.mlp.shared.down",), "model.layers.*.mlp.shared_expert.down_proj"),
    ModuleMapping(("layers.*.mlp.shared_gate",), "model.layers.*.mlp.shared_expert_gate"),
)

_MOE_FIXED: Mapping[str, Any] = {
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "moe_router_group_topk": None,
    "moe_router_topk_scaling_factor": None,
    "moe_latent_size": None,
}
_NO_SHARED_EXPERT: Mapping[str, Any] = {"moe_shared_expert_intermediate_size": None, "moe_shared_expert_gate": False}
_QWEN_KEYS = {
    "num_experts": "num_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size",
}
_QWEN_DEFAULTS = {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": None}

MIXTRAL: Family = replace(
    LLAMA,
    name="mixtral",
    architecture="MixtralForCausalLM",
    mappings=_MIXTRAL_MAPPINGS,
    in_memory_mappings=_IN_MEMORY_MAPPINGS,
    defaults={
        **LLAMA_DEFAULTS,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "router_jitter_noise": 0.0,
    },
    fixed={**LLAMA_FIXED, "add_bias_linear": False, "add_qkv_bias": False},
    single_values={"router_jitter_noise": 0.0},  # it would add jitter to the experts' input, not only to the router's
    moe_keys={
        "num_experts": "num_local_experts",
        "moe_router_topk": "num_experts_per_tok",
        "moe_ffn_hidden_size": "intermediate_size",
    },
    moe_fixed={**_MOE_FIXED, **_NO_SHARED_EXPERT, "moe_router_pre_softmax": False},
)
QWEN2_MOE: Family = replace(
    MIXTRAL,
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    mappings=(*_QWEN_MAPPINGS, *_SHARED_EXPERT_MAPPINGS),
    in_memory_mappings=(*_IN_MEMORY_MAPPINGS, *_SHARED_EXPERT_MAPPINGS),
    keys={**LLAMA_KEYS, "add_qkv_bias": "qkv_bias"},
    defaults={
        **LLAMA_DEFAULTS,
        **_QWEN_DEFAULTS,
        **{
            key: value for key, value in SLIDING_WINDOW_DEFAULTS.items() if key != "max_window_layers"
        },  # it means another thing here
        "num_key_value_heads": 16,
        "max_position_embeddings": 32768,
        "qkv_bias": True,
    },
    fixed={**LLAMA_FIXED, "add_bias_linear": False},
    single_values={},
    moe_keys={**_QWEN_KEYS, "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size"},
    moe_fixed={**_MOE_FIXED, "moe_shared_expert_gate": True},
)
QWEN3_MOE: Family = replace(
    MIXTRAL,
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    mappings=_QWEN_MAPPINGS,
    defaults={
        **LLAMA_DEFAULTS,
        **_QWEN_DEFAULTS,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "attention_bias": False,
    },
    fixed={**LLAMA_FIXED, "add_bias_linear": False, "add_qkv_bias": False, "qk_layernorm": True},
    single_values={"attention_bias": False},
    aliases={"num_experts": "num_local_experts"},
    moe_keys=_QWEN_KEYS,
    moe_fixed={**_MOE_FIXED, **_NO_SHARED_EXPERT},
)
