"""Models that read images: LLaVA (CLIP or SigLIP), SmolVLM and Idefics 3, Qwen2.5-VL.

A config.json has a table for the vision encoder and one for the text model, a Llama, a Mistral or a Qwen in the keys of that family.
What transformers builds and does not compute, LLaVA's last layers and the norm after them, is neither read nor written: a folder that is
written has an encoder that ends where the decoder reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from petatron.base.errors import Problem
from petatron.base.untrusted_files import is_count
from petatron.config.schema.model import ModelConfig, MoEConfig
from petatron.config.schema.sections.mlp import ActivationName
from petatron.config.schema.sections.vision_language import VISION_LANGUAGE_MODEL
from petatron.models.decoder_spec import decoder_spec
from petatron.models.hf import shared_tensor_names as tables
from petatron.models.hf.config_json_types import OWN_FOLDER_FIX
from petatron.models.hf.config_translation import OTHER_MODEL_FIX, ConfigWriter, Keys, Settings, Table, Translation
from petatron.models.hf.decoder_config_json import GATED, PLAIN
from petatron.models.hf.families.llama import LLAMA
from petatron.models.hf.families.mistral import MISTRAL
from petatron.models.hf.families.qwen import QWEN2, QWEN3
from petatron.models.hf.family import Family, ModuleMapping
from petatron.models.model_spec import ModelSpec
from petatron.sharding.shard_spec import Shape

_TEXT_FAMILIES: Mapping[str, Family] = {family.name: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}
_TEXT_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
}
"""What LLaVA's published files leave out of a Llama's table."""
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_HALF = (0.5,) * 3


def _text_spec(spec: ModelSpec) -> ModelSpec:
    """Returns the decoder by itself."""
    config = replace(spec.config, model_type="decoder", mrope_section=())
    return decoder_spec(config, spec.moe or MoEConfig())


def _text_table(content: Keys, *, flat: bool = False, tied_inside: bool = True) -> dict[str, Any]:
    """Returns the table of the text model.

    flat: older files have its keys beside the others. tied_inside: whether embeddings are tied may be said in it, and not outside.
    """
    given = content.get("text_config")
    table = dict(given) if isinstance(given, Mapping) else dict(content) if flat else {}
    tied = content.get("tie_word_embeddings") or (tied_inside and table.get("tie_word_embeddings"))
    table["tie_word_embeddings"] = bool(tied)
    return table


def _any_text(config: Translation, *, tied_inside: bool) -> None:
    """Translates the text model by the family that its table names, or, of a model that is written, the first that can express it."""
    chosen: list[str] = []

    def read(content: Keys) -> dict[str, Any]:
        table = _text_table(content, tied_inside=tied_inside)
        chosen.append(str(table.get("model_type", LLAMA.name)))
        return {**(_TEXT_DEFAULTS if chosen[0] == LLAMA.name else {}), **table}

    def translate(inside: Translation) -> None:
        if isinstance(inside, ConfigWriter):
            chosen[:] = [_family_that_expresses(inside.spec)]
        family = _TEXT_FAMILIES.get(chosen[0])
        if family is None:
            rule = f"is not one of {', '.join(_TEXT_FAMILIES)}, whose layers are here"
            inside.problems.append(Problem("model_type", chosen[0], rule, OTHER_MODEL_FIX))
        (family or LLAMA).translate(inside)

    def write(keys: Keys, spec: ModelSpec) -> Keys:
        return {"model_type": chosen[0], **keys}

    config.within("text_config", translate, Table(read, write, _text_spec))
    config.convert((), None, lambda spec: {"tie_word_embeddings": not spec.config.untie_embeddings_and_output_weights})


def _family_that_expresses(spec: ModelSpec) -> str:
    for family in _TEXT_FAMILIES.values():
        writer = ConfigWriter(family.name, spec)
        family.translate(writer)
        writer.finish()
        if not writer.problems:
            return family.name
    return LLAMA.name


def _plain_activation(config: Translation, setting: str, key: str, default: str) -> None:
    _activation(config, setting, key, default, PLAIN)


def _activation(config: Translation, setting: str, key: str, default: str, names: Mapping[str, ActivationName]) -> None:
    written = {ours: theirs for theirs, ours in reversed(list(names.items()))}

    def read(keys: Keys) -> tuple[Settings, list[Problem]]:
        name = keys[key]
        if isinstance(name, str) and name in names:
            return {setting: names[name]}, []
        rule = f"is not one of {', '.join(names)}"
        return {}, [Problem(key, f"{name!r:.40}", rule, OTHER_MODEL_FIX)]

    config.convert(
        {setting: key}, read, lambda spec: {key: written.get(getattr(spec.config, setting))}, **{key: default}
    )
    config.expect(setting, ", ".join(written), lambda spec: getattr(spec.config, setting) in written)


def _vision_sizes(config: Translation, defaults: Mapping[str, tuple[str, Any]]) -> None:
    for setting, (key, default) in defaults.items():
        config.copy(setting, key, default, needed=True)


def _square_patches(config: Translation, *, image_size: int, patch_size: int) -> None:
    _vision_sizes(
        config, {"vision_image_size": ("image_size", image_size), "vision_patch_size": ("patch_size", patch_size)}
    )
    config.only(num_channels=3)


def _clip_or_siglip(config: Translation, kinds: Mapping[str, Callable[[Translation], None]], default: str) -> None:
    """Translates the vision encoder by the function of the kind that its table names."""
    chosen: list[str] = []

    def read(content: Keys) -> Keys:
        table = content.get("vision_config")
        table = table if isinstance(table, Mapping) else {}
        chosen.append(str(table.get("model_type", default)))
        return table

    def translate(inside: Translation) -> None:
        if isinstance(inside, ConfigWriter):
            clip = inside.spec.config.vision_class_token
            chosen[:] = [next((kind for kind in kinds if kind.startswith("clip") is clip), default)]
        function = kinds.get(chosen[0])
        if function is None:
            rule = f"is not one of {', '.join(kinds)}"
            inside.problems.append(Problem("model_type", chosen[0], rule, OTHER_MODEL_FIX))
        (function or kinds[default])(inside)

    config.within("vision_config", translate, Table(read, lambda keys, spec: {"model_type": chosen[0], **keys}))


def _clip(config: Translation) -> None:
    _square_patches(config, image_size=224, patch_size=32)
    _encoder(config, hidden=768, inner=3072, heads=12, layers=12, epsilon=1e-5)
    _plain_activation(config, "vision_activation", "hidden_act", "quick_gelu")
    config.always(
        vision_class_token=True,
        vision_patch_bias=False,
        vision_input_norm=True,
        vision_pixel_mean=_CLIP_MEAN,
        vision_pixel_std=_CLIP_STD,
    )


def _siglip(config: Translation) -> None:
    _square_patches(config, image_size=224, patch_size=16)
    _encoder(config, hidden=768, inner=3072, heads=12, layers=12, epsilon=1e-6)
    _plain_activation(config, "vision_activation", "hidden_act", "gelu_pytorch_tanh")
    config.always(
        vision_class_token=False,
        vision_patch_bias=True,
        vision_input_norm=False,
        vision_pixel_mean=_HALF,
        vision_pixel_std=_HALF,
    )


def _headless_siglip(config: Translation) -> None:
    _siglip(config)
    config.convert((), None, lambda spec: {"vision_use_head": False})


def _smolvlm_vision(config: Translation) -> None:
    _siglip(config)
    # Other numbers than SigLIP's where a file leaves them out.
    _square_patches(config, image_size=224, patch_size=32)
    _encoder(config, hidden=1152, inner=3072, heads=16, layers=12, epsilon=1e-6)


def _encoder(config: Translation, *, hidden: int, inner: int, heads: int, layers: int, epsilon: float) -> None:
    _vision_sizes(
        config,
        {
            "vision_hidden_size": ("hidden_size", hidden),
            "vision_ffn_hidden_size": ("intermediate_size", inner),
            "vision_num_attention_heads": ("num_attention_heads", heads),
            "vision_num_layers": ("num_hidden_layers", layers),
            "vision_norm_epsilon": ("layer_norm_eps", epsilon),
        },
    )
    config.only(attention_dropout=0.0)
    config.always(
        vision_normalization="LayerNorm",
        vision_position_embedding_type="learned",
        vision_temporal_patch_size=1,
        vision_window_size=None,
        vision_full_attention_layers=(),
        mrope_section=(),
    )


def _llava(config: Translation) -> None:
    _any_text(config, tied_inside=True)
    _clip_or_siglip(config, {"clip_vision_model": _clip, "siglip_vision_model": _headless_siglip}, "clip_vision_model")
    config.copy("image_token_id", "image_token_index", 32000, needed=True)
    config.copy("projector_bias", "multimodal_projector_bias", True)
    _plain_activation(config, "projector_activation", "projector_hidden_act", "gelu")
    _feature_layer(config)
    config.convert(
        ("projector_hidden_size",), lambda keys: ({"projector_hidden_size": config.setting("hidden_size")}, [])
    )
    config.expect(
        "projector_hidden_size",
        "only the decoder's hidden size",
        lambda spec: spec.config.projector_hidden_size == spec.config.hidden_size,
    )
    config.convert((), None, lambda spec: {"image_seq_length": _vectors(spec.config)})
    config.always(projector_num_layers=2, projector_norm=False, vision_merge_size=1, vision_final_norm=False)


def _vectors(config: ModelConfig) -> int:
    return (config.vision_image_size // config.vision_patch_size) ** 2


def _feature_layer(config: Translation) -> None:
    """Reads how many layers the encoder has before the output that the decoder reads, and whether that has the class token."""

    def read(keys: Keys) -> tuple[Settings, list[Problem]]:
        layers, chosen = config.setting("vision_num_layers"), keys["vision_feature_layer"]
        if not isinstance(chosen, int) or isinstance(chosen, bool) or not -layers <= chosen <= layers:
            rule = f"is not one of the {layers} layers of the vision encoder"
            return {}, [Problem("vision_feature_layer", f"{chosen!r:.40}", rule, OTHER_MODEL_FIX)]
        used = chosen if chosen >= 0 else layers + 1 + chosen
        if used < 1:
            rule = "is the embedding of patches, before any layer"
            return {}, [Problem("vision_feature_layer", f"{chosen}", rule, OTHER_MODEL_FIX)]
        strategy, has_class = keys["vision_feature_select_strategy"], config.setting("vision_class_token")
        if strategy != ("default" if has_class else "full"):
            kind = "with a class token" if has_class else "without a class token"
            rule = f"leaves out another token than the class token of an encoder {kind}"
            return {}, [Problem("vision_feature_select_strategy", f"{strategy!r:.40}", rule, OTHER_MODEL_FIX)]
        return {"vision_num_layers": used}, []

    def write(spec: ModelSpec) -> Keys:
        strategy = "default" if spec.config.vision_class_token else "full"
        return {"vision_feature_layer": -1, "vision_feature_select_strategy": strategy}

    keys = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}
    config.convert(("vision_num_layers",), read, write, **keys)


def _smolvlm(config: Translation) -> None:
    _any_text(config, tied_inside=False)
    config.within(
        "vision_config",
        _smolvlm_vision,
        Table(
            lambda content: table if isinstance(table := content.get("vision_config"), Mapping) else {},
            lambda keys, spec: {"model_type": "smolvlm_vision", **keys},
        ),
    )
    config.copy("image_token_id", "image_token_id", 128257, needed=True)
    config.copy("vision_merge_size", "scale_factor", 2, needed=True)
    config.always(projector_num_layers=1, projector_bias=False, projector_norm=False, vision_final_norm=True)


def _qwen_vision(config: Translation) -> None:
    _vision_sizes(
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
    _activation(config, "vision_activation", "hidden_act", "silu", GATED)
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
        vision_pixel_mean=_CLIP_MEAN,
        vision_pixel_std=_CLIP_STD,
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
        table = {**_QWEN_TEXT_DEFAULTS, **_text_table(content, flat=True)}
        return {**table, **{name: _without_sections(table.get(name)) for name in _ROPE_TABLES if name in table}}

    def write(keys: Keys, spec: ModelSpec) -> Keys:
        rope = {**(keys.get("rope_parameters") or {}), "mrope_section": list(spec.config.mrope_section)}
        return {"model_type": "qwen2_5_vl_text", **keys, "rope_parameters": rope}

    config.within("text_config", QWEN2.translate, Table(read, write, _text_spec))
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
        return setting("vision_merge_size") ** 2 * setting("vision_hidden_size")

    config.convert((name,), lambda keys: ({name: merged(config.setting)}, []))
    config.expect(
        name,
        "only the width of merged patches",
        lambda spec: getattr(spec.config, name) == merged(partial(getattr, spec.config)),
    )


def _patch_shape(config: ModelConfig) -> Shape:
    patch = config.vision_patch_size
    return (config.vision_hidden_size or 0, 3, patch, patch)


def _video_patch_shape(config: ModelConfig) -> Shape:
    patch = config.vision_patch_size
    return (config.vision_hidden_size or 0, 3, config.vision_temporal_patch_size, patch, patch)


def _class_shape(config: ModelConfig) -> Shape:
    return (config.vision_hidden_size or 0,)


def _text_mappings(model: str, head: str) -> tuple[ModuleMapping, ...]:
    """Returns the mappings of a Llama inside of another model: `model` and `head` are what it names its parts."""
    return tuple(
        replace(
            mapping,
            hf_module=head if mapping.hf_module == "lm_head" else mapping.hf_module.replace("model.", f"{model}.", 1),
            stack="decoder" if "*" in mapping.hf_module else None,
        )
        for mapping in tables.LLAMA_MAPPINGS
    )


def _siglip_mappings(tower: str) -> tuple[ModuleMapping, ...]:
    """Returns the mappings of CLIP's and SigLIP's encoders."""
    layer = f"{tower}.encoder.layers.*"
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "out_proj"}
    rows = {
        "layers.*.attention_norm": f"{layer}.layer_norm1",
        **{f"layers.*.attention.{ours}": f"{layer}.self_attn.{theirs}" for ours, theirs in names.items()},
        "layers.*.mlp_norm": f"{layer}.layer_norm2",
        "layers.*.mlp.up": f"{layer}.mlp.fc1",
        "layers.*.mlp.down": f"{layer}.mlp.fc2",
    }
    return (
        ModuleMapping(("vision.patch",), f"{tower}.embeddings.patch_embedding", shape_there=_patch_shape),
        ModuleMapping(("vision.position",), f"{tower}.embeddings.position_embedding"),
        ModuleMapping(
            ("vision",),
            f"{tower}.embeddings.class_embedding",
            no_weight_suffix=True,
            leaf="class_token",
            shape_there=_class_shape,
        ),
        ModuleMapping(("vision.norm",), f"{tower}.pre_layrnorm"),
        *(ModuleMapping((ours,), theirs, stack="encoder") for ours, theirs in rows.items()),
        ModuleMapping(("vision_norm",), f"{tower}.post_layernorm"),
    )


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
        ModuleMapping(("vision.patch",), f"{tower}.patch_embed.proj", shape_there=_video_patch_shape),
        *(ModuleMapping(ours, theirs, stack="encoder") for ours, theirs in rows.items()),
        ModuleMapping(("projector.norm",), f"{tower}.merger.ln_q"),
        ModuleMapping(("projector.up",), f"{tower}.merger.mlp.0"),
        ModuleMapping(("projector.out",), f"{tower}.merger.mlp.2"),
    )


LLAVA = Family(
    name="llava",
    architecture="LlavaForConditionalGeneration",
    models="LLaVA 1.5",
    what_differs="images: CLIP or SigLIP and an MLP before a Llama, Mistral or Qwen",
    translate=_llava,
    mappings=(
        *_siglip_mappings("vision_tower"),
        ModuleMapping(("projector.up",), "multi_modal_projector.linear_1"),
        ModuleMapping(("projector.out",), "multi_modal_projector.linear_2"),
        *_text_mappings("language_model.model", "language_model.lm_head"),
    ),
    in_memory_mappings=(
        *_siglip_mappings("model.vision_tower"),
        ModuleMapping(("projector.up",), "model.multi_modal_projector.linear_1"),
        ModuleMapping(("projector.out",), "model.multi_modal_projector.linear_2"),
        *_text_mappings("model.language_model", "lm_head"),
    ),
    prefix="",
    tensor_aliases={"vision_tower.vision_model.": "vision_tower."},
    ignored_tensors=(
        "*rotary_emb.inv_freq",
        "*embeddings.position_ids",
        "*vision_tower.*encoder.layers.*",
        "*vision_tower.*post_layernorm.*",
        "*vision_tower.*head.*",
    ),
    model_type=VISION_LANGUAGE_MODEL,
)
SMOLVLM = Family(
    name="smolvlm",
    architecture="SmolVLMForConditionalGeneration",
    models="SmolVLM, SmolVLM 2, Idefics 3",
    what_differs="images: SigLIP, of which blocks of patches become one vector, before a Llama",
    translate=_smolvlm,
    mappings=(
        *_siglip_mappings("model.vision_model"),
        ModuleMapping(("projector.out",), "model.connector.modality_projection.proj"),
        *_text_mappings("model.text_model", "lm_head"),
    ),
    prefix="",
    model_type=VISION_LANGUAGE_MODEL,
    other_names=("idefics3",),
)
QWEN2_5_VL = Family(
    name="qwen2_5_vl",
    architecture="Qwen2_5_VLForConditionalGeneration",
    models="Qwen 2.5 VL",
    what_differs="images and videos of any size: rotary rows and columns, windows, in a Qwen 2 with rotary time, row and column",
    translate=_qwen2_5_vl,
    mappings=(*_qwen_vision_mappings("visual"), *_text_mappings("model", "lm_head")),
    in_memory_mappings=(
        *_qwen_vision_mappings("model.visual"),
        *_text_mappings("model.language_model", "lm_head"),
    ),
    prefix="",
    model_type=VISION_LANGUAGE_MODEL,
)
