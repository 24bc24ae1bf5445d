"""The images of a prompt: their patches, and what a request says that its model cannot read."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from petatron.base.errors import DataError
from petatron.config.required_settings import required
from petatron.config.schema.model import ModelConfig
from petatron.config.schema.sections.vision_language import VISION_LANGUAGE_MODEL
from petatron.models.image_patches import token_coordinates
from petatron.models.image_text_batch import image_vectors


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """Images in the order of a prompt: `patches` [P, pixels] of all of them, and `grids` [images, 3] of time, rows and columns of patches.

    >>> images = PromptImages(np.zeros((4, 12), np.uint8), np.array([[1, 2, 2]]))
    >>> PromptImages.from_json(images.to_json()).grids.tolist()
    [[1, 2, 2]]
    """

    patches: NDArray[np.uint8]
    grids: NDArray[np.int64]

    @classmethod
    def none(cls, config: ModelConfig) -> PromptImages:
        """The images of a prompt without any."""
        width = 3 * config.vision_temporal_patch_size * config.vision_patch_size**2
        return cls(np.empty((0, width), np.uint8), np.empty((0, 3), np.int64))

    def to_json(self) -> dict[str, Any]:
        """Returns what ranks send each other."""
        data = base64.b64encode(self.patches.tobytes()).decode()
        return {"patches": data, "shape": list(self.patches.shape), "grids": self.grids.tolist()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> PromptImages:
        data = np.frombuffer(base64.b64decode(content["patches"]), np.uint8).reshape(content["shape"])
        return cls(data, np.array(content["grids"], np.int64).reshape(-1, 3))

    @property
    def digest(self) -> str:
        """Differs for other images: prompts with equal tokens share what was computed of them only with equal images."""
        content = hashlib.blake2b(self.patches.tobytes(), digest_size=16)
        content.update(self.grids.tobytes())
        return content.hexdigest()

    def check(self, prompt_ids: Sequence[int], config: ModelConfig) -> None:
        """Raises `DataError` if they are not those of a prompt, or more than the model was built for."""
        merge, places = config.vision_merge_size, prompt_ids.count(required("image_token_id", config.image_token_id))
        odd = [grid for grid in self.grids.tolist() if min(grid) < 1 or grid[1] % merge or grid[2] % merge]
        if odd:
            raise DataError(f"An image of {odd[0]} patches has no blocks of {merge} x {merge} of them.")
        vectors = sum(image_vectors(grid, config) for grid in self.grids)
        if places != vectors:
            raise DataError(
                f"The prompt has {places} image tokens ({config.image_token_id}), and its {len(self.grids)} images need {vectors}. "
                "Each vector of an image takes the place of one."
            )
        width = 3 * config.vision_temporal_patch_size * config.vision_patch_size**2
        count = int(self.grids.prod(axis=1).sum())
        if self.patches.shape != (count, width):
            raise DataError(
                f"The patches of the prompt's images are {list(self.patches.shape)}, and should be {[count, width]}."
            )
        taken, most = count + len(self.grids) * config.vision_class_token, required("max_patches", config.max_patches)
        if taken > most:
            raise DataError(
                f"The prompt's images have {taken} patches, and the model reads {most} (--max-patches). "
                "Give fewer or smaller images, or load the model with a larger one."
            )

    def coordinates(self, tokens: Sequence[int], config: ModelConfig) -> NDArray[np.int64] | None:
        """Returns time, row and column [3, S] of the tokens of a prompt; None: the model has positions alone."""
        if not config.mrope_section:
            return None
        is_image = np.array(tokens) == config.image_token_id
        merge, step = config.vision_merge_size, config.video_time_step
        return token_coordinates(is_image, self.grids, merge=merge, time_step=step)


def why_no_images(config: ModelConfig, *, pipeline_stages: int = 1) -> str | None:
    """Returns why a model takes no images; None: it does."""
    if config.model_type != VISION_LANGUAGE_MODEL:
        return "This model reads no images. Serve one of --model-type vlm, or leave them out."
    if pipeline_stages > 1:
        return "Images are encoded on one pipeline stage. Load the model with --pp 1, perhaps with more --tp."
    return None


def check_prompt_images(
    prompt_ids: Sequence[int], images: PromptImages | None, config: ModelConfig, *, pipeline_stages: int = 1
) -> None:
    """Raises `DataError` if a model cannot read the images of a prompt, or if a prompt of its tokens needs others."""
    if images is not None and (reason := why_no_images(config, pipeline_stages=pipeline_stages)) is not None:
        raise DataError(reason)
    if config.model_type == VISION_LANGUAGE_MODEL:
        (images or PromptImages.none(config)).check(list(prompt_ids), config)
