"""Images that are none, that are too much, and that have colors of their own."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from petatron.base.errors import ConfigError, DataError
from petatron.data.images.decode_image import (
    ImageHeader,
    ImageLimits,
    decode_frames,
    decode_image,
    even_frames,
    read_file_header,
    read_header,
    read_image_bytes,
)
from petatron.data.images.image_error import ImageError
from tests.unit.data.images.image_files import animation, encoded, noise, png_header

LIMITS = ImageLimits()
PHOTO = Image.fromarray(noise(61, 43))


def kind_of(content: bytes, limits: ImageLimits = LIMITS) -> str:
    with pytest.raises(ImageError) as caught:
        decode_image(content, limits, name="a.png")
    assert str(caught.value).startswith("a.png ")
    return caught.value.kind


@pytest.mark.parametrize("image_format", ["PNG", "WEBP", "GIF", "BMP", "TIFF", "JPEG"])
def test_formats(image_format: str):
    content = encoded(PHOTO, image_format, **({"lossless": True} if image_format == "WEBP" else {}))
    pixels = decode_image(content, LIMITS, name="a")
    assert pixels.shape == (43, 61, 3) and pixels.dtype == np.uint8
    worst = {"GIF": 60, "JPEG": 40}.get(image_format, 0)
    assert np.abs(pixels.astype(int) - noise(61, 43)).max() <= worst
    assert read_header(io.BytesIO(content), LIMITS, name="a") == ImageHeader(43, 61)


@pytest.mark.parametrize("image_format", ["PNG", "WEBP", "GIF", "JPEG", "TIFF", "BMP"])
def test_truncated(image_format: str):
    content = encoded(PHOTO, image_format)
    kinds = {kind_of(content[:length]) for length in range(1, len(content) - 200, max(1, len(content) // 40))}
    assert kinds <= {"unknown format", "damaged"}, kinds
    assert kind_of(content[: len(content) // 2]) in ("damaged", "unknown format")


def test_any_damage_is_an_image_error():
    random = np.random.default_rng(1)
    for image_format in ("PNG", "JPEG", "GIF", "WEBP", "TIFF"):
        content = encoded(PHOTO, image_format)
        for _ in range(40):
            damaged = bytearray(content)
            for place in random.integers(0, len(content), 6):
                damaged[place] = random.integers(256)
            try:
                pixels = decode_image(bytes(damaged), LIMITS, name="a")
            except ImageError:
                continue
            assert pixels.ndim == 3 and pixels.shape[2] == 3


def test_a_bomb_is_refused_before_it_is_decoded():
    assert kind_of(png_header(30_000, 30_000)) == "too many pixels"
    assert kind_of(png_header(9_000, 9_000)) == "too many pixels"
    assert kind_of(png_header(300, 300), ImageLimits(max_pixels=89_999)) == "too many pixels"
    assert kind_of(png_header(300, 300)) == "damaged"
    with pytest.raises(ImageError, match="9,000 x 9,000"):
        read_header(io.BytesIO(png_header(9_000, 9_000)), LIMITS, name="a")


def test_limits_beyond_pillows_own():
    with pytest.raises(ConfigError, match="beyond which Pillow decodes nothing"):
        ImageLimits(max_pixels=1 << 30)


def test_no_image():
    assert kind_of(b"") == "empty"
    assert kind_of(b"not an image at all, but text") == "unknown format"
    assert kind_of(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n") == "unknown format"
    assert kind_of(encoded(PHOTO, "PNG"), ImageLimits(max_bytes=99)) == "too large"


def test_files(tmp_path: Path):
    def kind(name: str) -> str:
        with pytest.raises(ImageError) as caught:
            read_image_bytes(tmp_path / name, LIMITS, name=name)
        with pytest.raises(ImageError) as again:
            read_file_header(tmp_path / name, LIMITS, name=name)
        assert caught.value.kind == again.value.kind
        return caught.value.kind

    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "a.png").write_bytes(encoded(PHOTO, "PNG"))
    assert [kind(name) for name in ("none", "empty", "folder", "fifo")] == [
        "missing",
        "empty",
        "unreadable",
        "unreadable",
    ]
    assert read_image_bytes(tmp_path / "a.png", LIMITS, name="a") == encoded(PHOTO, "PNG")
    assert read_file_header(tmp_path / "a.png", LIMITS, name="a") == ImageHeader(43, 61)
    if os.getuid():
        (tmp_path / "a.png").chmod(0)
        assert kind("a.png") == "unreadable"


def test_animations():
    for image_format in ("GIF", "WEBP", "PNG"):
        content = animation(image_format)
        assert np.abs(decode_image(content, LIMITS, name="a").astype(int)).max() <= 1
        frames = decode_frames(content, LIMITS, name="a", max_frames=16)
        assert [round(float(frame.mean()) / 40) for frame in frames] == [0, 1, 2, 3, 4], image_format
        few = decode_frames(content, LIMITS, name="a", max_frames=3)
        assert [round(float(frame.mean()) / 40) for frame in few] == [0, 2, 4]
        assert read_header(io.BytesIO(content), LIMITS, name="a", counts_frames=True) == ImageHeader(8, 12, 5)
        assert read_header(io.BytesIO(content), LIMITS, name="a") == ImageHeader(8, 12)
        all_frames = ImageLimits(max_pixels=12 * 8 * 5 - 1)
        assert decode_image(content, all_frames, name="a").shape == (8, 12, 3)
        with pytest.raises(ImageError, match=r"5 frames|more than 4 frames"):
            decode_frames(content, all_frames, name="a", max_frames=2)
    assert len(decode_frames(encoded(PHOTO, "PNG"), LIMITS, name="a", max_frames=4)) == 1
    assert even_frames(7, 7) == list(range(7))


def test_frames_are_counted_no_further_than_needed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("petatron.data.images.decode_image.MAX_ANIMATION_FRAMES", 4)
    for image_format in ("GIF", "WEBP", "PNG"):
        with pytest.raises(ImageError, match=r"at most .* and 4 frames"):
            decode_frames(animation(image_format), LIMITS, name="a", max_frames=2)
        assert len(decode_frames(animation(image_format, 4), LIMITS, name="a", max_frames=9)) == 4


def test_pages_are_no_animation():
    pages = [Image.new("RGB", (4, 4), (50 * number,) * 3) for number in range(3)]
    content = encoded(pages[0], "TIFF", save_all=True, append_images=pages[1:])
    assert len(decode_frames(content, LIMITS, name="a", max_frames=9)) == 1


def test_cmyk():
    """White paper is white, and cyan ink takes the red."""
    paper = Image.new("CMYK", (16, 16), (0, 0, 0, 0))
    paper.paste((255, 0, 0, 0), (0, 0, 8, 16))
    for content in (encoded(paper, "JPEG", quality=100), encoded(paper, "TIFF")):
        pixels = decode_image(content, LIMITS, name="a")
        assert np.abs(pixels[4, 2].astype(int) - (0, 255, 255)).max() < 4
        assert np.abs(pixels[4, 13].astype(int) - 255).max() < 4


@pytest.mark.parametrize("image_format", ["PNG", "TIFF"])
def test_16_bits(image_format: str):
    deep = np.array([[0, 128, 129, 257, 32_896, 65_535]], np.uint16)
    pixels = decode_image(encoded(Image.fromarray(deep), image_format), LIMITS, name="a")
    assert pixels[0].tolist() == [[value] * 3 for value in (0, 0, 1, 1, 128, 255)]


def test_32_bits_are_refused():
    for array in (np.zeros((3, 3), np.int32), np.zeros((3, 3), np.float32)):
        assert kind_of(encoded(Image.fromarray(array), "TIFF")) == "unsupported"


def test_transparency_is_put_on_white():
    clear = np.zeros((2, 3, 4), np.uint8)
    clear[:, 1] = (10, 20, 30, 255)
    clear[:, 2] = (200, 0, 0, 51)
    image = Image.fromarray(clear)
    expected = [[255, 255, 255], [10, 20, 30], [244, 204, 204]]
    assert decode_image(encoded(image, "PNG"), LIMITS, name="a")[0].tolist() == expected
    gray = Image.fromarray(np.array([[[0, 0], [7, 255]]], np.uint8), "LA")
    assert decode_image(encoded(gray, "PNG"), LIMITS, name="a")[0].tolist() == [[255] * 3, [7] * 3]


def test_palettes():
    palette = Image.new("P", (3, 1))
    palette.putpalette([9, 8, 7, 0, 0, 255, 50, 60, 70])
    palette.putdata([0, 1, 2])
    assert decode_image(encoded(palette, "PNG"), LIMITS, name="a")[0].tolist() == [[9, 8, 7], [0, 0, 255], [50, 60, 70]]
    content = encoded(palette, "PNG", transparency=1)
    assert decode_image(content, LIMITS, name="a")[0].tolist() == [[9, 8, 7], [255] * 3, [50, 60, 70]]
    content = encoded(palette, "PNG", transparency=b"\xff\x00\xff")
    assert decode_image(content, LIMITS, name="a")[0].tolist() == [[9, 8, 7], [255] * 3, [50, 60, 70]]


def test_grayscale_and_bilevel():
    gray = Image.fromarray(np.array([[3, 200]], np.uint8))
    assert decode_image(encoded(gray, "PNG"), LIMITS, name="a")[0].tolist() == [[3] * 3, [200] * 3]
    black_white = Image.fromarray(np.array([[False, True]]))
    assert decode_image(encoded(black_white, "PNG"), LIMITS, name="a")[0].tolist() == [[0] * 3, [255] * 3]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(orientation: int):
    """As Pillow's own `exif_transpose` has it; the header says the size of the upright image."""
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(PHOTO, "PNG", exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))))
    assert np.array_equal(decode_image(content, LIMITS, name="a"), expected)
    header = read_header(io.BytesIO(content), LIMITS, name="a")
    assert (header.height, header.width) == expected.shape[:2]


def test_damaged_exif_is_passed_over():
    content = encoded(PHOTO, "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff" + b"\x00" * 20, quality=95)
    assert decode_image(content, LIMITS, name="a").shape == (43, 61, 3)


def test_a_name_with_control_characters_is_printed_safely():
    with pytest.raises(ImageError) as caught:
        decode_image(b"", LIMITS, name="a\x1b[2J.png")
    assert "\x1b" not in str(caught.value)


def test_without_pillow(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"petatron\[images\]"):
        decode_image(b"x", LIMITS, name="a")
