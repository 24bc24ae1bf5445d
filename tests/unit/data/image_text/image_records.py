"""Small files of images and texts, and how the tests open them."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from petatron.data.dataset_kinds import DatasetRequest
from petatron.data.image_text.image_text_settings import ImageTextSettings
from petatron.data.image_text.image_text_source import ImageTextSource, open_image_text
from petatron.data.image_text.sample_builder import SampleSettings
from petatron.data.images.patch_grid import PatchGrid
from petatron.data.tokenizer import ByteTokenizer
from tests.unit.data.images.image_files import encoded

IMAGE_TOKEN = 300
GRID = PatchGrid(patch_size=4, image_size=8, image_token_id=IMAGE_TOKEN)
FEATURES = 4
"""Of an image of 8 x 8 pixels."""


def request(*, seq_length: int = 32, count: int = 8, seed: int = 3, **changes: Any) -> DatasetRequest:
    given = {"split": "train", "tokenizer": ByteTokenizer(), "vocab_size": 320, **changes}
    return DatasetRequest(num_samples=count, seq_length=seq_length, seed=seed, **given)


def png(shade: int, size: tuple[int, int] = (8, 8)) -> bytes:
    return encoded(Image.new("RGB", size, (shade,) * 3), "PNG")


def write_records(folder: Path, records: Sequence[Mapping[str, Any]], images: Mapping[str, bytes]) -> Path:
    """Writes data.jsonl, and images beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in images.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    path = folder / "data.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def write_tar(path: Path, members: Mapping[str, bytes | str], *, mode: Any = "w", **options: Any) -> Path:
    with tarfile.open(path, mode, **options) as tar:
        for name, content in members.items():
            content = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def open_source(
    source: Path | str, *, grid: PatchGrid = GRID, cache_folder: Path | None = None, **settings: Any
) -> ImageTextSource:
    options = SampleSettings(settings=ImageTextSettings(**settings), grid=grid)
    return open_image_text(str(source), options, cache_folder=cache_folder)


def samples_of(source: ImageTextSource, count: int | None = None, **changes: Any) -> list[dict[str, np.ndarray]]:
    """The samples of an epoch, in the order of the records' texts."""
    wanted = request(count=source.num_units if count is None else count, **changes)
    dataset = source.dataset(range(source.num_units), wanted)
    return [dict(dataset[index]) for index in range(len(dataset))]


def text_of(sample: Mapping[str, np.ndarray]) -> str:
    """What is learned of a sample, without the end: the first token is never predicted."""
    ids = sample["tokens"][sample["loss_mask"] > 0]
    return bytes(ids[ids < 256].tolist()).decode()


def shades_of(sample: Mapping[str, np.ndarray]) -> list[int]:
    """The shade of each image, which is one throughout."""
    ends = np.cumsum([int(np.prod(grid)) for grid in sample["grids"]])
    return [int(np.unique(patches).item()) for patches in np.split(sample["patches"], ends[:-1])] if len(ends) else []
