"""Qwen2.5-VL: images and videos of any size.

Rotary positions of rows and columns and windows in the encoder, and rotary time, row and column in a Qwen2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from petatron.base.errors import Problem
from petatron.base.untrusted_files import is_count
from petatron.config.schema.model import ModelConfig
from petatron.config.schema.sections.vision_language import VISION_LANGUAGE_MODEL
from petatron.models.hf import shared_tensor_names as tables
from petatron.models.hf.config_json_types import OWN_FOLDER_FIX
from petatron.models.hf.config_translation import Keys, Settings, Table, Translation
from petatron.models.hf.decoder_config_json import GATED
from petatron.models.hf.families.images.clip_and_siglip import CLIP_MEAN, CLIP_STD
from petatron.models.hf.families.images.text_model import text_mappings, text_spec, text_table
from petatron.models.hf.families.images.vision_table import activation, vision_sizes
from petatron.models.hf.families.qwen import QWEN2
from petatron.models.hf.family import Family, ModuleMapping
from petatron.models.model_spec import ModelSpec
from petatron.sharding.shard_spec import Shape


def _qwen_vision(config: Translation) -> None:
    config.also(num_heads="num_attention_heads")
    vision_sizes(
        config,
        {
            "vision_num_layers": ("depth", 32),
            "vision_hidden_size": ("hidden_size", 3584),
            "vision_ffn_hidden_size": ("intermediate_size", 3420),
            "vision_num_attention_heads": ("num_heads", 16),
            "vision_patch_size": ("patch_size", 14),
            "vision_merge_size": ("spatial_merge_size", 2),
            "vision_temporal_patch_size": ("temporal_patch_size", 2),
            "vision_window_size": ("window_size", 112),
        },
    )
    activation(config, "vision_activation", "hidden_act", "silu", GATED)
    config.only(in_channels=3)
    _full_attention(config)
    _vision_rope(config)
    config.always(
        vision_normalization="RMSNorm",
        vision_norm_epsilon=1e-6,
        vision_position_embedding_type="rope",
        vision_class_token=False,
        vision_patch_bias=False,
        vision_input_norm=False,
        vision_final_norm=False,
        vision_pixel_mean=CLIP_MEAN,
        vision_pixel_std=CLIP_STD,
    )
    config.convert((), None, lambda spec: {"out_hidden_size": spec.config.hidden_size})


def _full_attention(config: Translation) -> None:
    name, key = "vision_full_attention_layers", "fullatt_block_indexes"

    def read(keys: Keys) -> tuple[Settings, list[Problem]]:
        indices = keys[key]
        if isinstance(indices, list | tuple) and all(is_count(index) for index in indices):
            return {name: tuple(indices)}, []
        return {}, [Problem(key, f"{indices!r:.40}", "is not a list of layers", OWN_FOLDER_FIX)]

    config.convert(
        {name: key}, read, lambda spec: {key: list(spec.config.vision_full_attention_layers)}, **{key: [7, 15, 23, 31]}
    )


def _vision_rope(config: Translation) -> None:
    def read(keys: Keys) -> tuple[Settings, list[Problem]]:
        table = keys["rope_parameters"] or {}
        return {"vision_rotary_base": float(table.get("rope_theta") or 10000.0)}, []

    def write(spec: ModelSpec) -> Keys:
        return {"rope_parameters": {"rope_type": "axial", "rope_theta": spec.config.vision_rotary_base}}

    config.convert(("vision_rotary_base",), read, write, rope_parameters=None)


def _qwen_text(config: Translation) -> None:
    """Translates the text model, a Qwen2 whose rotary positions have sections of channels."""

    def read(content: Keys) -> dict[str, Any]:
        table = {**_QWEN_TEXT_DEFAULTS, **text_table(content, flat=True)}
        return {**table, **{name: _without_sections(table.get(name)) for name in _ROPE_TABLES if name in table}}

    def write(keys: Keys, spec: ModelSpec) -> Keys:
        rope = {**(keys.get("rope_parameters") or {}), "mrope_section": list(spec.config.mrope_section)}
        return {"model_type": "qwen2_5_vl_text", **keys, "rope_parameters": rope}

    config.within("text_config", QWEN2.translate, Table(read, write, text_spec))
    config.convert((), None, lambda spec: {"tie_word_embeddings": not spec.config.untie_embeddings_and_output_weights})


_ROPE_TABLES = ("rope_parameters", "rope_scaling")
_QWEN_TEXT_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
"""Where they differ from a Qwen2's, or that has none."""


def _without_sections(table: object) -> object:
    """Returns rope's table without what is said of sections, which is all of an older one."""
    if not isinstance(table, Mapping):
        return table
    left = {name: value for name, value in table.items() if name != "mrope_section"}
    left |= {name: "default" for name in ("type", "rope_type") if left.get(name) == "mrope"}
    return left


def _sections(config: Translation) -> None:
    def read(keys: Keys) -> tuple[Settings, list[Problem]]:
        text = keys.get("text_config")
        text = text if isinstance(text, Mapping) else keys
        tables_given = [table for name in _ROPE_TABLES if isinstance(table := text.get(name), Mapping)]
        sections = next((table["mrope_section"] for table in tables_given if "mrope_section" in table), None)
        if isinstance(sections, list) and all(is_count(pairs) for pairs in sections):
            return {"mrope_section": tuple(sections)}, []
        where = "text_config.rope_parameters.mrope_section"
        return {}, [Problem(where, f"{sections!r:.40}", "is not a list of numbers of pairs", OWN_FOLDER_FIX)]

    config.convert(("mrope_section",), read)
    config.expect("mrope_section", "always some", lambda spec: spec.config.mrope_section)


def _qwen2_5_vl(config: Translation) -> None:
    _qwen_text(config)
    config.within(
        "vision_config",
        _qwen_vision,
        Table(
            lambda content: table if isinstance(table := content.get("vision_config"), Mapping) else {},
            lambda keys, spec: {"model_type": "qwen2_5_vl_vision", **keys},
        ),
    )
    _sections(config)
    config.copy("image_token_id", "image_token_id", 151655, needed=True)

    _projector_width(config)
    config.always(projector_num_layers=2, projector_bias=True, projector_norm=True, projector_activation="gelu")


def _projector_width(config: Translation) -> None:
    name = "projector_hidden_size"

    def merged(setting: Callable[[str], Any]) -> int:
        return setting("vision_merge_size") ** 2 * (setting("vision_hidden_size") or 0)

    config.convert((name,), lambda keys: ({name: merged(config.setting)}, []))
    config.expect(
        name,
        "only the width of merged patches",
        lambda spec: getattr(spec.config, name) == merged(partial(getattr, spec.config)),
    )


def video_patch_shape(config: ModelConfig) -> Shape:
    patch = config.vision_patch_size
    return (config.vision_hidden_size or 0, 3, config.vision_temporal_patch_size, patch, patch)


def _qwen_vision_mappings(tower: str) -> tuple[ModuleMapping, ...]:
    block = f"{tower}.blocks.*"
    rows: dict[tuple[str, ...], str] = {
        ("layers.*.attention_norm",): f"{block}.norm1",
        tables.QKV: f"{block}.attn.qkv",
        ("layers.*.attention.out",): f"{block}.attn.proj",
        ("layers.*.mlp_norm",): f"{block}.norm2",
        **{(f"layers.*.mlp.{ours}",): f"{block}.mlp.{theirs}" for ours, theirs in tables.GATED_MLP.items()},
    }
    return (
        ModuleMapping(("vision.patch",), f"{tower}.patch_embed.proj", shape_there=video_patch_shape),
        *(ModuleMapping(ours, theirs, stack="encoder") for ours, theirs in rows.items()),
        ModuleMapping(("projector.norm",), f"{tower}.merger.ln_q"),
        ModuleMapping(("projector.up",), f"{tower}.merger.mlp.0"),
        ModuleMapping(("projector.out",), f"{tower}.merger.mlp.2"),
    )


QWEN2_5_VL = Family(
    name="qwen2_5_vl",
    architecture="Qwen2_5_VLForConditionalGeneration",
    models="Qwen 2.5 VL",
    what_differs="images and videos of any size: rotary rows and columns, windows, in a Qwen 2 with rotary time, row and column",
    translate=_qwen2_5_vl,
    mappings=(*_qwen_vision_mappings("visual"), *text_mappings("model", "lm_head")),
    in_memory_mappings=(
        *_qwen_vision_mappings("model.visual"),
        *text_mappings("model.language_model", "lm_head"),
    ),
    prefix="",
    model_type=VISION_LANGUAGE_MODEL,
)
