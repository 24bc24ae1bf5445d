"""What holds records of images and text: a JSON Lines file beside a folder of images, or tars with both (WebDataset)."""

from __future__ import annotations

import base64
import binascii
from abc import ABC, abstractmethod

from petatron.data.document_provenance import DocumentProvenance
from petatron.data.image_text.image_text_record import ImageTextRecord
from petatron.data.images.decode_image import ImageHeader, ImageLimits
from petatron.data.images.image_error import ImageError

DATA_URL = "data:"


class RecordStore(ABC):
    """Records by their number; each is read when it is asked for. Reading is safe from several threads."""

    def __init__(self, name: str, *, num_records: int, fingerprint: str) -> None:
        """`fingerprint` is equal for equal records; it does not depend on the pixels of images."""
        self.name, self.num_records, self.fingerprint = name, num_records, fingerprint

    @abstractmethod
    def read(self, number: int) -> ImageTextRecord:
        """Returns a record; raises `RecordError` for one that makes no sample."""

    @abstractmethod
    def title(self, number: int) -> str:
        """Returns where a record is, for messages."""

    @abstractmethod
    def provenance(self, number: int) -> DocumentProvenance:
        """Returns the file of a record, its line or its place among the records of the file, and its key in a tar."""

    @abstractmethod
    def image_bytes(self, number: int, name: str, limits: ImageLimits) -> bytes:
        """Returns the file of an image that a record names."""

    @abstractmethod
    def image_header(self, number: int, name: str, limits: ImageLimits, *, counts_frames: bool) -> ImageHeader:
        """Returns what an image says of itself, and reads no more than that."""

    def frame_names(self, name: str) -> list[str] | None:
        """Returns the images of a folder of frames, in the order of their names; None for a file."""
        return None


def data_url_bytes(url: str, limits: ImageLimits, *, name: str) -> bytes:
    """Returns the bytes of an image that is written into a text: `data:image/png;base64,...`.

    >>> data_url_bytes("data:image/png;base64,YWJj", ImageLimits(), name="a")
    b'abc'
    """
    head, comma, content = url.partition(",")
    if not comma or not head.endswith(";base64") or not head.startswith("data:image/"):
        raise ImageError(name, "unreadable", "is a data URL that is not data:image/...;base64,...")
    if len(content) > limits.max_bytes * 4 // 3 + 4:
        raise ImageError(name, "too large", f"has more than {limits.max_bytes:,} bytes")
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(name, "unreadable", f"is no base64 ({error})") from error
