"""Reads the image files of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from petatron.data.image_text.image_prompt import ImagePrompts
from petatron.data.images.decode_image import ImageLimits, read_image_bytes
from petatron.infer.prompt_images import PromptImages


def read_prompt_images(prompts: ImagePrompts, text: str, paths: Sequence[Path]) -> tuple[list[int], PromptImages]:
    """Returns the ids of a prompt with `<image>` tags, and its images; raises `DataError` for what cannot be read."""
    limits, names = ImageLimits(), [str(path) for path in paths]
    texts = prompts.texts_around(text, len(paths))
    contents = [read_image_bytes(path, limits, name=name) for path, name in zip(paths, names, strict=True)]
    named = list(zip(contents, names, strict=True))
    sizes = [prompts.measure(content, limits, name=name) for content, name in named]
    prompts.check_patches(sizes)
    ids = prompts.encode(texts, sizes)
    read = [prompts.read(content, limits, name=name) for content, name in named]
    patches, grids = zip(*read, strict=True)
    return ids, PromptImages(np.concatenate(patches), np.concatenate(grids))
