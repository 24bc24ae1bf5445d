"""manifest.json and the ranks' tables: what a checkpoint contains, where, and how to verify that it is complete.

Each rank writes a table of its own files and of the boxes in them; the manifest names all tables with their digests, and is
written last, so a folder that has one is complete. It contains a digest of itself. No rank has to know all boxes when a checkpoint
is saved: rank 0 writes one line for each rank. In version 2, which is still read, there was one table, in the
manifest; in version 3 digests were of another kind (`block_digest.py`).
Files may come from others, with digests that fit: every type, range and name is checked before it is used.
`docs/checkpoint-format.md` describes both for readers of other programs.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from petatron.base.untrusted_files import MAX_INT64, is_count
from petatron.checkpoint.files.digested_file_io import BLOCK_BYTES, StoredFile
from petatron.checkpoint.files.safetensors_file import DTYPES, MAX_DIMS
from petatron.models.hf.folder_entries import EntryRegion
from petatron.sharding.boxes import Box, Shape

VERSION = 4
MAX_MANIFEST_BYTES = 1 << 28
"""The largest manifest or table that is read."""
METADATA_KEY = "facts"
"""The key of metadata in files, in the manifest and inside it once more."""
_SINGLE_TABLE_VERSION, _READABLE_VERSIONS = 2, (2, 3, VERSION)
_FORMAT, _TABLE_FORMAT = "petatron checkpoint", "petatron checkpoint table"
_BLOCK_DIGEST, _TABLE_DIGEST = re.compile("[0-9a-f]{16}|[0-9a-f]{8}|[0-9a-f]{64}"), re.compile("[0-9a-f]{64}")


class UnknownVersionError(ValueError):
    """The manifest was written by a format this code does not know."""


@dataclass(frozen=True, slots=True)
class BlockScale:
    """Where the scales of a quantized matrix are, one for each block of rows and columns. No checkpoint of ours has any.

    mxfp4: elements have four bits, two in a byte, and a block is columns of one row.
    """

    file: str
    entry_name: str
    block: Shape
    mxfp4: bool = False


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of a logical tensor, stored from `start_in_entry` on in the entry `entry_name` of a file.

    Leading dimensions of size 1 that the entry does not have are dropped; `transposed`: the entry has its two dimensions swapped.
    `scale`: of an entry that another program quantized. `interleaved`: see `map_box_to_entry.py`.
    """

    file: str
    entry_name: str
    box: Box
    start_in_entry: Shape
    transposed: bool = False
    scale: BlockScale | None = None
    interleaved: Shape = ()

    @classmethod
    def of_region(cls, file: str, entry_name: str, region: EntryRegion, scale: BlockScale | None = None) -> StoredBox:
        """Returns the box that a region of an entry of a model folder is."""
        box = Box(region.start, region.shape)
        return cls(file, entry_name, box, region.start_in_entry, region.transposed, scale, region.interleaved)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A logical tensor and the boxes it was saved as; `dtype` is its safetensors code."""

    shape: Shape
    dtype: str
    boxes: tuple[StoredBox, ...]


@dataclass(frozen=True, slots=True)
class RankTable:
    """What one rank wrote: files, boxes as (key, logical tensor with some of its boxes), and which file has its local entries."""

    files: Mapping[str, StoredFile]
    entries: tuple[tuple[str, StoredTensor], ...]
    local: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TableFile:
    """A table on disk: its path in the step, its size, and the BLAKE2b hash of its bytes."""

    path: str
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The whole checkpoint. `local` maps the entries that belong to one rank to their files.

    One just read from a file of version 3 or 4 has `tables` in place of tensors, local entries and files (`step_folder.complete_manifest`
    reads them).
    """

    step: int
    layout: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    local: Mapping[str, str]
    files: Mapping[str, StoredFile]
    tables: tuple[TableFile, ...] = ()


def merge_tables(tables: Iterable[RankTable]) -> dict[str, StoredTensor]:
    """Merges all ranks' boxes into one table of logical tensors; ValueError if two disagree on a tensor."""
    boxes: dict[str, list[StoredBox]] = {}
    seen: dict[str, tuple[Shape, str]] = {}
    for key, part in (entry for table in tables for entry in table.entries):
        if seen.setdefault(key, (part.shape, part.dtype)) != (part.shape, part.dtype):
            raise ValueError(f"{key} is {seen[key]} in one table and {(part.shape, part.dtype)} in another")
        boxes.setdefault(key, []).extend(part.boxes)
    return {key: StoredTensor(*seen[key], tuple(stored)) for key, stored in boxes.items()}


def manifest_to_json(step: int, *, layout: str, metadata: Mapping[str, Any], tables: Sequence[TableFile]) -> str:
    """Serializes manifest.json."""
    body = {
        "format": _FORMAT,
        "version": VERSION,
        "step": step,
        "layout": layout,
        METADATA_KEY: dict(metadata),
        "block_bytes": BLOCK_BYTES,
        "tables": {table.path: [table.size_bytes, table.digest] for table in tables},
    }
    # JSON changes tuples and integer keys in metadata; the digest is of what will be read.
    body = json.loads(json.dumps(body))
    return json.dumps({**body, "digest": _digest(body)}, indent=1)


def manifest_from_json(text: str | bytes) -> Manifest:
    """Parses manifest.json; ValueError tells what is wrong with it."""
    body = _parse_object(text, _FORMAT, "the manifest of a Petatron checkpoint")
    if body.get("version") not in _READABLE_VERSIONS or body.get("block_bytes") != BLOCK_BYTES:
        raise UnknownVersionError(
            f"it has format version {body.get('version')}; this version of Petatron reads 2 to {VERSION}"
        )
    digest = body.pop("digest", None)
    if digest != _digest(body):
        raise ValueError("its content does not match its own digest")
    if not is_count(body.get("step")):
        raise _invalid_field("its step")
    is_single = body["version"] == _SINGLE_TABLE_VERSION
    table = _table_from_body(body) if is_single else RankTable({}, (), {})
    return Manifest(
        step=body["step"],
        layout=_text(body.get("layout"), "its layout"),
        metadata=_mapping(body, METADATA_KEY),
        tensors=dict(table.entries),
        local=table.local,
        files=table.files,
        tables=() if is_single else tuple(_table_files(_mapping(body, "tables"))),
    )


def table_to_json(table: RankTable) -> bytes:
    """Serializes a rank's table."""
    body = {
        "format": _TABLE_FORMAT,
        "version": VERSION,
        "tensors": {
            key: {"shape": tensor.shape, "dtype": tensor.dtype, "boxes": [box_to_json(box) for box in tensor.boxes]}
            for key, tensor in merge_tables([table]).items()
        },
        "local": dict(table.local),
        "files": {name: [file.size_bytes, file.block_digests] for name, file in table.files.items()},
    }
    return json.dumps(body).encode()


def table_from_json(content: bytes) -> RankTable:
    """Parses a table whose digest has been checked; ValueError tells what is wrong with it."""
    return _table_from_body(_parse_object(content, _TABLE_FORMAT, "a table of a Petatron checkpoint"))


def table_digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def _parse_object(text: str | bytes, format_name: str, what: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(body, dict) or body.get("format") != format_name:
        raise ValueError(f"it is not {what}")
    return body


def _table_from_body(body: Mapping[str, Any]) -> RankTable:
    return RankTable(
        files={name: _file_from_json(name, value) for name, value in _mapping(body, "files").items()},
        entries=tuple((key, _tensor_from_json(key, value)) for key, value in _mapping(body, "tensors").items()),
        local={name: _text(file, f"the file of {name}") for name, file in _mapping(body, "local").items()},
    )


def _table_files(tables: Mapping[str, Any]) -> Iterator[TableFile]:
    if not tables:
        raise ValueError("it names no table")
    for path, value in tables.items():
        match value:
            case [int(size), str(digest)] if is_count(size) and _TABLE_DIGEST.fullmatch(digest):
                yield TableFile(path, size, digest)
            case _:
                raise _invalid_field(f"size and digest of {path}")


def _mapping(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name)
    if not isinstance(value, dict):
        raise _invalid_field(f"its {name}")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise _invalid_field(what)
    return value


def _invalid_field(what: str) -> ValueError:
    return ValueError(f"it lacks or misstates {what}")


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(body).encode(), digest_size=32).hexdigest()


def _file_from_json(name: str, value: Any) -> StoredFile:
    match value:
        case [int(size), list(blocks)] if is_count(size):
            if len(blocks) != -(-size // BLOCK_BYTES):
                raise ValueError(f"it has {len(blocks)} digests for the {size} bytes of {name}")
            if all(isinstance(digest, str) and _BLOCK_DIGEST.fullmatch(digest) for digest in blocks):
                return StoredFile(size, tuple(blocks))
    raise _invalid_field(f"size and digests of {name}")


def box_to_json(stored: StoredBox) -> list[Any]:
    """Serializes file, entry, start, shape, start in the entry, whether it is transposed there, and, of few boxes, more."""
    scale = stored.scale
    more: list[Any] = [] if scale is None else [(scale.file, scale.entry_name, scale.block, scale.mxfp4)]
    if stored.interleaved or more:
        more = [stored.interleaved, *more]
    box = stored.box
    return [stored.file, stored.entry_name, box.start, box.shape, stored.start_in_entry, stored.transposed, *more]


def box_from_json(value: Sequence[Any]) -> StoredBox:
    """Parses what `box_to_json` wrote."""
    file, name, start, shape, at, transposed, *more = value
    scale = next((BlockScale(path, entry, tuple(block), mxfp4) for path, entry, block, mxfp4 in more[1:]), None)
    interleaved = tuple(more[0]) if more else ()
    return StoredBox(file, name, Box(tuple(start), tuple(shape)), tuple(at), bool(transposed), scale, interleaved)


def _tensor_from_json(key: str, value: Any) -> StoredTensor:
    match value:
        case {"shape": list(shape), "dtype": str(dtype), "boxes": list(boxes)} if dtype in DTYPES and _is_shape(shape):
            if math.prod(shape) * DTYPES[dtype].itemsize <= MAX_INT64:
                return StoredTensor(
                    tuple(shape), dtype, tuple([_checked_box_from_json(key, tuple(shape), box) for box in boxes])
                )
    raise _invalid_field(f"shape, dtype or boxes of {key}")


def _checked_box_from_json(key: str, logical_shape: Shape, value: Any) -> StoredBox:
    """Parses a box that is inside its tensor and can be one of an entry; the entry itself is checked against its file's header.

    There may be hundreds of thousands, so this is written for speed.
    """
    try:
        file, name, start, shape, at, transposed, *more = value
    except (TypeError, ValueError):
        raise _invalid_field(f"a box of {key}") from None
    if (
        type(file) is type(name) is str
        and type(start) is type(shape) is type(at) is list
        and type(transposed) is bool
        and (not more or _is_interleaved(more, len(at)))
        and len(start) == len(shape) == len(logical_shape)
        and _is_inside(start, shape, logical_shape)
        and len(shape) >= len(at) - len(more) >= 2 * transposed
        and (len(shape) == len(at) - len(more) or all(size == 1 for size in shape[: len(more) - len(at) or None]))
        and _is_shape(at)
    ):
        interleaved = tuple(more[0]) if more else ()
        return StoredBox(file, name, Box(tuple(start), tuple(shape)), tuple(at), transposed, None, interleaved)
    raise _invalid_field(f"a box of {key}")


def _is_interleaved(more: Sequence[Any], addressed_dims: int) -> bool:
    """Whether what a box has besides is a dimension of its entry and how many tensors alternate there."""
    match more:
        case [[int(dim), int(count)]] if type(dim) is type(count) is int:
            return 0 <= dim < addressed_dims - 1 and 2 <= count <= MAX_INT64
    return False


def _is_inside(start: Sequence[Any], shape: Sequence[Any], logical_shape: Shape) -> bool:
    for begin, size, end in zip(start, shape, logical_shape):
        if type(begin) is not int or type(size) is not int or begin < 0 or size < 0 or begin + size > end:
            return False
    return True


def _is_shape(value: Sequence[Any]) -> bool:
    for size in value:
        if type(size) is not int or size < 0 or size > MAX_INT64:
            return False
    return len(value) <= MAX_DIMS
