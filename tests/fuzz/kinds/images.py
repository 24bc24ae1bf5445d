"""Images and texts: JSON lines with images of every format beside them, and the same in a tar.

No digest covers them. Records that fail are skipped, so that one bad image does not hide the others; or the first one ends it.
"""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

from PIL import Image

from petatron.data.dataset_kinds import DatasetRequest
from petatron.data.image_text.image_text_settings import ImageTextSettings
from petatron.data.image_text.image_text_source import open_image_text
from petatron.data.image_text.sample_builder import SampleSettings
from petatron.data.images.patch_grid import PatchGrid
from petatron.data.tokenizer import ByteTokenizer
from tests.fuzz.kind import Door, Files, Kind

_GRID = PatchGrid(patch_size=4, image_size=8, temporal_patch_size=2, image_token_id=300)
_WAYS: dict[str, dict[str, Any]] = {
    "skip": {"on_error": "skip"},
    "fail": {"check_images": "decode"},
    "packed": {
        "on_error": "skip",
        "packed": True,
        "animations_are_videos": True,
        "images": "dynamic",
        "min_pixels": 16,
        "max_pixels": 400,
    },
}
_SOURCES = ("lines/data.jsonl", "data.tar")


def make(name: str) -> Kind:
    files = {**{f"lines/{path}": content for path, content in _lines().items()}, "data.tar": _tar()}
    reads = {f"{source} {how}": (source.partition("/")[0],) for source in _SOURCES for how in _WAYS}
    doors = {f"{source} {how}": _door(source, how) for source in _SOURCES for how in _WAYS}
    return Kind(name, files, doors=doors, formats={".jsonl": "jsonl"}, reads=reads, streams=(".jsonl", ".tar"))


def _images() -> Files:
    images = {}
    for image_format in ("PNG", "JPEG", "WEBP", "BMP", "TIFF"):
        picture = Image.linear_gradient("L").resize((14, 10)).convert("RGB")
        images[f"a.{image_format.lower()}"] = _encoded(picture, image_format)
    palette = Image.linear_gradient("L").resize((9, 9)).convert("P")
    images["palette.png"] = _encoded(palette, "PNG", transparency=3)
    frames = [Image.new("RGB", (9, 7), (70 * number,) * 3) for number in range(3)]
    images["film.gif"] = _encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    return images


def _encoded(image: Image.Image, image_format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def _lines() -> Files:
    images = _images()
    records: list[dict[str, Any]] = [{"image": name, "text": f"<image>{name}"} for name in images]
    records.append({"video": ["a.png", "a.bmp"], "text": "<video> two"})
    asked = {"role": "user", "content": [{"type": "image", "image": "a.png"}]}
    records.append({"messages": [asked, {"role": "assistant", "content": "y"}]})
    return {**images, "data.jsonl": "".join(f"{json.dumps(record)}\n" for record in records).encode()}


def _tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for number, (name, content) in enumerate(_images().items()):
            for member, data in ((f"{number}.{name.partition('.')[2]}", content), (f"{number}.txt", b"text")):
                info = tarfile.TarInfo(member)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def _door(source: str, how: str) -> Door:
    def door(folder: Path, scratch: Path) -> Any:
        options = SampleSettings(settings=ImageTextSettings(chat_format="chatml", **_WAYS[how]), grid=_GRID)
        opened = open_image_text(str(folder / source), options, cache_folder=scratch / "cache")
        request = DatasetRequest(
            split="train", num_samples=8, seq_length=64, seed=1, tokenizer=ByteTokenizer(), vocab_size=320
        )
        if not opened.num_units:
            return []
        dataset = opened.dataset(range(opened.num_units), request)
        return [{name: array.tobytes() for name, array in dict(dataset[index]).items()} for index in range(8)]

    return door
