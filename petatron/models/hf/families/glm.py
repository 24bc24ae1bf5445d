"""GLM-4: half of each head rotated, gate and up in one matrix, biases on q, k and v; GLM-4-0414 adds norms after branches.

In both, rotary pairs are neighbours.
"""

from __future__ import annotations

from petatron.models.hf.families.llama import like_llama
from petatron.models.hf.family import ModuleMapping
from petatron.models.hf.shared_tables import LLAMA_DEFAULTS, LLAMA_FIXED, LLAMA_KEYS, LLAMA_MAPPINGS

_GATE_UP = ("layers.*.mlp.gate", "layers.*.mlp.up")
_MAPPINGS = (
    *(mapping for mapping in LLAMA_MAPPINGS if mapping.logical_modules[0] not in _GATE_UP),
    ModuleMapping(_GATE_UP, "model.layers.*.mlp.gate_up_proj"),
)
_FIXED = {
    **{name: value for name, value in LLAMA_FIXED.items() if name != "rotary_percent"},
    "add_bias_linear": False,
    "rotary_interleaved": True,
}

GLM = like_llama(
    name="glm",
    architecture="GlmForCausalLM",
    models="GLM-4 9B",
    what_differs="half of each head rotated in neighbouring pairs, gate and up in one matrix, biases on q, k and v",
    mappings=_MAPPINGS,
    keys={**LLAMA_KEYS, "add_qkv_bias": "attention_bias"},
    defaults={
        **LLAMA_DEFAULTS,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-07,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    fixed=_FIXED,
)
GLM4 = like_llama(
    name="glm4",
    architecture="Glm4ForCausalLM",
    models="GLM-4-0414",
    what_differs="the same with norms before and after branches",
    mappings=(
        *_MAPPINGS,
        ModuleMapping(("layers.*.attention_post_norm",), "model.layers.*.post_self_attn_layernorm"),
        ModuleMapping(("layers.*.mlp_post_norm",), "model.layers.*.post_mlp_layernorm"),
    ),
    keys=GLM.keys,
    defaults=GLM.defaults,
    fixed={**_FIXED, "norm_placement": "both"},
)
