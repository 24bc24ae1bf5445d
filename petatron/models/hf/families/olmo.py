"""OLMo 2 (norms on the output of branches, qk-norm over all heads), OLMo 3 (windows in three of four layers) and OLMoE (experts)."""

from __future__ import annotations

from petatron.models.hf.config_translation import Translation
from petatron.models.hf.decoder_config_json import llama
from petatron.models.hf.families.qwen import head_norms
from petatron.models.hf.family import Family, ModuleMapping
from petatron.models.hf.moe_config_json import expert_sizes, experts_in_every_layer, normalized_weights, softmax_router
from petatron.models.hf.rope_config_json import rope
from petatron.models.hf.shared_tensor_names import (
    FUSED_EXPERT_MAPPINGS,
    SEPARATE_EXPERT_MAPPINGS,
    llama_mappings_without,
)
from petatron.models.hf.window_config_json import windows

# The names of these norms mean other places than in a Llama.
_MAPPINGS = (
    *llama_mappings_without("layers.*.attention_norm", "layers.*.mlp_norm"),
    ModuleMapping(("layers.*.attention_post_norm",), "model.layers.*.post_attention_layernorm"),
    ModuleMapping(("layers.*.mlp_post_norm",), "model.layers.*.post_feedforward_layernorm"),
)


def _decoder(config: Translation, *, max_position_embeddings: int = 2048) -> None:
    llama(config, without=("head_dim",), max_position_embeddings=max_position_embeddings, rms_norm_eps=1e-5)
    head_norms(config)
    config.always(qk_layernorm_scope="projection")


def _olmo2(config: Translation) -> None:
    _decoder(config)
    config.always(norm_placement="output")
    rope(config)


def _olmo3(config: Translation) -> None:
    _decoder(config)
    config.always(norm_placement="output")
    windows(config, 4096, layer_types=None, full_attention_every=4)
    rope(config, by_layer_type=True, rope_theta=500000.0)


def _olmoe(config: Translation) -> None:
    config.also(num_experts="num_local_experts")
    _decoder(config, max_position_embeddings=4096)
    config.only(clip_qkv=None)
    rope(config)
    expert_sizes(config, "num_experts")
    softmax_router(config)
    normalized_weights(config, False)
    experts_in_every_layer(config)


OLMO2 = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    models="OLMo 2",
    what_differs="norms after branches only, qk-norm over all heads",
    mappings=_MAPPINGS,
    translate=_olmo2,
)
OLMO3 = Family(
    name="olmo3",
    architecture="Olmo3ForCausalLM",
    models="OLMo 3",
    what_differs="OLMo 2 with windows in three of four layers",
    mappings=_MAPPINGS,
    translate=_olmo3,
)
OLMOE = Family(
    name="olmoe",
    architecture="OlmoeForCausalLM",
    models="OLMoE",
    what_differs="qk-norm over all heads, experts in every layer",
    mappings=SEPARATE_EXPERT_MAPPINGS,
    in_memory_mappings=FUSED_EXPERT_MAPPINGS,
    translate=_olmoe,
)
