"""Made-up images and texts, for `--mock-data`: images of several sizes, with a text that depends on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from petatron.config.required_settings import required
from petatron.config.schema.model import ModelConfig
from petatron.data.dataset_kinds import DatasetRequest
from petatron.data.index_cache import fingerprint

_SPLITS = {"train": 0, "valid": 1, "test": 2}


@dataclass(frozen=True, slots=True)
class MockImages:
    """Samples of up to two images, as many as fit, and text; sample i is a function of the seed and i."""

    model: ModelConfig
    request: DatasetRequest

    @property
    def fingerprint(self) -> str:
        request, model = self.request, self.model
        sizes = [
            model.vision_image_size,
            model.vision_patch_size,
            model.vision_merge_size,
            model.vision_temporal_patch_size,
        ]
        key = {"kind": "mock images", "split": request.split, "seed": request.seed, "seq_length": request.seq_length}
        return fingerprint({**key, "vocab_size": request.vocab_size, "sizes": sizes, "max_patches": model.max_patches})

    def __len__(self) -> int:
        return self.request.num_samples

    def __getitem__(self, index: int) -> Mapping[str, NDArray[Any]]:
        model, length = self.model, self.request.seq_length
        random = np.random.default_rng((self.request.seed, _SPLITS[self.request.split], index))
        image_token = required("image_token_id", model.image_token_id)
        vocabulary = self.request.vocab_size or image_token
        # Small ids are frequent, so that there is something to learn.
        text = (vocabulary * random.random(length + 1) ** 3).astype(np.int64)
        text[text == image_token] = (image_token + 1) % vocabulary
        grids, begin, patches = list[tuple[int, int, int]](), int(random.integers(0, 3)), 0
        for _ in range(int(random.integers(0, 3))):
            grid = self._grid(random)
            count, merged = int(np.prod(grid)), model.vision_merge_size**2
            taken = patches + count + model.vision_class_token
            if begin + count // merged + 1 > length or taken > required("max_patches", model.max_patches):
                break
            text[begin : begin + count // merged] = image_token
            begin += count // merged + int(random.integers(0, 2))
            patches = taken
            grids.append(grid)
        total = sum(int(np.prod(grid)) for grid in grids)
        width = 3 * model.vision_temporal_patch_size * model.vision_patch_size**2
        return {
            "tokens": text,
            "loss_mask": (text != image_token).astype(np.float32),
            "patches": random.integers(0, 256, (total, width), dtype=np.uint8),
            "grids": np.array(grids, np.int64).reshape(-1, 3),
        }

    def _grid(self, random: np.random.Generator) -> tuple[int, int, int]:
        """Returns the size of an image: any with rotary positions, else that of the table."""
        model, merge = self.model, self.model.vision_merge_size
        if model.vision_position_embedding_type == "learned":
            side = model.vision_image_size // model.vision_patch_size
            return 1, side, side
        time = 1 if model.vision_temporal_patch_size == 1 else int(random.integers(1, 3))
        rows, columns = random.integers(1, 4, 2)
        return time, int(rows) * merge, int(columns) * merge
