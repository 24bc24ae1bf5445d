"""Draws the config.json of small models that read images, with the settings in which published models differ."""

from __future__ import annotations

from petatron.models.hf.families.images.llava import LLAVA
from petatron.models.hf.families.images.qwen_vl import QWEN2_5_VL
from petatron.models.hf.families.images.smolvlm import SMOLVLM
from tests.hf.images_and_text_zoo import IMAGE_TOKEN, VOCABULARY
from tests.hf.random_configs.draw import NO_IDS, Config, Draw

IMAGE_FAMILIES = (LLAVA.name, SMOLVLM.name, QWEN2_5_VL.name)


def random_image_config(family: str, number: int) -> Config:
    draw = Draw(f"{family} {number}")
    kind = {"smolvlm": "llama", "qwen2_5_vl": "qwen2_5_vl_text"}.get(family) or draw.one_of(
        "llama", "mistral", "qwen2", "qwen3"
    )
    text = _text(draw, kind)
    config: Config = {"model_type": family, "text_config": text}
    if family == "qwen2_5_vl":
        pairs = text["hidden_size"] // text["num_attention_heads"] // 2
        first, second = draw.random.randint(1, pairs - 2), 1
        sections = [first, second, pairs - first - second]
        key = draw.one_of("rope_parameters", "rope_scaling")
        older = {"type": "mrope", "mrope_section": sections}
        text[key] = (
            older
            if key == "rope_scaling"
            else {"rope_type": "default", "rope_theta": 3000.0, "mrope_section": sections}
        )
        config["vision_config"] = _windowed(draw, text["hidden_size"])
        config |= {"image_token_id": IMAGE_TOKEN, "video_token_id": 129, "vision_start_token_id": 128}
    elif family == "smolvlm":
        config["scale_factor"] = draw.one_of(1, 2, 3)
        config["vision_config"] = {"model_type": "smolvlm_vision", **_encoder(draw, side=6)}
        config["image_token_id"] = IMAGE_TOKEN
    else:
        tower = draw.one_of("clip_vision_model", "siglip_vision_model")
        vision = {"model_type": tower, **_encoder(draw, side=draw.one_of(1, 2, 4))}
        is_clip = tower == "clip_vision_model"
        config["vision_config"] = vision if is_clip else {**vision, "vision_use_head": False}
        layers = vision["num_hidden_layers"]
        config |= {"image_token_index": IMAGE_TOKEN, "vision_feature_layer": draw.one_of(-1, layers, 1)}
        config["vision_feature_select_strategy"] = "default" if is_clip else "full"
        draw.options(config, multimodal_projector_bias=(True, False), projector_hidden_act=("gelu", "relu", "silu"))
    return config


def _text(draw: Draw, kind: str) -> Config:
    heads = draw.one_of(2, 4)
    config: Config = {
        "model_type": kind,
        "vocab_size": VOCABULARY,
        "hidden_size": heads * draw.one_of(8, 16),
        "intermediate_size": draw.one_of(24, 37),
        "num_hidden_layers": draw.one_of(1, 2),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.one_of(1, heads),
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
        **NO_IDS,
    }
    draw.options(config, rms_norm_eps=(1e-6, 1e-3))
    if kind == "qwen3":
        config["head_dim"] = 8
    return config


def _encoder(draw: Draw, *, side: int) -> Config:
    heads, patch = draw.one_of(1, 2, 3), draw.one_of(1, 2, 3)
    config: Config = {
        "hidden_size": heads * draw.one_of(8, 10),
        "intermediate_size": draw.one_of(24, 37),
        "num_hidden_layers": draw.one_of(1, 2, 3),
        "num_attention_heads": heads,
        "patch_size": patch,
        "image_size": side * patch,
        "initializer_range": 0.1,
    }
    draw.options(config, layer_norm_eps=(1e-6, 1e-3), hidden_act=("gelu", "quick_gelu", "gelu_pytorch_tanh", "relu"))
    return config


def _windowed(draw: Draw, width: int) -> Config:
    heads, layers = draw.one_of(1, 2, 3), draw.one_of(1, 2, 3)
    patch, merge = draw.one_of(1, 2, 3), draw.one_of(1, 2)
    return {
        "depth": layers,
        "hidden_size": heads * draw.one_of(8, 16),
        "intermediate_size": draw.one_of(24, 37),
        "num_heads": heads,
        "patch_size": patch,
        "spatial_merge_size": merge,
        "temporal_patch_size": draw.one_of(1, 2),
        "window_size": patch * merge * draw.one_of(1, 2, 3),
        "fullatt_block_indexes": sorted({draw.random.randrange(layers)}),
        "out_hidden_size": width,
        "initializer_range": 0.1,
        "hidden_act": draw.one_of("silu", "gelu"),
    }
