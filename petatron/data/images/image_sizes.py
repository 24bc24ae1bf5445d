"""The sizes that images are scaled to: the formulas of published models, which their positions and token counts depend on."""

from __future__ import annotations

import math
from functools import lru_cache

from petatron.data.images.patch_grid import Size

MAX_ASPECT_RATIO = 200
_LARGEST_SIDE = 4096


def shortest_side_size(size: Size, side: int) -> Size:
    """Returns the size at which the shorter side is `side` (CLIP).

    >>> shortest_side_size((30, 50), 24)
    (24, 40)
    """
    height, width = size
    longer = int(side * max(size) / min(size))
    return (longer, side) if width <= height else (side, longer)


def block_multiple_size(size: Size, block: int, *, min_pixels: int, max_pixels: int) -> Size:
    """Returns the nearest size of whole blocks with a number of pixels in the range (Qwen2-VL).

    >>> block_multiple_size((100, 150), 28, min_pixels=3136, max_pixels=10_000)
    (56, 112)
    """
    height, width = (round(side / block) * block for side in size)
    if height * width > max_pixels:
        shrink = math.sqrt(size[0] * size[1] / max_pixels)
        height, width = (max(block, math.floor(side / shrink / block) * block) for side in size)
    elif height * width < min_pixels:
        grow = math.sqrt(min_pixels / (size[0] * size[1]))
        height, width = (math.ceil(side * grow / block) * block for side in size)
    return height, width


def longest_side_size(size: Size, side: int) -> Size:
    """Returns the size at which the longer side is `side` and the other one even, never beyond 4,096 (Idefics3, SmolVLM).

    >>> longest_side_size((30, 50), 100), longest_side_size((9, 400), 100)
    ((60, 100), (2, 100))
    """
    ratio = size[1] / size[0]
    if size[1] >= size[0]:
        height, width = _even(int(side / ratio)), side
    else:
        height, width = side, _even(int(side * ratio))
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > _LARGEST_SIDE:
        height, width = int(_LARGEST_SIDE / ratio), _LARGEST_SIDE
    elif height > width and height > _LARGEST_SIDE:
        height, width = _LARGEST_SIDE, int(_LARGEST_SIDE * ratio)
    return max(height, 1), max(width, 1)


def tile_multiple_size(size: Size, tile: int) -> Size:
    """Returns the size of whole tiles that an image is scaled up to (Idefics3, SmolVLM).

    >>> tile_multiple_size((60, 100), 32)
    (96, 128)
    """
    ratio = size[1] / size[0]
    if size[1] >= size[0]:
        width = _multiple(size[1], tile)
        return _multiple(int(width / ratio), tile), width
    height = _multiple(size[0], tile)
    return height, _multiple(int(height * ratio), tile)


@lru_cache(maxsize=1024)
def nearest_ratio_tiles(size: Size, tile: int, *, min_tiles: int, max_tiles: int) -> tuple[int, int]:
    """Returns the rows and columns of tiles whose aspect ratio is the nearest (InternVL, Megatron).

    Of equal ratios the one with more tiles is taken, unless the image has less than half of their pixels.

    >>> nearest_ratio_tiles((100, 310), 32, min_tiles=1, max_tiles=6)
    (1, 3)
    """
    ratio, area = size[1] / size[0], size[0] * size[1]
    nearest, least = (1, 1), math.inf
    for columns, rows in _arrangements(min_tiles, max_tiles):
        difference = abs(ratio - columns / rows)
        is_nearer = difference < least
        if is_nearer or (difference == least and area > 0.5 * tile * tile * columns * rows):
            nearest, least = (rows, columns), difference
    return nearest


@lru_cache(maxsize=16)
def _arrangements(min_tiles: int, max_tiles: int) -> list[tuple[int, int]]:
    sides = range(1, max_tiles + 1)
    every = [(columns, rows) for columns in sides for rows in sides if min_tiles <= columns * rows <= max_tiles]
    return sorted(every, key=lambda pair: pair[0] * pair[1])


def _even(side: int) -> int:
    return side + side % 2


def _multiple(side: int, of: int) -> int:
    return -(-side // of) * of
