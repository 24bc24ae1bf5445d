"""Granite: a Llama with factors on embeddings, residuals, attention scores and logits; dense, and with experts in every layer.

The experts of a layer are two fused tensors, under one name in files and another in memory. Their
weights are the softmax over the chosen logits.
"""

from __future__ import annotations

from petatron.models.hf.families.llama import like_llama
from petatron.models.hf.family import ModuleMapping
from petatron.models.hf.shared_tables import (
    EXPERTS,
    LLAMA_DEFAULTS,
    LLAMA_FIXED,
    LLAMA_KEYS,
    LLAMA_MAPPINGS,
    MOE_FIXED,
    NO_SHARED_EXPERT,
)

_KEYS = {
    **{name: key for name, key in LLAMA_KEYS.items() if name != "kv_channels"},
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "softmax_scale": "attention_multiplier",
    "logits_scaling": "logits_scaling",
}
_MOE = "model.layers.*.block_sparse_moe"
_MULTIPLIERS = {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
}

GRANITE = like_llama(
    name="granite",
    architecture="GraniteForCausalLM",
    models="Granite 3",
    what_differs="factors on embeddings, residuals, scores and logits",
    keys=_KEYS,
    defaults={**LLAMA_DEFAULTS, **_MULTIPLIERS, "attention_bias": False, "mlp_bias": False},
    required=("softmax_scale",),
)
GRANITE_MOE = like_llama(
    name="granitemoe",
    architecture="GraniteMoeForCausalLM",
    models="Granite 3 MoE",
    what_differs="Granite's factors, experts in every layer",
    mappings=(
        *LLAMA_MAPPINGS,
        ModuleMapping(("layers.*.mlp.router",), f"{_MOE}.router.layer"),
        ModuleMapping((f"{EXPERTS}.gate", f"{EXPERTS}.up"), f"{_MOE}.input_linear"),
        ModuleMapping((f"{EXPERTS}.down",), f"{_MOE}.output_linear"),
    ),
    in_memory_mappings=(
        *LLAMA_MAPPINGS,
        ModuleMapping(("layers.*.mlp.router",), f"{_MOE}.router"),
        ModuleMapping((f"{EXPERTS}.gate", f"{EXPERTS}.up"), f"{_MOE}.experts.gate_up_proj", no_weight_suffix=True),
        ModuleMapping((f"{EXPERTS}.down",), f"{_MOE}.experts.down_proj", no_weight_suffix=True),
    ),
    keys=_KEYS,
    defaults={**LLAMA_DEFAULTS, **_MULTIPLIERS, "attention_bias": False},
    fixed={**LLAMA_FIXED, "add_bias_linear": False, "add_qkv_bias": False},
    single_values={"attention_bias": False},
    required=("softmax_scale",),
    moe_keys={
        "num_experts": "num_local_experts",
        "moe_router_topk": "num_experts_per_tok",
        "moe_ffn_hidden_size": "intermediate_size",
    },
    moe_fixed={**MOE_FIXED, **NO_SHARED_EXPERT, "moe_router_pre_softmax": False},
)
