"""Qwen2 (biases on q, k, v), Qwen3 (qk-norm) and their forms with experts; Qwen2-MoE has a gated shared expert.

The experts' weights are those of a softmax over all experts, divided by the sum of the chosen ones if `norm_topk_prob` is set: our
routing without `moe_router_pre_softmax`. Not dividing is our routing with it.
"""

from __future__ import annotations

from petatron.models.hf import shared_tensor_names as tables
from petatron.models.hf.config_translation import Translation
from petatron.models.hf.decoder_config_json import llama, no_biases
from petatron.models.hf.family import Family, ModuleMapping
from petatron.models.hf.moe_config_json import expert_sizes, experts_at_steps, normalized_weights, softmax_router
from petatron.models.hf.rope_config_json import rope
from petatron.models.hf.window_config_json import windows

_SHARED_EXPERT_MAPPINGS = (
    *tables.module_mappings("layers.*.mlp.shared", "model.layers.*.mlp.shared_expert", tables.GATED_MLP),
    ModuleMapping(("layers.*.mlp.shared_gate",), "model.layers.*.mlp.shared_expert_gate"),
)


def _qwen2(config: Translation) -> None:
    llama(config, num_key_value_heads=32, max_position_embeddings=32768)
    config.always(add_bias_linear=False, add_qkv_bias=True)
    windows(config, 4096, use_sliding_window=False, max_window_layers=28, layer_types=None)
    rope(config)


def _qwen3(config: Translation) -> None:
    llama(config, num_key_value_heads=32, max_position_embeddings=32768, head_dim=128)
    head_norms(config)
    windows(config, 4096, use_sliding_window=False, max_window_layers=28, layer_types=None)
    rope(config)


def head_norms(config: Translation) -> None:
    """Says that queries and keys are normalized, and that nothing has a bias."""
    no_biases(config)
    config.always(qk_layernorm=True)
    config.only(attention_bias=False)  # it would be a bias on the output projection too, but not on the MLP


def _qwen2_moe(config: Translation) -> None:
    llama(config, num_key_value_heads=16, max_position_embeddings=32768)
    config.always(add_bias_linear=False)
    config.copy("add_qkv_bias", "qkv_bias", True)
    windows(config, 4096, use_sliding_window=False, layer_types=None)  # max_window_layers means another thing here
    rope(config)
    qwen_experts(config, norm_topk_prob=False)
    shared_expert(config)


def _qwen3_moe(config: Translation) -> None:
    config.also(num_experts="num_local_experts")
    llama(config, num_key_value_heads=4, max_position_embeddings=32768)
    head_norms(config)
    windows(config, 4096, use_sliding_window=False)
    rope(config)
    qwen_experts(config, norm_topk_prob=False)


def qwen_experts(config: Translation, *, norm_topk_prob: bool) -> None:
    """Translates experts in every n-th layer."""
    expert_sizes(config, "num_experts", width="moe_intermediate_size")
    softmax_router(config)
    normalized_weights(config, norm_topk_prob)
    experts_at_steps(config)


def shared_expert(config: Translation) -> None:
    """Translates an expert of all tokens, with a gate."""
    config.copy("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size")
    config.always(moe_shared_expert_gate=True)


QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    models="Qwen 2, 2.5",
    what_differs="biases on q, k and v",
    mappings=tables.LLAMA_MAPPINGS,
    translate=_qwen2,
)
QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    models="Qwen 3",
    what_differs="a norm on every query and key head",
    mappings=tables.LLAMA_MAPPINGS,
    translate=_qwen3,
)
QWEN2_MOE = Family(
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    models="Qwen 1.5 and 2 MoE",
    what_differs="a shared expert with a gate; dense layers in between",
    mappings=(*tables.SEPARATE_EXPERT_MAPPINGS, *_SHARED_EXPERT_MAPPINGS),
    in_memory_mappings=(*tables.FUSED_EXPERT_MAPPINGS, *_SHARED_EXPERT_MAPPINGS),
    translate=_qwen2_moe,
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    models="Qwen 3 MoE",
    what_differs="head norms; dense layers in between",
    mappings=tables.SEPARATE_EXPERT_MAPPINGS,
    in_memory_mappings=tables.FUSED_EXPERT_MAPPINGS,
    translate=_qwen3_moe,
)
