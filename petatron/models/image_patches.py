"""How the patches of images are arranged: their order, windows, positions, and the vectors that become of them. All on the host.

An image is a grid of time x height x width patches. Samples have patches block by block: the merge x merge patches that become one vector
are neighbors, and blocks are in raster order. Where layers have windows, the blocks of a window are neighbors too, so that windows and
images are documents of one sequence, and nothing is reordered on the device. The vectors are found by their index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from petatron.base.errors import DataError

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ArrangedImage:
    """One image in the order that the encoder reads it.

    order: of its patches, by their index in the sample's order. frames: the patches of each frame. windows: those of each window.
    vectors: for each block in raster order, its place among the image's blocks.
    coordinates: [2, P], row and column of each patch in `order`.
    """

    order: IntArray
    frames: IntArray
    windows: IntArray
    vectors: IntArray
    coordinates: IntArray


def arrange_image(grid: Sequence[int], *, merge: int, window: int | None) -> ArrangedImage:
    """Arranges an image of time x height x width patches; `window` is the rows and columns of blocks of a window, None without windows.

    >>> image = arrange_image((1, 2, 4), merge=1, window=2)
    >>> image.order.tolist(), image.windows.tolist(), image.vectors.tolist()
    ([0, 1, 4, 5, 2, 3, 6, 7], [4, 4], [0, 1, 4, 5, 2, 3, 6, 7])
    """
    time, height, width = (int(size) for size in grid)
    if min(time, height, width) < 1 or height % merge or width % merge:
        raise DataError(f"An image of {time} x {height} x {width} patches has no blocks of {merge} x {merge} of them.")
    rows, columns = height // merge, width // merge
    blocks = np.arange(time * rows * columns).reshape(time, rows, columns)
    size = max(rows, columns) if window is None else window
    parts = [
        blocks[frame, top : top + size, left : left + size].ravel()
        for frame in range(time)
        for top in range(0, rows, size)
        for left in range(0, columns, size)
    ]
    ordered, area = np.concatenate(parts), merge * merge
    vectors = np.empty_like(ordered)
    vectors[ordered] = np.arange(len(ordered))
    order = (ordered[:, None] * area + np.arange(area)).ravel()
    inside = np.stack(np.divmod(np.arange(area), merge))
    corner = np.stack(np.divmod(ordered % (rows * columns), columns)) * merge
    return ArrangedImage(
        order=order,
        frames=np.full(time, height * width),
        windows=np.array([len(part) * area for part in parts]),
        vectors=vectors,
        coordinates=(corner[:, :, None] + inside[:, None, :]).reshape(2, -1),
    )


def table_rows(coordinates: IntArray, grid: Sequence[int], side: int) -> IntArray:
    """Returns the rows of a table of side x side positions for patches of a grid; a smaller one is spread over all of it.

    >>> table_rows(np.array([[0, 1], [0, 1]]), (1, 2, 2), 4).tolist()
    [0, 10]
    """
    _, height, width = (int(size) for size in grid)
    if max(height, width) > side:
        raise DataError(
            f"An image of {height} x {width} patches is larger than the table of {side} x {side} positions. "
            "Cut or scale images to --vision-image-size."
        )
    along = [_spread(count, side)[axis] for count, axis in zip((height, width), coordinates, strict=True)]
    return along[0] * side + along[1]


def _spread(count: int, side: int) -> IntArray:
    """Returns the place in `side` of each of `count` patches: that of the fraction of the image before it."""
    # In float32, as the published models were trained: fractions are at the edge of two places.
    edges = np.arange(1, side, dtype=np.float32) / np.float32(side)
    return np.searchsorted(edges, np.arange(count, dtype=np.float32) / np.float32(count) + 1e-6, side="right")


def token_coordinates(is_image: NDArray[np.bool_], grids: IntArray, *, merge: int, time_step: int) -> NDArray[np.int64]:
    """Returns time, row and column [3, S] of the tokens of a text with images.

    Those of text are equal, and one further than any before; the vectors of an image count theirs from there (Qwen2-VL).

    >>> token_coordinates(np.array([False, True, True, False]), np.array([[1, 1, 2]]), merge=1, time_step=1).tolist()
    [[0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 2, 3]]
    """
    coordinates = np.empty((3, len(is_image)), np.int64)
    at, following = 0, 0
    for grid in grids:
        begin = at + int(np.argmax(is_image[at:]))
        following = _place_text(coordinates, at, begin, following)
        time, rows, columns = int(grid[0]), int(grid[1]) // merge, int(grid[2]) // merge
        places = np.indices((time, rows, columns)).reshape(3, -1)
        places[0] *= time_step
        at = begin + places.shape[1]
        coordinates[:, begin:at] = following + places
        following += int(places.max()) + 1
    _place_text(coordinates, at, len(is_image), following)
    return coordinates


def _place_text(coordinates: IntArray, begin: int, end: int, first: int) -> int:
    """Writes the coordinates of text, and returns the one after."""
    coordinates[:, begin:end] = first + np.arange(end - begin)
    return first + end - begin
