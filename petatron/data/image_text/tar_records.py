"""Records of WebDataset tars: the files of a tar that follow one another and share a name up to its first dot.

`0001.jpg` and `0001.txt` are an image and its caption; `0001.json` a record in any of the forms of JSON Lines. Several images of a record,
`0001.0.jpg` and `0001.1.png`, are shown in their order in the tar, whatever names the JSON has for them. Other files are passed over.

An index of a tar has where its files begin, so that records are read at random; it is made of the headers alone. A packed tar cannot be
read at random, and is refused.
"""

from __future__ import annotations

import io
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from glob import glob, has_magic
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from petatron.base.errors import DataError
from petatron.base.log import get_logger
from petatron.base.untrusted_files import open_regular_file
from petatron.data.data_file_error import data_file_error
from petatron.data.document_provenance import DocumentProvenance
from petatron.data.image_text.image_text_record import ImageTextRecord, parse_line, parse_record
from petatron.data.image_text.record_error import RecordError
from petatron.data.image_text.record_store import RecordStore
from petatron.data.images.decode_image import ImageHeader, ImageLimits, check_size, read_header
from petatron.data.images.image_error import ImageError
from petatron.data.index_cache import Arrays, IndexLog, fingerprint, load_or_build
from petatron.data.inputs.tar_headers import (
    BARE_TAR_TYPES,
    MAX_TAR_NAME_BYTES,
    TAR_BLOCK,
    TAR_FILE_TYPES,
    DamagedTar,
    check_tar_header,
    pax_path,
    split_member_name,
    tar_header_name,
    tar_number,
)

_IMAGE_ENDINGS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff")
_TEXT_ENDINGS = ("txt", "json")
_MAX_TEXT_BYTES = 1 << 26
_MAX_TARS = 100_000
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}|\{([^{},]*(?:,[^{},]*)+)\}")
_ARRAYS = ("keys", "key_ends", "texts", "image_ends", "images")
_ABSENT = -1
_PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ")


def tar_paths(pattern: str) -> list[Path]:
    """Returns the tars that a path, a glob or braces name: `shard-{000..127}.tar`, `{a,b}.tar`.

    >>> [str(path) for path in tar_paths("a-{08..10}.tar")]
    ['a-08.tar', 'a-09.tar', 'a-10.tar']
    """
    names = _without_braces(pattern)
    if has_magic(pattern) and len(names) == 1 and not os.path.lexists(pattern):
        names = sorted(glob(pattern))
        if not names:
            raise DataError(f"{pattern} matches no file. Give tars of images and texts.")
    return [Path(name) for name in names]


def _without_braces(pattern: str) -> list[str]:
    match = _BRACES.search(pattern)
    if match is None:
        return [pattern]
    first, last, listed = match.groups()
    if listed is None:
        if abs(int(last) - int(first)) > _MAX_TARS:
            raise DataError(f"{pattern} names more than {_MAX_TARS:,} files. Name fewer.")
        width = len(first) if first.startswith("0") else 0
        choices = [f"{number:0{width}}" for number in range(int(first), int(last) + 1)]
    else:
        choices = listed.split(",")
    head, tail = pattern[: match.start()], pattern[match.end() :]
    return [name for choice in choices for name in _without_braces(head + choice + tail)]


class _FileRegion(io.RawIOBase):
    """A part of a file, read as a file: the header of an image in a tar needs a few bytes of it."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        content = self._file.read(max(0, min(len(buffer), self._size - self._at)))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


class TarRecords(RecordStore):
    """The records of some tars, in their order."""

    def __init__(
        self, name: str, paths: Sequence[Path], *, cache_folder: Path | None, log: IndexLog | None = None
    ) -> None:
        self._paths = list(paths)
        self._indices = [_tar_index(path, cache_folder, log) for path in self._paths]
        counts = [len(index["texts"]) for index in self._indices]
        self._first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        key = [[path.name, *_identity(path)] for path in self._paths]
        super().__init__(
            name, num_records=int(self._first[-1]), fingerprint=fingerprint({"kind": "tar images", "files": key})
        )

    def read(self, number: int) -> ImageTextRecord:
        tar, place = self._place(number)
        index = self._indices[tar]
        text_start, text_size, json_start, json_size = index["texts"][place].tolist()
        begin, end = self._images(index, place)
        with open_regular_file(self._paths[tar]) as file:
            record = {} if json_start == _ABSENT else parse_line(_text(file, json_start, json_size))
            if text_start != _ABSENT:
                content = _text(file, text_start, text_size)
                try:
                    record = {**record, "text": content.decode()}
                except UnicodeDecodeError as error:
                    raise RecordError("wrong form", f"has a text that is no UTF-8 ({error})") from error
        return parse_record(record, images=[str(image) for image in range(end - begin)])

    def title(self, number: int) -> str:
        record = self.provenance(number)
        return f"{Path(record.file).name}: {record.id}"

    def provenance(self, number: int) -> DocumentProvenance:
        tar, place = self._place(number)
        index = self._indices[tar]
        begin, end = (int(index["key_ends"][at - 1]) if at else 0 for at in (place, place + 1))
        key = bytes(index["keys"][begin:end]).decode(errors="replace")
        return DocumentProvenance(str(self._paths[tar]), place + 1, key)

    def image_bytes(self, number: int, name: str, limits: ImageLimits) -> bytes:
        with self._image(number, name, limits) as (file, start, size):
            file.seek(start)
            content = file.read(size)
        if len(content) < size:
            raise ImageError(_title(name), "unreadable", "is cut off: the tar has become shorter")
        return content

    def image_header(self, number: int, name: str, limits: ImageLimits, *, counts_frames: bool) -> ImageHeader:
        with self._image(number, name, limits) as (file, start, size):
            region = io.BufferedReader(_FileRegion(file, start, size))
            return read_header(region, limits, name=_title(name), counts_frames=counts_frames)

    @contextmanager
    def _image(self, number: int, name: str, limits: ImageLimits) -> Iterator[tuple[BinaryIO, int, int]]:
        """Opens the tar of an image, and says where the image is in it."""
        tar, place = self._place(number)
        index = self._indices[tar]
        start, size = index["images"][self._images(index, place)[0] + int(name)].tolist()
        check_size(size, limits, _title(name))
        try:
            with open_regular_file(self._paths[tar]) as file:
                yield file, start, size
        except OSError as error:
            raise ImageError(_title(name), "unreadable", f"cannot be read: {error.strerror or error}") from error

    def _place(self, number: int) -> tuple[int, int]:
        tar = int(np.searchsorted(self._first, number, side="right")) - 1
        return tar, number - int(self._first[tar])

    @staticmethod
    def _images(index: Arrays, place: int) -> tuple[int, int]:
        ends = index["image_ends"]
        return (int(ends[place - 1]) if place else 0), int(ends[place])


def _title(name: str) -> str:
    return f"image {int(name) + 1}"


def _text(file: BinaryIO, start: int, size: int) -> bytes:
    if size > _MAX_TEXT_BYTES:
        raise RecordError("too long", f"has a text of {size:,} bytes, and a text has at most {_MAX_TEXT_BYTES:,}")
    file.seek(start)
    return file.read(size)


def _identity(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _tar_index(path: Path, cache_folder: Path | None, log: IndexLog | None) -> Arrays:
    try:
        key: dict[str, object] = {"kind": "tar of images", "path": os.path.realpath(path), "file": _identity(path)}
        return load_or_build(cache_folder, key, _ARRAYS, build=lambda: _read_index(path), log=log)
    except OSError as error:
        raise data_file_error(path, f"cannot be read: {error.strerror or error}") from error


def _read_index(path: Path) -> Arrays:
    keys: list[bytes] = []
    texts: list[list[int]] = []
    images: list[list[int]] = []
    image_ends: list[int] = []
    passed_over: Counter[str] = Counter()
    try:
        with open_regular_file(path) as file:
            for name, start, size in _member_places(file):
                key, _, ending = split_member_name(name)
                kind = ending.rpartition(".")[2]
                if kind not in _IMAGE_ENDINGS + _TEXT_ENDINGS:
                    passed_over[kind] += 1
                    continue
                if not keys or keys[-1] != key.encode():
                    keys.append(key.encode())
                    texts.append([_ABSENT] * 4)
                    image_ends.append(len(images))
                if kind in _IMAGE_ENDINGS:
                    images.append([start, size])
                    image_ends[-1] = len(images)
                else:
                    place = 2 * _TEXT_ENDINGS.index(kind)
                    texts[-1][place : place + 2] = [start, size]
    except DamagedTar as error:
        raise DataError(
            f"{path} cannot be read beyond record {len(keys)}: {error}. Check the file, or copy it again."
        ) from error
    if passed_over:
        counts = ", ".join(f"{count:,} .{kind}" for kind, count in passed_over.most_common(5))
        get_logger(__name__).info("%s: files that are neither images nor texts are passed over: %s", path, counts)
    return {
        "keys": np.frombuffer(b"".join(keys), np.uint8),
        "key_ends": np.cumsum([len(key) for key in keys], dtype=np.int64),
        "texts": np.array(texts, np.int64).reshape(-1, 4),
        "image_ends": np.array(image_ends, np.int64),
        "images": np.array(images, np.int64).reshape(-1, 2),
    }


def _member_places(file: BinaryIO) -> Iterator[tuple[str, int, int]]:
    """Yields the name of each file of a tar, where its content begins, and its bytes."""
    total, place = file.seek(0, io.SEEK_END), 0
    long_name: str | None = None
    if total < TAR_BLOCK:
        raise DamagedTar("it is no tar, or damaged")
    while place < total:
        file.seek(place)
        header = file.read(TAR_BLOCK)
        if not header.strip(b"\x00"):
            return
        if place == 0 and header.startswith(_PACKED):
            raise DamagedTar("it is packed, and its records are read at random; unpack it")
        check_tar_header(header)
        size, kind = tar_number(header[124:136]), header[156:157]
        start = place + TAR_BLOCK
        place = start + (0 if kind in BARE_TAR_TYPES else size + -size % TAR_BLOCK)
        if kind in (b"L", b"x"):
            if size > MAX_TAR_NAME_BYTES:
                raise DamagedTar(f"the name of a file has {size:,} bytes")
            content = file.read(size)
            named = content.rstrip(b"\x00") if kind == b"L" else pax_path(content)
            long_name = long_name if named is None else named.decode(errors="replace")
            continue
        name, long_name = long_name or tar_header_name(header), None
        if kind in TAR_FILE_TYPES:
            if start + size > total:
                raise DamagedTar("it ends too early")
            yield name, start, size
