"""Mistral (a sliding window in every layer), Ministral (in some layers) and Mixtral (experts in every layer, under names of their own).

Mixtral computes a softmax over all experts, chooses the top K of it and divides the chosen weights by their sum. The result is the
softmax over the chosen logits, which is our routing without `moe_router_pre_softmax`.
"""

from __future__ import annotations

from petatron.models.hf.families.llama import like_llama
from petatron.models.hf.family import ModuleMapping
from petatron.models.hf.shared_tables import (
    EXPERTS,
    FUSED_EXPERT_MAPPINGS,
    LLAMA_DEFAULTS,
    LLAMA_FIXED,
    LLAMA_MAPPINGS,
    MOE_FIXED,
    NO_SHARED_EXPERT,
)

_MIXTRAL_MAPPINGS = (
    *LLAMA_MAPPINGS,
    ModuleMapping(("layers.*.mlp.router",), "model.layers.*.block_sparse_moe.gate"),
    ModuleMapping((f"{EXPERTS}.gate",), "model.layers.*.block_sparse_moe.experts.#.w1"),
    ModuleMapping((f"{EXPERTS}.up",), "model.layers.*.block_sparse_moe.experts.#.w3"),
    ModuleMapping((f"{EXPERTS}.down",), "model.layers.*.block_sparse_moe.experts.#.w2"),
)

MISTRAL = like_llama(
    name="mistral",
    architecture="MistralForCausalLM",
    models="Mistral",
    what_differs="a sliding window in every layer",
    defaults={**LLAMA_DEFAULTS, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    fixed={**LLAMA_FIXED, "add_bias_linear": False, "add_qkv_bias": False},
)
MIXTRAL = like_llama(
    name="mixtral",
    architecture="MixtralForCausalLM",
    models="Mixtral",
    what_differs="experts in every layer, weights normalised over the chosen ones",
    mappings=_MIXTRAL_MAPPINGS,
    in_memory_mappings=FUSED_EXPERT_MAPPINGS,
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
    aliases={"num_local_experts": "num_experts"},
    single_values={"router_jitter_noise": 0.0},  # it would add jitter to the experts' input, not only to the router's
    moe_keys={
        "num_experts": "num_local_experts",
        "moe_router_topk": "num_experts_per_tok",
        "moe_ffn_hidden_size": "intermediate_size",
    },
    moe_fixed={**MOE_FIXED, **NO_SHARED_EXPERT, "moe_router_pre_softmax": False},
)
MINISTRAL = like_llama(
    name="ministral",
    architecture="MinistralForCausalLM",
    models="Ministral",
    what_differs="a window in some layers",
    defaults={**MISTRAL.defaults, "layer_types": None},
    fixed=MISTRAL.fixed,
)
