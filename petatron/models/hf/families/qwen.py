"""Qwen2 (biases on q, k, v), Qwen3 (qk-norm) and their forms with experts; Qwen2-MoE has a gated shared expert.

The experts' weights are those of a softmax over all experts, divided by the sum of the chosen ones if `norm_topk_prob` is set: our
routing without `moe_router_pre_softmax`. Not dividing is our routing with it.
"""

from __future__ import annotations

from petatron.models.hf.families.llama import like_llama
from petatron.models.hf.family import ModuleMapping
from petatron.models.hf.shared_tables import (
    FUSED_EXPERT_MAPPINGS,
    LLAMA_DEFAULTS,
    LLAMA_FIXED,
    LLAMA_KEYS,
    MOE_FIXED,
    NO_SHARED_EXPERT,
    SEPARATE_EXPERT_MAPPINGS,
    SLIDING_WINDOW_DEFAULTS,
)

_SHARED_EXPERT_MAPPINGS = (
    ModuleMapping(("layers.*.mlp.shared.gate",), "model.layers.*.mlp.shared_expert.gate_proj"),
    ModuleMapping(("layers.*.mlp.shared.up",), "model.layers.*.mlp.shared_expert.up_proj"),
    ModuleMapping(("layers.*.mlp.shared.down",), "model.layers.*.mlp.shared_expert.down_proj"),
    ModuleMapping(("layers.*.mlp.shared_gate",), "model.layers.*.mlp.shared_expert_gate"),
)
_QWEN_KEYS = {
    "num_experts": "num_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size",
}
_QWEN_DEFAULTS = {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": None}
# max_window_layers means another thing here.
_SLIDING_WINDOW_DEFAULTS = {key: value for key, value in SLIDING_WINDOW_DEFAULTS.items() if key != "max_window_layers"}

QWEN2 = like_llama(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    models="Qwen 2, 2.5",
    what_differs="biases on q, k and v",
    defaults={**LLAMA_DEFAULTS, **SLIDING_WINDOW_DEFAULTS, "num_key_value_heads": 32, "max_position_embeddings": 32768},
    fixed={**LLAMA_FIXED, "add_bias_linear": False, "add_qkv_bias": True},
)
QWEN3 = like_llama(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    models="Qwen 3",
    what_differs="a norm on every query and key head",
    defaults={
        **QWEN2.defaults,
        "head_dim": 128,
        "attention_bias": False,
    },
    fixed={**LLAMA_FIXED, "add_bias_linear": False, "add_qkv_bias": False, "qk_layernorm": True},
    single_values={"attention_bias": False},  # it would be a bias on the output projection too, but not on the MLP
)
QWEN2_MOE = like_llama(
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    models="Qwen 1.5 and 2 MoE",
    what_differs="a shared expert with a gate; dense layers in between",
    mappings=(*SEPARATE_EXPERT_MAPPINGS, *_SHARED_EXPERT_MAPPINGS),
    in_memory_mappings=(*FUSED_EXPERT_MAPPINGS, *_SHARED_EXPERT_MAPPINGS),
    keys={**LLAMA_KEYS, "add_qkv_bias": "qkv_bias"},
    defaults={
        **LLAMA_DEFAULTS,
        **_QWEN_DEFAULTS,
        **_SLIDING_WINDOW_DEFAULTS,
        "num_key_value_heads": 16,
        "max_position_embeddings": 32768,
        "qkv_bias": True,
    },
    fixed={**LLAMA_FIXED, "add_bias_linear": False},
    single_values={},
    moe_keys={**_QWEN_KEYS, "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size"},
    moe_fixed={**MOE_FIXED, "moe_shared_expert_gate": True},
)
QWEN3_MOE = like_llama(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    models="Qwen 3 MoE",
    what_differs="head norms; dense layers in between",
    mappings=SEPARATE_EXPERT_MAPPINGS,
    in_memory_mappings=FUSED_EXPERT_MAPPINGS,
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
    moe_fixed={**MOE_FIXED, **NO_SHARED_EXPERT},
)
