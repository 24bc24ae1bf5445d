"""Prompts with images: the ids of texts around images, and the patches of these, as a model was trained to read them.

An image is read in two steps. `measure` looks at its header, which says how many tokens and patches it has; `read` decodes it. So what is
too large for the model, or for whoever reads it, is refused before any pixel is decoded.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from petatron.base.errors import DataError
from petatron.config.schema.model import ModelConfig
from petatron.data.image_text.chat_formats import CHAT_FORMATS
from petatron.data.image_text.image_markup import IMAGE_MARKUPS
from petatron.data.image_text.image_prompt_settings import ImagePromptSettings
from petatron.data.image_text.image_text_kind import patch_grid
from petatron.data.image_text.record_encoder import RecordEncoder
from petatron.data.image_text.visual_reader import VisualSize
from petatron.data.images.decode_image import ImageLimits, check_size, decode_image, read_header
from petatron.data.images.image_policies import ImagePolicy, image_policy
from petatron.data.images.patch_grid import PatchGrid
from petatron.data.multimodal.multimodal_tokenizer import IMAGE
from petatron.data.tokenizer import Tokenizer

_DETECTED_MARKUPS = ("qwen2-vl", "smolvlm")
MARK_BEGINS = "\ue000"
"""What a mark begins with that stands for an image in a text, in which nobody else has written it."""
PROMPT_FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
"""What OpenAI's API takes."""


class ImagePrompts:
    """Encodes prompts with images for one model."""

    def __init__(self, model: ModelConfig, tokenizer: Tokenizer, settings: ImagePromptSettings) -> None:
        self._tokenizer, self._grid = tokenizer, patch_grid(model)
        self._policy: ImagePolicy = image_policy(settings.policy, self._grid, model.vision_pixel_mean)
        self.chat_format = settings.chat_format
        self.markup = settings.markup or detect_markup(tokenizer, self._grid)
        self._encoder = RecordEncoder(tokenizer, self._grid, markup=self.markup, chat_format=None)

    @property
    def placeholder(self) -> str:
        """What stands for an image in texts."""
        return IMAGE_MARKUPS[self.markup].placeholder

    def chat_template(self) -> str | None:
        """Returns the chat format that the model was trained with as a template; None without one."""
        return (
            None if self.chat_format is None else CHAT_FORMATS[self.chat_format].chat_template(image_begins=MARK_BEGINS)
        )

    def measure(self, content: bytes, limits: ImageLimits, *, name: str) -> VisualSize:
        """Returns the parts of an image by its header; raises `ImageError` where that shows it to be of no use."""
        check_size(len(content), limits, name)
        header = read_header(io.BytesIO(content), limits, name=name, formats=PROMPT_FORMATS)
        return VisualSize(self._policy.layout((header.height, header.width), name=name))

    def check_patches(self, sizes: Sequence[VisualSize]) -> None:
        """Raises `DataError` for more patches than the model reads."""
        total, most = sum(size.num_patches(self._grid) for size in sizes), self._grid.max_patches
        if most is not None and total > most:
            raise DataError(
                f"The images have {total:,} patches, and the model reads {most:,} of a prompt (--max-patches). Give fewer or smaller "
                "images."
            )

    def num_tokens(self, sizes: Sequence[VisualSize]) -> int:
        """Returns the tokens that images take of a prompt, without what is written around them."""
        return sum(sum(size.features(self._grid)) for size in sizes)

    def read(self, content: bytes, limits: ImageLimits, *, name: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Decodes an image and returns the patches and grids of its parts; raises `ImageError`."""
        image = decode_image(content, limits, name=name, formats=PROMPT_FORMATS)
        parts = self._policy.parts(image, name=name)
        patches = [self._grid.patches_of([part]) for part in parts]
        grids = [self._grid.of_size((part.shape[0], part.shape[1])) for part in parts]
        return np.concatenate(patches), np.array(grids, np.int64).reshape(-1, 3)

    def split(self, text: str) -> list[str]:
        """Returns the texts around the images of a text in which each is written as one, without tiles (by a chat template)."""
        markup = IMAGE_MARKUPS[self.markup]
        surrounded = f"{markup.before}{markup.placeholder}{markup.after}"
        parts = [text] if surrounded == markup.placeholder else text.split(surrounded)
        return [piece for part in parts for piece in part.split(markup.placeholder)]

    def encode(self, texts: Sequence[str], sizes: Sequence[VisualSize]) -> list[int]:
        """Returns the ids of images with texts before, between and after them; raises `RecordError` where a text has an image token."""
        features, layouts = [size.features(self._grid) for size in sizes], [size.layout for size in sizes]
        return self._encoder.prompt_ids(texts, features, layouts)

    def texts_around(self, text: str, num_images: int) -> list[str]:
        """Returns the texts around the `<image>` tags of a prompt; images without any tag are shown before it.

        Raises `DataError` for another number of tags.
        """
        texts = text.split(IMAGE)
        if len(texts) == 1:
            return [""] * num_images + [text]
        if len(texts) != num_images + 1:
            raise DataError(
                f"The prompt has {len(texts) - 1} tags {IMAGE}, and {num_images} images are given. Write one tag for each image, or none "
                "to show them before the text."
            )
        return texts


def detect_markup(tokenizer: Tokenizer, grid: PatchGrid) -> str:
    """Returns the markup whose special tokens a tokenizer has; `plain` if none."""
    for name in _DETECTED_MARKUPS:
        markup = IMAGE_MARKUPS[name]
        texts = [text for text in (markup.placeholder, markup.before) if text]
        ids = [tokenizer.encode(text) for text in texts]
        if ids[0] == [grid.image_token_id] and all(len(token) == 1 for token in ids):
            return name
    return "plain"
