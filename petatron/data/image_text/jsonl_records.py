"""Records of a JSON Lines file, whose images are files below a folder, or written into the text as data URLs."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from petatron.base.errors import DataError
from petatron.base.untrusted_files import open_regular_file
from petatron.data.data_file_error import data_file_error
from petatron.data.document_provenance import DocumentProvenance
from petatron.data.image_text.image_text_record import ImageTextRecord, parse_line, parse_record
from petatron.data.image_text.record_error import RecordError
from petatron.data.image_text.record_store import DATA_URL, RecordStore, data_url_bytes
from petatron.data.images.decode_image import (
    ImageHeader,
    ImageLimits,
    check_size,
    read_file_header,
    read_header,
    read_image_bytes,
)
from petatron.data.images.image_error import ImageError
from petatron.data.index_cache import cached_digest, fingerprint

MAX_LINE_BYTES = 1 << 26
_CHUNK_BYTES = 1 << 24
_LONGEST_BLANK = 8
"""A longer line of spaces is a record that is no JSON."""
_FRAME_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_REMOTE = ("http://", "https://", "s3://", "gs://")


class JsonlRecords(RecordStore):
    """The lines of a file that are not blank."""

    def __init__(self, path: Path, image_folder: Path, *, cache_folder: Path | None) -> None:
        try:
            with open_regular_file(path) as file:
                if file.read(64).lstrip()[:1] == b"[":
                    raise data_file_error(
                        path, "is one JSON list, and not a record per line; make lines of it (`jq -c '.[]'`)"
                    )
            starts, self._sizes, self._lines = _lines(path)
            digest = cached_digest(cache_folder, path, "image-text lines", lambda: _digest(path))
        except OSError as error:
            raise data_file_error(path, f"cannot be read: {error.strerror or error}") from error
        if not image_folder.is_dir():
            raise DataError(
                f"The folder of images {image_folder} does not exist. Give --dataset-settings image_folder=FOLDER, in which the names of "
                f"{path} are."
            )
        self._path, self._starts = path, starts
        self._folder, self._real_folder = image_folder, os.path.realpath(image_folder)
        key = {"kind": "jsonl images", "digest": digest, "folder": self._real_folder}
        super().__init__(str(path), num_records=len(starts), fingerprint=fingerprint(key))

    def read(self, number: int) -> ImageTextRecord:
        size = int(self._sizes[number])
        if size > MAX_LINE_BYTES:
            raise RecordError("too long", f"is a line of {size:,} bytes, and a line has at most {MAX_LINE_BYTES:,}")
        with open_regular_file(self._path) as file:
            file.seek(int(self._starts[number]))
            return parse_record(parse_line(file.read(size)))

    def title(self, number: int) -> str:
        return f"line {self._lines[number]}"

    def provenance(self, number: int) -> DocumentProvenance:
        return DocumentProvenance(self.name, int(self._lines[number]), None)

    def image_bytes(self, number: int, name: str, limits: ImageLimits) -> bytes:
        if name.startswith(DATA_URL):
            return data_url_bytes(name, limits, name="an image in the text")
        return read_image_bytes(self._path_of(name), limits, name=name)

    def image_header(self, number: int, name: str, limits: ImageLimits, *, counts_frames: bool) -> ImageHeader:
        if name.startswith(DATA_URL):
            content = data_url_bytes(name, limits, name="an image in the text")
            check_size(len(content), limits, "an image in the text")
            return read_header(io.BytesIO(content), limits, name="an image in the text", counts_frames=counts_frames)
        return read_file_header(self._path_of(name), limits, name=name, counts_frames=counts_frames)

    def frame_names(self, name: str) -> list[str] | None:
        path = None if name.startswith(DATA_URL) else self._path_of(name)
        if path is None or not path.is_dir():
            return None
        names = sorted(entry for entry in os.listdir(path) if entry.lower().endswith(_FRAME_ENDINGS))
        return [os.path.join(name, entry) for entry in names]

    def _path_of(self, name: str) -> Path:
        """Returns the path of an image, which must be below the folder: names come from others, and so may links."""
        if name.startswith(_REMOTE):
            raise ImageError(name, "outside", "is an address; images are files of the folder of images")
        path = self._folder / name
        try:
            is_inside = Path(os.path.realpath(path)).is_relative_to(self._real_folder)
        except ValueError:  # a name that no file can have
            raise ImageError(name, "missing", "is missing") from None
        if not is_inside:
            raise ImageError(
                name, "outside", f"is outside of {self._folder}; choose another image_folder if that is right"
            )
        return path


def _lines(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Returns where each line that is not blank begins, its bytes, and its number, from 1 on."""
    ends, place = [], 0
    with open_regular_file(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            ends.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + place)
            place += len(chunk)
        after = np.concatenate([*ends, [place]]).astype(np.int64)
        starts = np.concatenate([[0], after[:-1] + 1])
        sizes = after - starts
        kept = sizes > 0
        for line in np.flatnonzero(kept & (sizes <= _LONGEST_BLANK)):
            file.seek(int(starts[line]))
            kept[line] = bool(file.read(int(sizes[line])).strip())
    return starts[kept], sizes[kept], np.flatnonzero(kept) + 1


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with open_regular_file(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
