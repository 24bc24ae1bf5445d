"""GLM-4.5 and 4.6: DeepSeek-V3's experts behind grouped-query attention with half of each head rotated.

Sigmoid scores, a bias per expert, shared experts, dense layers first and depths of multi-token prediction are those of
`families/deepseek.py`, names included. Rotary pairs are half of the rotated part apart.
"""

from __future__ import annotations

from petatron.models.hf.decoder_config_json import llama, predictions
from petatron.models.hf.deepseek_config_json import deepseek_routing, sigmoid_router
from petatron.models.hf.families.deepseek import EXPERT_BIAS_MAPPING, MTP_COPIES, MTP_MAPPINGS, SHARED_EXPERTS
from petatron.models.hf.family import Family
from petatron.models.hf.moe_config_json import expert_sizes, experts_after_dense_layers
from petatron.models.hf.rope_config_json import rope
from petatron.models.hf.shared_tables import FUSED_EXPERTS, LLAMA_MAPPINGS, SEPARATE_EXPERTS
from petatron.models.hf.translation import Translation

_MAPPINGS = (*LLAMA_MAPPINGS, *SHARED_EXPERTS, *MTP_MAPPINGS, EXPERT_BIAS_MAPPING)


def _translate(config: Translation) -> None:
    config.also(n_routed_experts="num_local_experts")
    llama(config, num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5)
    config.always(add_bias_linear=False)
    config.copy("add_qkv_bias", "attention_bias", False)
    config.copy("qk_layernorm", "use_qk_norm", False)
    rope(config, partial_rotary_factor=0.5)
    predictions(config)
    expert_sizes(config, "n_routed_experts", width="moe_intermediate_size", defaults=(128, 8, 1408))
    sigmoid_router(config)
    config.only(topk_method="noaux_tc", norm_topk_prob=True)
    deepseek_routing(config, 2, n_shared_experts=1, routed_scaling_factor=1.0, n_group=1, topk_group=1)
    experts_after_dense_layers(config, 1)


GLM4_MOE = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    models="GLM-4.5, GLM-4.6",
    what_differs="DeepSeek-V3's experts, half of each head rotated, biases on q, k and v, head norms in some",
    mappings=(*_MAPPINGS, *SEPARATE_EXPERTS),
    in_memory_mappings=(*_MAPPINGS, *FUSED_EXPERTS),
    ignored_tensors=("*rotary_emb.inv_freq", *MTP_COPIES),
    translate=_translate,
)
