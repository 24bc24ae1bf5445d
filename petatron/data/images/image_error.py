"""Why an image cannot be used: a kind, which reports count by, and the reason in words."""

from __future__ import annotations

from typing import Literal, get_args

from petatron.base.errors import DataError
from petatron.base.terminal_escape import printable

ImageErrorKind = Literal[
    "missing",
    "outside",
    "unreadable",
    "empty",
    "too large",
    "too many pixels",
    "unknown format",
    "unsupported",
    "damaged",
]
"""Not there; beyond the folder of images; not to be opened; without bytes; of too many bytes; of too many pixels; of no known format; of a
kind that has no colors to show; not to be decoded."""
IMAGE_ERROR_KINDS: tuple[ImageErrorKind, ...] = get_args(ImageErrorKind)


class ImageError(DataError):
    """An image that cannot be used.

    >>> error = ImageError("a.png", "missing", "is missing")
    >>> error.kind, str(error)
    ('missing', 'a.png is missing.')
    """

    def __init__(self, name: str, kind: ImageErrorKind, reason: str) -> None:
        """`reason` is a predicate of the image, without a full stop."""
        self.name, self.kind, self.reason = printable(name, max_chars=200), kind, printable(reason)
        super().__init__(f"{self.name} {self.reason}.")
