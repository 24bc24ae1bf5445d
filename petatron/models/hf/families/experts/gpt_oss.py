"""gpt-oss: experts with biases and clamped gates, attention sinks, windows in every second layer, YaRN between rotary pairs.

The rows of gate and up alternate, and matrices of experts are [in, out]. OpenAI's files have these in MXFP4 under names of their own
(`huggingface/mxfp4_weights.py`), and other weights in bfloat16. "silu" in config.json is the gate x sigmoid(1.702 x) all the same.
"""

from __future__ import annotations

from petatron.models.hf.config_translation import REQUIRED, Translation
from petatron.models.hf.decoder_config_json import llama
from petatron.models.hf.family import Family, ModuleMapping
from petatron.models.hf.moe_config_json import expert_sizes, experts_in_every_layer, softmax_router
from petatron.models.hf.rope_config_json import rope
from petatron.models.hf.shared_tensor_names import EXPERTS, LLAMA_MAPPINGS
from petatron.models.hf.window_config_json import windows

_GATE_UP, _DOWN = (f"{EXPERTS}.gate", f"{EXPERTS}.up"), (f"{EXPERTS}.down",)
_HF = "model.layers.*.mlp.experts"
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _translate(config: Translation) -> None:
    config.also(num_local_experts="num_experts")
    llama(
        config,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        activations={"silu": "quick_geglu"},
    )
    config.always(add_bias_linear=True, softmax_type="learnable", glu_linear_offset=1.0)
    config.only(attention_bias=True, swiglu_alpha=1.702)
    config.copy("activation_func_clamp_value", "swiglu_limit", 7.0, needed=True)
    windows(config, 128, layer_types=None, full_attention_every=2)
    rope(config, rope_theta=150000.0, rope_parameters=_YARN)
    expert_sizes(config, defaults=(128, 4, REQUIRED))
    softmax_router(config)
    config.always(moe_router_linear_bias=True)
    experts_in_every_layer(config)


GPT_OSS = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    models="gpt-oss (also its MXFP4 files)",
    what_differs="experts with biases and clamped gates, attention sinks, windows in every second layer",
    mappings=(
        *LLAMA_MAPPINGS,
        ModuleMapping(("layers.*.attention.sinks",), "model.layers.*.self_attn.sinks", no_weight_suffix=True),
        ModuleMapping(("layers.*.mlp.router",), "model.layers.*.mlp.router"),
        ModuleMapping(_GATE_UP, f"{_HF}.gate_up_proj", transposed=True, no_weight_suffix=True, interleaved=True),
        ModuleMapping(_GATE_UP, f"{_HF}.gate_up_proj_bias", no_weight_suffix=True, leaf="bias", interleaved=True),
        ModuleMapping(_DOWN, f"{_HF}.down_proj", transposed=True, no_weight_suffix=True),
        ModuleMapping(_DOWN, f"{_HF}.down_proj_bias", no_weight_suffix=True, leaf="bias"),
    ),
    translate=_translate,
)
