"""SmolVLM and Idefics 3: the encoder of SigLIP, of which blocks of patches become one vector, before a Llama."""

from __future__ import annotations

from collections.abc import Mapping

from petatron.config.schema.sections.vision_language import VISION_LANGUAGE_MODEL
from petatron.models.hf.config_translation import Table, Translation
from petatron.models.hf.families.images.clip_and_siglip import siglip_mappings, smolvlm_vision
from petatron.models.hf.families.images.text_model import any_text, text_mappings
from petatron.models.hf.family import Family, ModuleMapping


def _smolvlm(config: Translation) -> None:
    any_text(config, tied_inside=False)
    config.within(
        "vision_config",
        smolvlm_vision,
        Table(
            lambda content: table if isinstance(table := content.get("vision_config"), Mapping) else {},
            lambda keys, spec: {"model_type": "smolvlm_vision", **keys},
        ),
    )
    config.copy("image_token_id", "image_token_id", 128257, needed=True)
    config.copy("vision_merge_size", "scale_factor", 2, needed=True)
    config.always(projector_num_layers=1, projector_bias=False, projector_norm=False, vision_final_norm=True)


SMOLVLM = Family(
    name="smolvlm",
    architecture="SmolVLMForConditionalGeneration",
    models="SmolVLM, SmolVLM 2, Idefics 3",
    what_differs="images: SigLIP, of which blocks of patches become one vector, before a Llama",
    translate=_smolvlm,
    mappings=(
        *siglip_mappings("model.vision_model"),
        ModuleMapping(("projector.out",), "model.connector.modality_projection.proj"),
        *text_mappings("model.text_model", "lm_head"),
    ),
    prefix="",
    model_type=VISION_LANGUAGE_MODEL,
    other_names=("idefics3",),
)
