"""How an image becomes what the vision encoder reads: one image of a fixed size, one of its own size, or tiles.

    crop     scaled until the shorter side fits, and cut around its middle            CLIP
    squash   scaled to a square, whatever its ratio                                   SigLIP
    pad      put on a square of the mean color, and scaled                            LLaVA 1.5
    dynamic  scaled to whole blocks of patches, within a range of pixels              Qwen2-VL
    tiles    scaled to whole tiles, which are cut; a thumbnail follows                Idefics3, SmolVLM
    ratio    scaled to the arrangement of tiles that is nearest in ratio, and cut     InternVL, Megatron

All scaling is Pillow's, on pixels of 8 bits, so that the pixels are those of transformers' processors with Pillow bit by bit; those with
torchvision round differently.

Each has a layout, which needs the image's size and not its pixels: a sample's length is known before an image is decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np

from petatron.data.images.decode_image import Rgb
from petatron.data.images.image_error import ImageError
from petatron.data.images.image_sizes import (
    MAX_ASPECT_RATIO,
    block_multiple_size,
    longest_side_size,
    nearest_ratio_tiles,
    shortest_side_size,
    tile_multiple_size,
)
from petatron.data.images.patch_grid import PatchGrid, Size
from petatron.data.images.pillow import load_pillow

ResampleName = Literal["bilinear", "bicubic", "lanczos"]
FixedName = Literal["crop", "squash", "pad"]
PolicyName = Literal["crop", "squash", "pad", "dynamic", "tiles", "ratio"]
POLICY_NAMES: tuple[PolicyName, ...] = get_args(PolicyName)
RESAMPLE_NAMES: tuple[ResampleName, ...] = get_args(ResampleName)


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """The sizes of an image's parts: all of it, or tiles by rows and then perhaps a thumbnail. rows and columns are 0 without tiles."""

    sizes: tuple[Size, ...]
    rows: int = 0
    columns: int = 0

    @property
    def has_thumbnail(self) -> bool:
        return len(self.sizes) > self.rows * self.columns > 0


class ImagePolicy(Protocol):
    """What is done with every image."""

    def layout(self, size: Size, *, name: str) -> ImageLayout:
        """Returns the parts of an image of a size; raises `ImageError` for one that has none."""
        ...

    def parts(self, image: Rgb, *, name: str) -> list[Rgb]:
        """Returns the parts of an image, of the sizes of its layout."""
        ...

    def frame_size(self, size: Size, num_frames: int, *, name: str) -> Size:
        """Returns the size of all frames of a video whose first one has a size."""
        ...

    def frames(self, images: Sequence[Rgb], *, name: str) -> list[Rgb]:
        """Returns the frames of a video, each in one part."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedImages:
    """Images of one size."""

    image_size: int
    how: FixedName = "crop"
    resample: ResampleName = "bicubic"
    background: tuple[int, int, int] = (0, 0, 0)
    """What `pad` fills with."""

    def layout(self, size: Size, *, name: str) -> ImageLayout:
        return ImageLayout(((self.image_size, self.image_size),))

    def parts(self, image: Rgb, *, name: str) -> list[Rgb]:
        side = self.image_size
        if self.how == "squash":
            return [scaled(image, (side, side), self.resample)]
        if self.how == "pad":
            image = _on_square(image, self.background)
        height, width = shortest_side_size(_size(image), side)
        top, left = (height - side) // 2, (width - side) // 2
        return [scaled(image, (height, width), self.resample)[top : top + side, left : left + side]]

    def frame_size(self, size: Size, num_frames: int, *, name: str) -> Size:
        return self.image_size, self.image_size

    def frames(self, images: Sequence[Rgb], *, name: str) -> list[Rgb]:
        return [self.parts(image, name=name)[0] for image in images]


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicImages:
    """Images of any size of whole blocks. max_video_pixels: those of all patches in time together, over all frames."""

    block: int
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    max_video_pixels: int = 28 * 28 * 16_384
    temporal_patch_size: int = 1
    resample: ResampleName = "bicubic"

    def layout(self, size: Size, *, name: str) -> ImageLayout:
        return ImageLayout((self._scaled_size(size, self.max_pixels, name),))

    def parts(self, image: Rgb, *, name: str) -> list[Rgb]:
        return [scaled(image, self._scaled_size(_size(image), self.max_pixels, name), self.resample)]

    def frame_size(self, size: Size, num_frames: int, *, name: str) -> Size:
        share = self.max_video_pixels * self.temporal_patch_size // num_frames
        return self._scaled_size(size, max(min(self.max_pixels, share), int(1.05 * self.min_pixels)), name)

    def frames(self, images: Sequence[Rgb], *, name: str) -> list[Rgb]:
        size = self.frame_size(_size(images[0]), len(images), name=name)
        return [scaled(image, size, self.resample) for image in images]

    def _scaled_size(self, size: Size, max_pixels: int, name: str) -> Size:
        if max(size) > MAX_ASPECT_RATIO * min(size):
            reason = f"has {size[1]:,} x {size[0]:,} pixels: one side is more than {MAX_ASPECT_RATIO} times the other"
            raise ImageError(name, "unsupported", reason)
        return block_multiple_size(size, self.block, min_pixels=self.min_pixels, max_pixels=max_pixels)


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledImages:
    """Tiles of an image whose longer side is `longest_side`, and a thumbnail; without `splits` the thumbnail alone."""

    tile_size: int
    longest_side: int
    splits: bool = True
    resample: ResampleName = "lanczos"

    def layout(self, size: Size, *, name: str) -> ImageLayout:
        tile = (self.tile_size, self.tile_size)
        canvas = self._canvas(size)
        if not self.splits or canvas == tile:
            return ImageLayout((tile,))
        rows, columns = (side // self.tile_size for side in canvas)
        return ImageLayout((tile,) * (rows * columns + 1), rows, columns)

    def parts(self, image: Rgb, *, name: str) -> list[Rgb]:
        tile = (self.tile_size, self.tile_size)
        image = scaled(image, longest_side_size(_size(image), self.longest_side), self.resample)
        if not self.splits:
            return [scaled(image, tile, self.resample)]
        image = scaled(image, tile_multiple_size(_size(image), self.tile_size), self.resample)
        return [image] if _size(image) == tile else [*_cut(image, self.tile_size), scaled(image, tile, self.resample)]

    def frame_size(self, size: Size, num_frames: int, *, name: str) -> Size:
        return self.tile_size, self.tile_size

    def frames(self, images: Sequence[Rgb], *, name: str) -> list[Rgb]:
        return [scaled(image, (self.tile_size, self.tile_size), self.resample) for image in images]

    def _canvas(self, size: Size) -> Size:
        return tile_multiple_size(longest_side_size(size, self.longest_side), self.tile_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioTiles:
    """At most `max_tiles` tiles in the arrangement whose ratio is nearest to the image's; more than one may have a thumbnail after them."""

    tile_size: int
    max_tiles: int
    min_tiles: int = 1
    has_thumbnail: bool = True
    resample: ResampleName = "bicubic"

    def layout(self, size: Size, *, name: str) -> ImageLayout:
        rows, columns = self._arrangement(size)
        count = rows * columns
        tile = (self.tile_size, self.tile_size)
        if count == 1:
            return ImageLayout((tile,))
        return ImageLayout((tile,) * (count + self.has_thumbnail), rows, columns)

    def parts(self, image: Rgb, *, name: str) -> list[Rgb]:
        rows, columns = self._arrangement(_size(image))
        canvas = scaled(image, (rows * self.tile_size, columns * self.tile_size), self.resample)
        tiles = _cut(canvas, self.tile_size)
        if self.has_thumbnail and len(tiles) > 1:
            tiles.append(scaled(image, (self.tile_size, self.tile_size), self.resample))
        return tiles

    def frame_size(self, size: Size, num_frames: int, *, name: str) -> Size:
        return self.tile_size, self.tile_size

    def frames(self, images: Sequence[Rgb], *, name: str) -> list[Rgb]:
        return [scaled(image, (self.tile_size, self.tile_size), self.resample) for image in images]

    def _arrangement(self, size: Size) -> tuple[int, int]:
        return nearest_ratio_tiles(size, self.tile_size, min_tiles=self.min_tiles, max_tiles=self.max_tiles)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """The settings of any policy; resample None is the policy's own. max_pixels are those of an image that is shown in its own size."""

    policy: PolicyName = "crop"
    resample: ResampleName | None = None
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    longest_side: int = 1456
    max_tiles: int = 12
    splits: bool = True
    has_thumbnail: bool = True


def image_policy(settings: PolicySettings, grid: PatchGrid, mean: Sequence[float] = (0.0, 0.0, 0.0)) -> ImagePolicy:
    """Returns the policy of settings; `mean` is that of pixels between 0 and 1.

    >>> grid = PatchGrid(patch_size=14, image_size=28, image_token_id=0)
    >>> image_policy(PolicySettings(policy="squash"), grid).layout((9, 9), name="a").sizes
    ((28, 28),)
    """
    resample: dict[str, Any] = {} if settings.resample is None else {"resample": settings.resample}
    if settings.policy == "dynamic":
        return DynamicImages(
            block=grid.block,
            min_pixels=settings.min_pixels,
            max_pixels=settings.max_pixels,
            temporal_patch_size=grid.temporal_patch_size,
            **resample,
        )
    if settings.policy == "tiles":
        return TiledImages(
            tile_size=grid.image_size, longest_side=settings.longest_side, splits=settings.splits, **resample
        )
    if settings.policy == "ratio":
        return RatioTiles(
            tile_size=grid.image_size,
            max_tiles=settings.max_tiles,
            has_thumbnail=settings.has_thumbnail,
            **resample,
        )
    red, green, blue = (int(channel * 255) for channel in mean)
    return FixedImages(image_size=grid.image_size, how=settings.policy, background=(red, green, blue), **resample)


def scaled(image: Rgb, size: Size, resample: ResampleName) -> Rgb:
    """Scales an image with Pillow."""
    if _size(image) == size:
        return image
    pillow = load_pillow()
    return np.asarray(pillow.fromarray(image).resize(size[::-1], pillow.Resampling[resample.upper()]))


def _size(image: Rgb) -> Size:
    height, width = image.shape[:2]
    return height, width


def _cut(image: Rgb, tile: int) -> list[Rgb]:
    rows, columns = (side // tile for side in _size(image))
    return [
        image[row * tile : (row + 1) * tile, column * tile : (column + 1) * tile]
        for row in range(rows)
        for column in range(columns)
    ]


def _on_square(image: Rgb, background: tuple[int, int, int]) -> Rgb:
    height, width = _size(image)
    side = max(height, width)
    square = np.empty((side, side, 3), np.uint8)
    square[:] = background
    top, left = (side - height) // 2, (side - width) // 2
    square[top : top + height, left : left + width] = image
    return square
