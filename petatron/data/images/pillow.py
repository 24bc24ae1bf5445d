"""Pillow, which decodes and resizes images; imported where an image is used and nowhere else."""

from __future__ import annotations

from types import ModuleType

from petatron.base.errors import DataError


def load_pillow() -> ModuleType:
    """Returns `PIL.Image`; raises `DataError` where Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(
            "Images are decoded with Pillow, which is not installed: pip install 'petatron[images]'."
        ) from error
    Image.init()  # all formats, once: else threads that open their first image would do it while others look for theirs
    return Image
