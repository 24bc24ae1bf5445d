"""`examples/vlm`: pictures whose captions are true, the same for a seed, and held-out pairs that no other picture has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parents[2] / "examples/vlm"
sys.path.insert(0, str(FOLDER))
import shapes  # noqa: E402


def captions(path: Path) -> list[str]:
    return [json.loads(line)["text"].removeprefix("<image>") for line in path.read_text().splitlines()]


def pair_of(caption: str) -> frozenset[str]:
    return frozenset(part.strip() for part in caption.replace(" above ", "|").replace(" left of ", "|").split("|"))


def test_pictures(tmp_path: Path):
    command = [sys.executable, str(FOLDER / "shapes.py"), "--pictures", "60", "--held-out", "20"]
    for name in ("a", "b"):
        subprocess.run([*command, str(tmp_path / name)], check=True, capture_output=True)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert len(files) == 82
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)
    trained, held_out = (
        set(map(pair_of, captions(tmp_path / "a" / f"{name}.jsonl"))) for name in ("train", "held-out")
    )
    assert not trained & held_out and {len(pair) for pair in trained | held_out} == {2}


def test_captions_are_true():
    random = np.random.default_rng(0)
    things = (("red", "square"), ("blue", "circle"))
    for place, axis in (("left of", 1), ("above", 0)):
        picture = shapes.draw(things, place, 32, random)
        centers = [np.argwhere((picture == shapes.COLORS[thing[0]]).all(-1)).mean(0) for thing in things]
        assert centers[0][axis] < centers[1][axis] - 8
    assert len({shapes.mask_of(shape, 32, (16, 16), 8).tobytes() for shape in shapes.SHAPES}) == len(shapes.SHAPES)
