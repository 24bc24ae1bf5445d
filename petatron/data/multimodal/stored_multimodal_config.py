"""The settings of a MultimodalTokenizer whose options a model folder stores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from petatron.config.schema.data import TokenizerConfig
from petatron.config.schema.sections.tokenizer_options import MULTIMODAL
from petatron.data.multimodal.multimodal_tokenizer import IMAGE_TAGS
from petatron.data.multimodal.prompt_formats import PROMPT_FORMATS


def stored_multimodal_config(folder: Path, stored: Mapping[str, Any]) -> TokenizerConfig:
    """Returns the settings; raises `ValueError` or `TypeError` for options that are none."""
    tokens, chosen, tags = stored["special_tokens"], stored["prompt_format"], stored["image_tag_type"]
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise TypeError("its special tokens are no list of texts")
    if chosen not in (None, *PROMPT_FORMATS) or tags not in IMAGE_TAGS:
        raise ValueError(f"its prompt format {chosen!r} or its image tags {tags!r} are not known")
    return TokenizerConfig(
        tokenizer_type=MULTIMODAL,
        tokenizer_model=str(folder),
        tokenizer_prompt_format=chosen,
        image_tag_type=tags,
        special_tokens=tuple(tokens),
        force_system_message=stored["force_system_message"] is True,
    )
