"""Llama 4 (text): chunked attention and norms without weights in layers with rotary positions, a temperature in those without.

Every token has one expert, whose input is multiplied by a sigmoid, and a shared one of the same width; dense layers in between are
wider. Rotary pairs are neighbors. The text model of a multimodal folder is saved by itself first.
"""

from __future__ import annotations

from petatron.base.errors import Problem
from petatron.base.untrusted_files import is_count
from petatron.config.schema.attention_layer_freq import no_rope_layers
from petatron.models.hf.config_json_types import OWN_FOLDER_FIX
from petatron.models.hf.config_translation import OTHER_MODEL_FIX, Keys, Settings, Translation
from petatron.models.hf.decoder_config_json import llama, no_biases
from petatron.models.hf.family import Family, ModuleMapping
from petatron.models.hf.moe_config_json import expert_sizes, experts_in_named_layers, softmax_router
from petatron.models.hf.no_rope_config_json import read_no_rope, rotary_layers, write_no_rope
from petatron.models.hf.rope_config_json import rope
from petatron.models.hf.shared_tensor_names import GATED_MLP, fused_experts, llama_mappings_without, module_mappings
from petatron.models.hf.window_config_json import FULL
from petatron.models.model_spec import ModelSpec

_CHUNKED = "chunked_attention"
_MLP, _HF = "layers.*.mlp", "model.layers.*.feed_forward"


def _read_attention(keys: Keys) -> tuple[Settings, list[Problem]]:
    """Reads which layers have positions and chunks, and the temperature of the others."""
    keys = {**keys, "no_rope_layers": keys["no_rope_layers"] or None}
    values, problems = read_no_rope(keys)
    if problems:
        return {}, problems
    chunk, kinds, rotary = keys["attention_chunk_size"], keys["layer_types"], rotary_layers(keys)
    by_positions = [_CHUNKED if rotates else FULL for rotates in rotary]
    if kinds is not None and kinds != by_positions and kinds != [FULL] * len(rotary):
        rule = "does not have chunks in the layers with rotary positions, and in no others"
        return {}, [Problem("layer_types", "", rule, OTHER_MODEL_FIX)]
    if chunk is not None and kinds in (None, by_positions):
        if not is_count(chunk, 1):
            return {}, [Problem("attention_chunk_size", f"{chunk!r:.40}", "is not a number of tokens", OWN_FOLDER_FIX)]
        values["attention_chunk_size"] = chunk
    if keys.get("attn_temperature_tuning", True) and not all(rotary):
        scale, floor = keys["attn_scale"], keys["floor_scale"]
        if not is_count(floor, 1) or not scale > 0:
            rule = f"and attn_scale {scale!r:.40} are no temperature"
            return {}, [Problem("floor_scale", f"{floor!r:.40}", rule, OWN_FOLDER_FIX)]
        values |= {"attention_temperature_scale": float(scale), "attention_temperature_floor": floor}
    return values, []


def _write_attention(spec: ModelSpec) -> Keys:
    model = spec.config
    chunk, scale = model.attention_chunk_size, model.attention_temperature_scale
    chunked = [chunk is not None and not without for without in no_rope_layers(model)]
    return {
        **write_no_rope(spec),
        "layer_types": [_CHUNKED if here else FULL for here in chunked],
        "attention_chunk_size": chunk or model.max_position_embeddings,  # transformers needs one, also for no layer
        "attn_temperature_tuning": scale is not None,
        "attn_scale": scale or 0.1,
        "floor_scale": model.attention_temperature_floor,
    }


def _translate(config: Translation) -> None:
    config.copy("ffn_hidden_size", "intermediate_size_mlp", 16384)
    llama(
        config,
        without=("intermediate_size",),
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
    )
    no_biases(config)
    config.copy("qk_l2_norm", "use_qk_norm", True)
    config.always(rotary_interleaved=True)
    config.only(attention_bias=False, num_experts_per_tok=1)
    rope(config, rope_theta=500000.0)
    settings = ("no_rope_freq", "attention_chunk_size", "attention_temperature_scale", "attention_temperature_floor")
    layers = {"no_rope_layers": None, "no_rope_layer_interval": 4, "layer_types": None, "attention_chunk_size": 8192}
    config.convert(settings, _read_attention, _write_attention, **layers, attn_scale=0.1, floor_scale=8192)
    expert_sizes(config, defaults=(16, 1, 8192))
    config.copy("moe_shared_expert_intermediate_size", "intermediate_size", 8192)
    softmax_router(config)
    config.always(moe_router_score_function="sigmoid", moe_apply_probs_on_input=True)
    experts_in_named_layers(config)


LLAMA4 = Family(
    name="llama4_text",
    architecture="Llama4ForCausalLM",
    models="Llama 4 (text)",
    what_differs="chunked attention, layers without positions, one expert per token weighted at its input, a shared one",
    mappings=(
        *llama_mappings_without(*(f"{_MLP}.{name}" for name in GATED_MLP)),
        *module_mappings(_MLP, _HF, GATED_MLP),
        ModuleMapping((f"{_MLP}.router",), f"{_HF}.router"),
        *module_mappings(f"{_MLP}.shared", f"{_HF}.shared_expert", GATED_MLP),
        *fused_experts(f"{_HF}.experts", transposed=True),
    ),
    translate=_translate,
)
