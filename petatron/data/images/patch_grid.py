"""What the data of a vision-language model is made for: how its vision encoder cuts images into patches, and what they are in the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Size = tuple[int, int]
"""Height and width, in pixels."""
Grid = tuple[int, int, int]
"""Time, height and width, in patches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchGrid:
    """Patches of an image, and the features that they become: one of merge x merge patches.

    image_size: height and width of images where they have one size, and of tiles. max_patches: those of a sample at most, with
    `extra_patches` for each image (a class token); None without a limit.

    >>> grid = PatchGrid(patch_size=14, merge_size=2, image_size=56, image_token_id=9)
    >>> grid.of_size((56, 84)), grid.num_features((1, 4, 6))
    ((1, 4, 6), 6)
    """

    patch_size: int
    image_size: int
    image_token_id: int
    temporal_patch_size: int = 1
    merge_size: int = 1
    channels: int = 3
    max_patches: int | None = None
    extra_patches: int = 0

    @property
    def block(self) -> int:
        """Pixels along a side of what becomes one feature."""
        return self.patch_size * self.merge_size

    @property
    def pixels_per_patch(self) -> int:
        return self.channels * self.temporal_patch_size * self.patch_size**2

    def of_size(self, size: Size, num_frames: int = 1) -> Grid:
        """Returns the patches of an image; rows and columns of pixels that fill none are left out, as a convolution does."""
        height, width = (side // self.block * self.merge_size for side in size)
        return -(-num_frames // self.temporal_patch_size), height, width

    def num_features(self, grid: Grid) -> int:
        """Returns the features of an image, and so its tokens in the text."""
        return grid[0] * grid[1] * grid[2] // self.merge_size**2

    def num_patches(self, grid: Grid) -> int:
        """Returns what an image counts toward `max_patches`."""
        return grid[0] * grid[1] * grid[2] + self.extra_patches

    def patches_of(self, frames: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
        """Cuts frames of one size, each [height, width, channels], into patches [patches, channels x frames x rows x columns].

        Blocks of merge x merge patches follow one another. The last frame is repeated until frames fill a patch.
        """
        frames = [*frames, *[frames[-1]] * (-len(frames) % self.temporal_patch_size)]
        height, width = frames[0].shape[:2]
        time, rows, columns = self.of_size((height, width), len(frames))
        patch, merge = self.patch_size, self.merge_size
        pixels = np.stack([frame[: rows * patch, : columns * patch] for frame in frames])
        blocks = pixels.reshape(
            time,
            self.temporal_patch_size,
            rows // merge,
            merge,
            patch,
            columns // merge,
            merge,
            patch,
            self.channels,
        )
        return blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(time * rows * columns, self.pixels_per_patch)
