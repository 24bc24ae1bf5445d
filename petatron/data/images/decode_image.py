"""Decodes images that nobody has checked: into RGB of 8 bits, upright, on white where they are transparent.

Formats. Only those of `FORMATS` are tried: Pillow has others that call programs (EPS) or that nobody has photographs in.

Bounds. An image says how large it is before its pixels, so that a bomb is refused before any memory is taken for it. Pillow refuses more
than 178,956,970 pixels by itself, and a limit of ours may be no higher. Of an animation that is shown as frames the pixels of all frames
count, since a decoder needs each to show the next.

Colors.
    transparent     put on white, as the processors of transformers do
    16 bits         divided by 257 and rounded; Pillow's own conversion cuts everything above 255 off
    CMYK, palettes  converted by Pillow, without color profiles
    32 bits, float  refused: what is white in them is not known
The orientation that a camera recorded (EXIF) is applied; EXIF data that cannot be read is passed over, as viewers do.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from petatron.base.errors import ConfigError, PetatronError, Problem
from petatron.base.untrusted_files import not_a_file_reason, open_regular_file
from petatron.data.images.image_error import ImageError
from petatron.data.images.pillow import load_pillow

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
ANIMATED_FORMATS = ("PNG", "WEBP", "GIF")
"""Others have several images too: pages, or the views of a camera."""
HIGHEST_MAX_PIXELS = 178_956_970
MAX_ANIMATION_FRAMES = 10_000
_ORIENTATION_TAG, _SWAPPING_ORIENTATIONS = 0x0112, (5, 6, 7, 8)
_DEEP_MODES = ("I;16", "I;16L", "I;16B", "I;16N")
_REFUSED_MODES = ("I", "F")
_TRANSPARENT_MODES = ("RGBA", "RGBa", "LA", "La", "PA")

Rgb = NDArray[np.uint8]
"""[height, width, 3]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """What an image may have at most; all frames of an animation together, where they are decoded.

    >>> ImageLimits(max_pixels=1000).max_bytes
    67108864
    """

    max_pixels: int = 1 << 26
    max_bytes: int = 1 << 26

    def __post_init__(self) -> None:
        if not 1 <= self.max_pixels <= HIGHEST_MAX_PIXELS:
            rule = f"is not between 1 and {HIGHEST_MAX_PIXELS}, beyond which Pillow decodes nothing"
            raise ConfigError([Problem("max_pixels", str(self.max_pixels), rule, f"Use {1 << 26}.")])


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What an image says of itself; height and width are those of the upright image. num_frames: 1 where frames are not counted."""

    height: int
    width: int
    num_frames: int = 1


def read_image_bytes(path: Path, limits: ImageLimits, *, name: str) -> bytes:
    """Reads the file of an image; raises `ImageError` for one that is missing, no file, or too large."""
    with _open_image(path, limits, name) as file:
        return file.read(limits.max_bytes + 1)


def read_file_header(path: Path, limits: ImageLimits, *, name: str, counts_frames: bool = False) -> ImageHeader:
    """Reads the header of a file, and no more of it than its format needs."""
    with _open_image(path, limits, name) as file:
        return read_header(file, limits, name=name, counts_frames=counts_frames)


@contextmanager
def _open_image(path: Path, limits: ImageLimits, name: str) -> Iterator[BinaryIO]:
    reason = not_a_file_reason(path)
    if reason is not None:
        raise ImageError(name, "missing" if reason == "is missing" else "unreadable", reason)
    try:
        file = open_regular_file(path)
    except OSError as error:
        raise ImageError(name, "unreadable", f"cannot be opened: {error.strerror or error}") from error
    with file:
        check_size(file.seek(0, io.SEEK_END), limits, name)
        file.seek(0)
        yield file


def check_size(num_bytes: int, limits: ImageLimits, name: str) -> None:
    """Raises `ImageError` for an image without bytes, or of too many."""
    if not num_bytes:
        raise ImageError(name, "empty", "is empty")
    if num_bytes > limits.max_bytes:
        raise ImageError(name, "too large", f"has {num_bytes:,} bytes, and an image at most {limits.max_bytes:,}")


def read_header(
    file: BinaryIO,
    limits: ImageLimits,
    *,
    name: str,
    counts_frames: bool = False,
    formats: Sequence[str] = FORMATS,
) -> ImageHeader:
    """Reads what an image says of itself; raises `ImageError` for one that is known to be of no use by that.

    counts_frames: of an animation, some of which (GIF) are read to their end for it.
    """
    with _opened(file, limits, name, formats) as image:
        width, height = image.size
        if _orientation(image) in _SWAPPING_ORIENTATIONS:
            width, height = height, width
        return ImageHeader(height, width, _num_frames(image, limits, name) if counts_frames else 1)


def decode_image(content: bytes, limits: ImageLimits, *, name: str, formats: Sequence[str] = FORMATS) -> Rgb:
    """Decodes an image; of an animation, its first frame."""
    check_size(len(content), limits, name)
    with _opened(io.BytesIO(content), limits, name, formats) as image:
        return _upright_rgb(image, _orientation(image))


def decode_frames(content: bytes, limits: ImageLimits, *, name: str, max_frames: int) -> list[Rgb]:
    """Decodes the frames of an animation, at most `max_frames`, evenly spaced from the first to the last; an image is one frame."""
    check_size(len(content), limits, name)
    with _opened(io.BytesIO(content), limits, name) as image:
        total = _num_frames(image, limits, name)
        orientation, frames = _orientation(image), []
        for number in even_frames(total, max_frames):
            image.seek(number)
            frames.append(_upright_rgb(image, orientation))
        return frames


def even_frames(total: int, max_frames: int) -> list[int]:
    """Returns the numbers of at most `max_frames` of `total` frames, from the first to the last.

    >>> even_frames(3, 8), even_frames(10, 4), even_frames(10, 1)
    ([0, 1, 2], [0, 3, 6, 9], [0])
    """
    count = min(total, max_frames)
    return [round(number * (total - 1) / max(1, count - 1)) for number in range(count)]


@contextmanager
def _opened(file: BinaryIO, limits: ImageLimits, name: str, formats: Sequence[str] = FORMATS) -> Iterator[Any]:
    """Opens an image within the limits; whatever fails inside, in Pillow, is an `ImageError`."""
    pillow = load_pillow()
    try:
        with pillow.open(file, formats=tuple(formats)) as image:
            _check_pixels(image.size, limits, name)
            if image.mode in _REFUSED_MODES:
                raise ImageError(
                    name, "unsupported", f"has pixels of 32 bits (mode {image.mode}), whose white is not known"
                )
            yield image
    except PetatronError:
        raise
    except pillow.DecompressionBombError as error:
        raise ImageError(name, "too many pixels", f"has more than {limits.max_pixels:,} pixels") from error
    except pillow.UnidentifiedImageError as error:
        reason = f"is no image of a known format ({', '.join(formats)}), or its beginning is damaged"
        raise ImageError(name, "unknown format", reason) from error
    except Exception as error:  # decoders raise nearly anything on damaged bytes
        said = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise ImageError(name, "damaged", f"cannot be decoded ({said})") from error


def _check_pixels(size: tuple[int, int], limits: ImageLimits, name: str) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise ImageError(name, "empty", f"has {width} x {height} pixels")
    if width * height > limits.max_pixels:
        reason = f"has {width:,} x {height:,} pixels, and an image at most {limits.max_pixels:,} in all"
        raise ImageError(name, "too many pixels", reason)


def _num_frames(image: Any, limits: ImageLimits, name: str) -> int:
    """Returns the frames of an animation; raises `ImageError` for one of too many, or of too many pixels in all."""
    if image.format not in ANIMATED_FORMATS or not getattr(image, "is_animated", False):
        return 1
    width, height = image.size
    most = min(MAX_ANIMATION_FRAMES, limits.max_pixels // (width * height))
    if image.format == "GIF":  # whose frames Pillow counts by reading them all, however many there are
        with suppress(EOFError):
            image.seek(most)
            raise _too_many_frames(image, f"more than {most:,}", limits, name)
        image.seek(0)
    total = int(image.n_frames)
    if total > most:
        raise _too_many_frames(image, f"{total:,}", limits, name)
    return total


def _too_many_frames(image: Any, frames: str, limits: ImageLimits, name: str) -> ImageError:
    width, height = image.size
    reason = (
        f"has {width:,} x {height:,} pixels x {frames} frames, and an animation at most {limits.max_pixels:,} in all and "
        f"{MAX_ANIMATION_FRAMES:,} frames"
    )
    return ImageError(name, "too many pixels", reason)


def _orientation(image: Any) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION_TAG, 1))
    except Exception:
        return 1


def _upright_rgb(image: Any, orientation: int) -> Rgb:
    pillow = load_pillow()
    transpose = pillow.Transpose
    turns = {
        2: transpose.FLIP_LEFT_RIGHT,
        3: transpose.ROTATE_180,
        4: transpose.FLIP_TOP_BOTTOM,
        5: transpose.TRANSPOSE,
        6: transpose.ROTATE_270,
        7: transpose.TRANSVERSE,
        8: transpose.ROTATE_90,
    }
    rgb = _rgb(image)
    turn = turns.get(orientation)
    return np.asarray(rgb if turn is None else rgb.transpose(turn), np.uint8)


def _rgb(image: Any) -> Any:
    pillow = load_pillow()
    if image.mode in _DEEP_MODES:
        deep = np.asarray(image).astype(np.uint32)
        return pillow.fromarray(((deep + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode in _TRANSPARENT_MODES or image.info.get("transparency") is not None:
        rgba = image.convert("RGBA")
        return pillow.alpha_composite(pillow.new("RGBA", rgba.size, (255, 255, 255, 255)), rgba).convert("RGB")
    return image.convert("RGB")
