"""Images of all sorts, made with Pillow or byte by byte."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def encoded(image: Image.Image, image_format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def noise(width: int, height: int, *, seed: int = 0) -> np.ndarray:
    """Smooth noise, so that JPEG changes it little: [height, width, 3]."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


def png_header(width: int, height: int) -> bytes:
    """A PNG that says how large it is, and has no pixels."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    end = b"IEND"
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in (chunk, end)
    )


def animation(image_format: str, count: int = 5, size: tuple[int, int] = (12, 8)) -> bytes:
    """Frames that are gray, each lighter than the one before."""
    frames = [Image.new("RGB", size, (40 * number,) * 3) for number in range(count)]
    options = {"lossless": True} if image_format == "WEBP" else {}
    return encoded(frames[0], image_format, save_all=True, append_images=frames[1:], duration=50, **options)
