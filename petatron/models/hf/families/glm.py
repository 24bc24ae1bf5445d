"""GLM-4: half of each head rotated, gate and up in one matrix, biases on q, k and v; GLM-4-0414 adds norms after branches.

In both, rotary pairs are neighbors. GLM-4.5 and 4.6 have DeepSeek-V3's experts (`families/deepseek.py`): sigmoid scores, a bias per expert,
shared experts, dense layers first and depths of multi-token prediction, names included. Their rotary pairs are half of the rotated part
apart.
"""

from __future__ import annotations

from petatron.models.hf import moe_config_json as moe
from petatron.models.hf.config_translation import Translation
from petatron.models.hf.decoder_config_json import llama, predictions
from petatron.models.hf.families.deepseek import EXPERT_BIAS_MAPPING, MTP_COPIES, MTP_MAPPINGS, SHARED_EXPERTS
from petatron.models.hf.family import Family, ModuleMapping
from petatron.models.hf.rope_config_json import rope
from petatron.models.hf.shared_tensor_names import (
    FUSED_EXPERTS,
    LLAMA_MAPPINGS,
    SEPARATE_EXPERTS,
    llama_mappings_without,
)

_GATE_UP = ("layers.*.mlp.gate", "layers.*.mlp.up")
_MAPPINGS = (
    *llama_mappings_without(*_GATE_UP),
    ModuleMapping(_GATE_UP, "model.layers.*.mlp.gate_up_proj"),
)


def _glm(config: Translation) -> None:
    llama(config, num_key_value_heads=2, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1.5625e-07)
    config.always(add_bias_linear=False, rotary_interleaved=True)
    config.copy("add_qkv_bias", "attention_bias", True)
    rope(config, partial_rotary_factor=0.5)


def _glm4(config: Translation) -> None:
    _glm(config)
    config.always(norm_placement="both")


GLM = Family(
    name="glm",
    architecture="GlmForCausalLM",
    models="GLM-4 9B",
    what_differs="half of each head rotated in neighboring pairs, gate and up in one matrix, biases on q, k and v",
    mappings=_MAPPINGS,
    translate=_glm,
)
GLM4 = Family(
    name="glm4",
    architecture="Glm4ForCausalLM",
    models="GLM-4-0414",
    what_differs="the same with norms before and after branches",
    mappings=(
        *_MAPPINGS,
        ModuleMapping(("layers.*.attention_post_norm",), "model.layers.*.post_self_attn_layernorm"),
        ModuleMapping(("layers.*.mlp_post_norm",), "model.layers.*.post_mlp_layernorm"),
    ),
    translate=_glm4,
)


_MOE_MAPPINGS = (*LLAMA_MAPPINGS, *SHARED_EXPERTS, *MTP_MAPPINGS, EXPERT_BIAS_MAPPING)


def _glm4_moe(config: Translation) -> None:
    config.also(n_routed_experts="num_local_experts")
    llama(config, num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5)
    config.always(add_bias_linear=False)
    config.copy("add_qkv_bias", "attention_bias", False)
    config.copy("qk_layernorm", "use_qk_norm", False)
    rope(config, partial_rotary_factor=0.5)
    predictions(config)
    moe.expert_sizes(config, "n_routed_experts", width="moe_intermediate_size", defaults=(128, 8, 1408))
    moe.sigmoid_router(config)
    config.only(topk_method="noaux_tc", norm_topk_prob=True)
    moe.deepseek_routing(config, 2, n_shared_experts=1, routed_scaling_factor=1.0, n_group=1, topk_group=1)
    moe.experts_after_dense_layers(config, 1)


GLM4_MOE = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    models="GLM-4.5, GLM-4.6",
    what_differs="DeepSeek-V3's experts, half of each head rotated, biases on q, k and v, head norms in some",
    mappings=(*_MOE_MAPPINGS, *SEPARATE_EXPERTS),
    in_memory_mappings=(*_MOE_MAPPINGS, *FUSED_EXPERTS),
    ignored_tensors=("*rotary_emb.inv_freq", *MTP_COPIES),
    translate=_glm4_moe,
)
