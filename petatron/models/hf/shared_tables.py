"""Tables that families have in common: the names and keys of Llama, and those of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petatron.config.schema.sections.mlp import ActivationName
from petatron.models.hf.family import ModuleMapping

LLAMA_MAPPINGS = (
    ModuleMapping(("embedding",), "model.embed_tokens"),
    ModuleMapping(("layers.*.attention_norm",), "model.layers.*.input_layernorm"),
    ModuleMapping(("layers.*.attention.q",), "model.layers.*.self_attn.q_proj"),
    ModuleMapping(("layers.*.attention.k",), "model.layers.*.self_attn.k_proj"),
    ModuleMapping(("layers.*.attention.v",), "model.layers.*.self_attn.v_proj"),
    ModuleMapping(("layers.*.attention.q_norm",), "model.layers.*.self_attn.q_norm"),
    ModuleMapping(("layers.*.attention.k_norm",), "model.layers.*.self_attn.k_norm"),
    ModuleMapping(("layers.*.attention.out",), "model.layers.*.self_attn.o_proj"),
    ModuleMapping(("layers.*.mlp_norm",), "model.layers.*.post_attention_layernorm"),
    ModuleMapping(("layers.*.mlp.gate",), "model.layers.*.mlp.gate_proj"),
    ModuleMapping(("layers.*.mlp.up",), "model.layers.*.mlp.up_proj"),
    ModuleMapping(("layers.*.mlp.down",), "model.layers.*.mlp.down_proj"),
    ModuleMapping(("norm",), "model.norm"),
    ModuleMapping(("head",), "lm_head"),
)
LLAMA_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "attention_dropout": "attention_dropout",
    "init_method_std": "initializer_range",
}
LLAMA_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
LLAMA_FIXED: Mapping[str, Any] = {
    "apply_layernorm_1p": False,
    "scale_embeddings": False,
    "normalization": "RMSNorm",
    "rotary_percent": 1.0,
    "qk_layernorm": False,
    "hidden_dropout": 0.0,
}
GATED_ACTIVATION_NAMES: Mapping[str, ActivationName] = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "relu": "reglu",
}
SILU_ALONE: Mapping[str, ActivationName] = {"silu": "swiglu", "swish": "swiglu"}
"""Of families whose recurrent layers have the same activation, which is SiLU in ours."""
SLIDING_WINDOW_DEFAULTS = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}

EXPERTS = "layers.*.mlp.experts"
# transformers 5 fuses the experts of a layer when it loads a model: in memory they are one tensor, gate and up fused.
FUSED_EXPERT_MAPPINGS = (
    *LLAMA_MAPPINGS,
    ModuleMapping(("layers.*.mlp.router",), "model.layers.*.mlp.gate"),
    ModuleMapping(
        (f"{EXPERTS}.gate", f"{EXPERTS}.up"), "model.layers.*.mlp.experts.gate_up_proj", no_weight_suffix=True
    ),
    ModuleMapping((f"{EXPERTS}.down",), "model.layers.*.mlp.experts.down_proj", no_weight_suffix=True),
)
SEPARATE_EXPERT_MAPPINGS = (
    *LLAMA_MAPPINGS,
    ModuleMapping(("layers.*.mlp.router",), "model.layers.*.mlp.gate"),
    ModuleMapping((f"{EXPERTS}.gate",), "model.layers.*.mlp.experts.#.gate_proj"),
    ModuleMapping((f"{EXPERTS}.up",), "model.layers.*.mlp.experts.#.up_proj"),
    ModuleMapping((f"{EXPERTS}.down",), "model.layers.*.mlp.experts.#.down_proj"),
)
MOE_FIXED: Mapping[str, Any] = {
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "moe_router_group_topk": None,
    "moe_router_topk_scaling_factor": None,
    "moe_latent_size": None,
}
NO_SHARED_EXPERT: Mapping[str, Any] = {"moe_shared_expert_intermediate_size": None, "moe_shared_expert_gate": False}
