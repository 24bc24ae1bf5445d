"""Makes a batch of samples of images and text: the patches of all images of a micro-batch are one sequence.

A sample has `tokens` and `loss_mask` [S + 1], 1 where a token is to be predicted; `patches` [P, pixels] of uint8, those of its images one
after the other (`image_patches.py`); and `grids` [images, 3]. The places of an image's vectors have the image token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from petatron.base.errors import DataError
from petatron.config.required_settings import required
from petatron.config.schema.model import ModelConfig
from petatron.config.schema.sections.vision_language import PATCH_BLOCKS
from petatron.kernels.attention.document_layout import Documents
from petatron.layers.vision.patch_embedding import CLASS_ROW
from petatron.models.batch import Batch
from petatron.models.image_patches import ArrangedImage, arrange_image, table_rows, token_coordinates

PATCHES, PATCH_ROWS, PATCH_COORDINATES = "patches", "patch_rows", "patch_coordinates"
IMAGE_INDEX = "image_index"
"""For each token the index of its vector, of all images of the micro-batch; -1 where it is text."""

Sample = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class _EncodedImages:
    """The patches of a micro-batch: what the encoder reads of each, and the lengths of what attends to itself."""

    patches: list[NDArray[np.uint8]]
    rows: list[NDArray[np.int64]]
    coordinates: list[NDArray[np.int64]]
    frames: list[int]
    windows: list[int]

    @property
    def num_patches(self) -> int:
        return sum(len(patches) for patches in self.patches)


def make_image_text_batch(samples: Sequence[Sample], config: ModelConfig) -> Batch:
    """Makes the batch of a micro-batch's samples, on the host; raises `DataError` for images that are not those of the text."""
    tokens = np.stack([sample["tokens"] for sample in samples])
    counted = np.stack([sample["loss_mask"] for sample in samples])
    index_BS = np.full(tokens[:, :-1].shape, -1, np.int64)
    encoded = _EncodedImages([], [], [], [], [])
    for row, sample in enumerate(samples):
        index_BS[row] = _add_images(encoded, sample, config)
    arrays = {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": counted[:, 1:].astype(np.float32),
        IMAGE_INDEX: index_BS,
        **_patch_arrays(encoded, config),
    }
    if config.mrope_section:
        arrays["positions"] = np.stack([_positions(sample, config) for sample in samples])
    length = arrays[PATCHES].shape[1]
    return Batch(
        arrays={name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in arrays.items()},
        sequence_dims={PATCHES: None, PATCH_ROWS: None, PATCH_COORDINATES: None},
        source_documents=_documents(encoded.frames, length),
        window_documents=_documents(encoded.windows, length) if config.vision_window_size is not None else None,
    )


def image_vectors(grid: Sequence[int], config: ModelConfig) -> int:
    """Returns how many vectors, and so tokens, an image of a grid of patches has in the text."""
    return int(np.prod(grid)) // config.vision_merge_size**2


def arrange(grid: Sequence[int], config: ModelConfig) -> ArrangedImage:
    """Arranges an image as the encoder of a model reads it."""
    merge, window = config.vision_merge_size, config.vision_window_size
    blocks = None if window is None else window // (config.vision_patch_size * merge)
    return arrange_image(grid, merge=merge, window=blocks)


def _add_images(encoded: _EncodedImages, sample: Sample, config: ModelConfig) -> NDArray[np.int64]:
    """Adds a sample's patches, and returns the index of each token's vector."""
    is_image = sample["tokens"][:-1] == required("image_token_id", config.image_token_id)
    grids, merged, first_patch = sample["grids"], config.vision_merge_size**2, 0
    indices = [np.empty(0, np.int64)]
    for grid in grids:
        image, count = arrange(grid, config), int(np.prod(grid))
        pixels = sample["patches"][first_patch : first_patch + count][image.order]
        first_patch += count
        # A class token is not merged, so that it is the first patch of its image.
        indices.append(encoded.num_patches // merged + config.vision_class_token + image.vectors)
        rows = np.empty(0, np.int64)
        if config.vision_position_embedding_type == "learned":
            rows = table_rows(image.coordinates, grid, config.vision_image_size // config.vision_patch_size)
        frames, windows = list(image.frames), list(image.windows)
        if config.vision_class_token:
            pixels = np.concatenate([np.zeros_like(pixels[:1]), pixels])
            rows = np.concatenate([[CLASS_ROW], rows + 1])
            frames = [count + 1]
        encoded.patches.append(pixels)
        encoded.rows.append(rows)
        encoded.coordinates.append(image.coordinates)
        encoded.frames.extend(frames)
        encoded.windows.extend(windows)
    index, places = np.full(len(is_image), -1, np.int64), np.concatenate(indices)
    if is_image.sum() != len(places) or first_patch != len(sample["patches"]):
        raise DataError(
            f"A text has {is_image.sum()} image tokens, and its images are {len(places)} vectors of {first_patch} patches "
            f"({len(sample['patches'])} given). Each vector takes the place of one token."
        )
    index[is_image] = places
    return index


def _patch_arrays(encoded: _EncodedImages, config: ModelConfig) -> dict[str, NDArray[Any]]:
    """Returns the arrays of all patches, padded; padding is in documents of its own, and nothing refers to it."""
    shared = PATCH_BLOCKS * config.vision_merge_size**2
    length = max(1, -(-encoded.num_patches // shared)) * shared
    missing = length - encoded.num_patches
    width = 3 * config.vision_temporal_patch_size * config.vision_patch_size**2
    patches = np.concatenate([*encoded.patches, np.zeros((missing, width), np.uint8)])
    arrays: dict[str, NDArray[Any]] = {PATCHES: patches[None]}
    if config.vision_position_embedding_type == "learned":
        # Not a class token's row: padding is like patches.
        padding = np.full(missing, int(config.vision_class_token), np.int64)
        arrays[PATCH_ROWS] = np.concatenate([*encoded.rows, padding])[None]
    else:
        padding = np.zeros((2, missing), np.int64)
        arrays[PATCH_COORDINATES] = np.concatenate([*encoded.coordinates, padding], axis=1)[None]
    return arrays


def _documents(lengths: Sequence[int], total: int) -> Documents:
    ends = np.cumsum([0, *lengths])
    starts = np.repeat(ends[:-1], lengths)
    padding = np.arange(total) >= ends[-1]
    starts = np.concatenate([starts, np.full(total - ends[-1], ends[-1])])
    return Documents.build(starts[None].astype(np.int64), is_padding_BS=padding[None])


def _positions(sample: Sample, config: ModelConfig) -> NDArray[np.int64]:
    is_image = sample["tokens"][:-1] == config.image_token_id
    return token_coordinates(
        is_image, sample["grids"], merge=config.vision_merge_size, time_step=config.video_time_step
    )
