"""Draws pictures of two colored shapes, with captions such as "a red circle left of a blue square": a file to train on, and a held-out one.

    python examples/vlm/shapes.py runs/shapes

A pair of objects that is held out is in no picture of the training file, in neither order: to name it, a model must know colors, shapes and
places by themselves. All pictures follow from --seed.
"""

from __future__ import annotations

import argparse
import json
from itertools import combinations, product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

COLORS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 230),
    "yellow": (235, 215, 50),
    "purple": (160, 60, 200),
    "white": (240, 240, 240),
}
SHAPES = ("circle", "square", "triangle", "cross")
PLACES = ("left of", "above")
Thing = tuple[str, str]
"""A color and a shape."""


def mask_of(shape: str, size: int, center: tuple[float, float], radius: float) -> NDArray[np.bool_]:
    """Returns the pixels of a shape in a square picture."""
    y, x = np.indices((size, size)) + 0.5 - np.array(center)[:, None, None]
    if shape == "circle":
        return x * x + y * y <= radius * radius
    if shape == "square":
        return np.maximum(abs(x), abs(y)) <= 0.85 * radius
    if shape == "triangle":
        return (y <= 0.8 * radius) & (2 * abs(x) <= y + 1.2 * radius)
    return (np.minimum(abs(x), abs(y)) <= 0.3 * radius) & (np.maximum(abs(x), abs(y)) <= radius)


def draw(things: tuple[Thing, Thing], place: str, size: int, random: np.random.Generator) -> NDArray[np.uint8]:
    """Returns a picture of two things, of which the first is left of the second, or above it."""
    picture = np.empty((size, size, 3), np.uint8)
    picture[:] = random.integers(0, 40, 3)
    along = PLACES.index(place)  # 0: the first is to the left, 1: it is above
    for thing, part in zip(things, (0.27, 0.73), strict=True):
        radius = size * random.uniform(0.15, 0.2)
        across = size * random.uniform(0.3, 0.7)
        position = size * (part + random.uniform(-0.04, 0.04))
        center = (across, position) if along == 0 else (position, across)
        picture[mask_of(thing[1], size, center, radius)] = COLORS[thing[0]]
    return picture


def caption_of(things: tuple[Thing, Thing], place: str) -> str:
    """
    >>> caption_of((("red", "circle"), ("blue", "square")), "above")
    'a red circle above a blue square'
    """
    first, second = (" ".join(thing) for thing in things)
    return f"a {first} {place} a {second}"


def pairs_of_things(held_out_share: float, random: np.random.Generator) -> tuple[list, list]:
    """Returns the pairs to train on and those that are held out; a pair has no order."""
    pairs = list(combinations(product(COLORS, SHAPES), 2))
    order = random.permutation(len(pairs))
    count = round(held_out_share * len(pairs))
    return [pairs[number] for number in order[count:]], [pairs[number] for number in order[:count]]


def write_split(folder: Path, name: str, pairs: list, count: int, size: int, random: np.random.Generator) -> None:
    """Writes NAME.jsonl and its pictures."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(count):
        first, second = pairs[int(random.integers(len(pairs)))]
        things = (first, second) if random.random() < 0.5 else (second, first)
        place = PLACES[int(random.integers(2))]
        file = f"{name}/{number:05}.png"
        Image.fromarray(draw(things, place, size, random)).save(folder / file)
        lines.append(json.dumps({"image": file, "text": f"<image>{caption_of(things, place)}"}))
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pictures", type=int, default=6000)
    parser.add_argument("--held-out", type=int, default=200, help="pictures of pairs that no picture to train on has")
    parser.add_argument("--held-out-share", type=float, default=0.1, help="of the pairs of things")
    parser.add_argument("--size", type=int, default=32, help="rows and columns of pixels")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    random = np.random.default_rng(options.seed)
    trained, held_out = pairs_of_things(options.held_out_share, random)
    write_split(options.folder, "train", trained, options.pictures, options.size, random)
    write_split(options.folder, "held-out", held_out, options.held_out, options.size, random)
    print(
        f"{options.folder}: {options.pictures} pictures of {len(trained)} pairs, {options.held_out} of {len(held_out)} other pairs"
    )


if __name__ == "__main__":
    main()
