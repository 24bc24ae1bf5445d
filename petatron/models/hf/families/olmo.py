"""OLMo 2 (norms on the output of branches, qk-norm over all heads), OLMo 3 (windows in three of four layers) and OLMoE (experts)."""

from __future__ import annotations

from petatron.models.hf.families.llama import like_llama
from petatron.models.hf.family import ModuleMapping
from petatron.models.hf.shared_tables import (
    FUSED_EXPERT_MAPPINGS,
    LLAMA_DEFAULTS,
    LLAMA_FIXED,
    LLAMA_KEYS,
    LLAMA_MAPPINGS,
    MOE_FIXED,
    NO_SHARED_EXPERT,
    SEPARATE_EXPERT_MAPPINGS,
)

# The names of these norms mean other places than in a Llama.
_INPUT_NORMS = ("layers.*.attention_norm", "layers.*.mlp_norm")
_MAPPINGS = (
    *(mapping for mapping in LLAMA_MAPPINGS if mapping.logical_modules[0] not in _INPUT_NORMS),
    ModuleMapping(("layers.*.attention_post_norm",), "model.layers.*.post_attention_layernorm"),
    ModuleMapping(("layers.*.mlp_post_norm",), "model.layers.*.post_feedforward_layernorm"),
)
_KEYS = {name: key for name, key in LLAMA_KEYS.items() if name != "kv_channels"}
_DEFAULTS = {**LLAMA_DEFAULTS, "rms_norm_eps": 1e-5, "attention_bias": False}
_FIXED = {
    **LLAMA_FIXED,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": True,
    "qk_layernorm_scope": "projection",
}
_SINGLE_VALUES = {"attention_bias": False}

OLMO2 = like_llama(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    models="OLMo 2",
    what_differs="norms after branches only, qk-norm over all heads",
    mappings=_MAPPINGS,
    keys=_KEYS,
    defaults=_DEFAULTS,
    fixed={**_FIXED, "norm_placement": "output"},
    single_values=_SINGLE_VALUES,
)
OLMO3 = like_llama(
    name="olmo3",
    architecture="Olmo3ForCausalLM",
    models="OLMo 3",
    what_differs="OLMo 2 with windows in three of four layers",
    mappings=_MAPPINGS,
    keys=_KEYS,
    defaults={**_DEFAULTS, "rope_theta": 500000.0, "sliding_window": 4096, "layer_types": None},
    fixed=OLMO2.fixed,
    single_values=_SINGLE_VALUES,
    rope_by_layer_type=True,
    full_attention_every=4,
)
OLMOE = like_llama(
    name="olmoe",
    architecture="OlmoeForCausalLM",
    models="OLMoE",
    what_differs="qk-norm over all heads, experts in every layer",
    mappings=SEPARATE_EXPERT_MAPPINGS,
    in_memory_mappings=FUSED_EXPERT_MAPPINGS,
    keys=_KEYS,
    defaults={**_DEFAULTS, "max_position_embeddings": 4096, "norm_topk_prob": False, "clip_qkv": None},
    fixed=_FIXED,
    aliases={"num_experts": "num_local_experts"},
    single_values={**_SINGLE_VALUES, "clip_qkv": None},
    moe_keys={
        "num_experts": "num_experts",
        "moe_router_topk": "num_experts_per_tok",
        "moe_ffn_hidden_size": "intermediate_size",
    },
    moe_fixed={**MOE_FIXED, **NO_SHARED_EXPERT},
)
