"""GLM-4: half of each head rotated, gate and up in one matrix, biases on q, k and v; GLM-4-0414 adds norms after branches.

In both, rotary pairs are neighbors.
"""

from __future__ import annotations

from petatron.models.hf.decoder_config_json import llama
from petatron.models.hf.family import Family, ModuleMapping
from petatron.models.hf.rope_config_json import rope
from petatron.models.hf.shared_tables import llama_mappings_without
from petatron.models.hf.translation import Translation

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
