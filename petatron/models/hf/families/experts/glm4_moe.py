"""GLM-4.5 and 4.6: DeepSeek-V3's experts behind grouped-query attention with half of each head rotated.

Sigmoid scores, a bias per expert, shared experts, dense layers first and depths of multi-token prediction are those of
`families/deepseek.py`, names included. Rotary pairs are half of the rotated part apart.
"""

from __future__ import annotations

from petatron.models.hf.families.deepseek import (
    EXPERT_BIAS_MAPPING,
    FUSED_EXPERTS,
    MTP_COPIES,
    MTP_MAPPINGS,
    SEPARATE_EXPERTS,
    SHARED_EXPERTS,
    V3_MOE_FIXED,
    V3_MOE_KEYS,
)
from petatron.models.hf.families.llama import like_llama
from petatron.models.hf.shared_tables import LLAMA_DEFAULTS, LLAMA_FIXED, LLAMA_KEYS, LLAMA_MAPPINGS

_MAPPINGS = (*LLAMA_MAPPINGS, *SHARED_EXPERTS, *MTP_MAPPINGS, EXPERT_BIAS_MAPPING)

GLM4_MOE = like_llama(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    models="GLM-4.5, GLM-4.6",
    what_differs="DeepSeek-V3's experts, half of each head rotated, biases on q, k and v, head norms in some",
    mappings=(*_MAPPINGS, *SEPARATE_EXPERTS),
    in_memory_mappings=(*_MAPPINGS, *FUSED_EXPERTS),
    ignored_tensors=("*rotary_emb.inv_freq", *MTP_COPIES),
    mtp_keys=("num_nextn_predict_layers", "num_mtp_layers"),
    keys={**LLAMA_KEYS, "add_qkv_bias": "attention_bias", "qk_layernorm": "use_qk_norm"},
    defaults={
        **LLAMA_DEFAULTS,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "use_qk_norm": False,
        "partial_rotary_factor": 0.5,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
    },
    fixed={
        **{name: value for name, value in LLAMA_FIXED.items() if name not in ("rotary_percent", "qk_layernorm")},
        "add_bias_linear": False,
    },
    aliases={"n_routed_experts": "num_local_experts"},
    single_values={"topk_method": "noaux_tc", "norm_topk_prob": True},
    moe_keys=V3_MOE_KEYS,
    moe_fixed=V3_MOE_FIXED,
    group_score_topk=2,
)
