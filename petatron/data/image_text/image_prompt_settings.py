"""How the images of prompts are shown and written: as the user says, else as the model was trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from petatron.base.errors import raise_problems
from petatron.config.parse_name_value import parse_named_settings
from petatron.config.schema.model import ModelConfig
from petatron.data.image_text.image_text_settings import FROM_MODEL, NO_CHAT, SETTINGS_FLAG, ImageTextSettings
from petatron.data.image_text.processor_settings import read_processor
from petatron.data.images.image_policies import PolicySettings

_OF_POLICY = (
    "images",
    "resample",
    "min_pixels",
    "max_pixels",
    "longest_side",
    "max_tiles",
    "use_thumbnail",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePromptSettings:
    """markup: None for what the tokenizer's special tokens show. chat_format: of models without a chat template; None: there is none."""

    policy: PolicySettings
    markup: str | None = None
    chat_format: str | None = None


def image_prompt_settings(
    folder: Path, model: ModelConfig, *, given: Sequence[str] = (), trained: Sequence[str] = ()
) -> ImagePromptSettings:
    """Returns the settings of a model. folder: of its files, with perhaps those of an image processor.

    given, trained: the `--dataset-settings` of the user and of the run that made the model; the user's come first.
    """
    names = {setting.partition("=")[0] for setting in given}
    settings = [*given, *(setting for setting in trained if setting.partition("=")[0] not in names)]
    names |= {setting.partition("=")[0] for setting in trained}
    values = parse_named_settings(ImageTextSettings, settings, SETTINGS_FLAG, "--dataset-type image-text")
    chosen = ImageTextSettings(**values)
    raise_problems(chosen.setting_problems())
    processor = None if names & set(_OF_POLICY) else read_processor(folder, model)
    markup = None if processor is None else processor.markup
    if chosen.images == FROM_MODEL:
        chosen = replace(chosen, images="crop" if model.vision_position_embedding_type == "learned" else "dynamic")
    return ImagePromptSettings(
        policy=chosen.policy if processor is None else processor.policy,
        markup=chosen.image_markup if "image_markup" in names else markup,
        chat_format=None if chosen.chat_format == NO_CHAT else chosen.chat_format,
    )
