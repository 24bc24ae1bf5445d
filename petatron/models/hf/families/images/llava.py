"""LLaVA: the encoder of CLIP or SigLIP, and an MLP before a Llama, a Mistral or a Qwen.

What transformers builds and does not compute, the encoder's last layers and the norm after them, is neither read nor written: a folder that
is written has an encoder that ends where the decoder reads it.
"""

from __future__ import annotations

from petatron.base.errors import Problem
from petatron.config.schema.model import ModelConfig
from petatron.config.schema.sections.vision_language import VISION_LANGUAGE_MODEL
from petatron.models.hf.config_translation import OTHER_MODEL_FIX, Keys, Settings, Translation
from petatron.models.hf.families.images.clip_and_siglip import clip, clip_or_siglip, headless_siglip, siglip_mappings
from petatron.models.hf.families.images.text_model import any_text, text_mappings
from petatron.models.hf.families.images.vision_table import plain_activation
from petatron.models.hf.family import Family, ModuleMapping
from petatron.models.model_spec import ModelSpec


def _llava(config: Translation) -> None:
    any_text(config, tied_inside=True)
    clip_or_siglip(config, {"clip_vision_model": clip, "siglip_vision_model": headless_siglip}, "clip_vision_model")
    config.copy("image_token_id", "image_token_index", 32000, needed=True)
    config.copy("projector_bias", "multimodal_projector_bias", True)
    plain_activation(config, "projector_activation", "projector_hidden_act", "gelu")
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


LLAVA = Family(
    name="llava",
    architecture="LlavaForConditionalGeneration",
    models="LLaVA 1.5",
    what_differs="images: CLIP or SigLIP and an MLP before a Llama, Mistral or Qwen",
    translate=_llava,
    mappings=(
        *siglip_mappings("vision_tower"),
        ModuleMapping(("projector.up",), "multi_modal_projector.linear_1"),
        ModuleMapping(("projector.out",), "multi_modal_projector.linear_2"),
        *text_mappings("language_model.model", "language_model.lm_head"),
    ),
    in_memory_mappings=(
        *siglip_mappings("model.vision_tower"),
        ModuleMapping(("projector.up",), "model.multi_modal_projector.linear_1"),
        ModuleMapping(("projector.out",), "model.multi_modal_projector.linear_2"),
        *text_mappings("model.language_model", "lm_head"),
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
