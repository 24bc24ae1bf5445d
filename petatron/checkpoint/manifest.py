"""manifest.json and the ranks' tables: what a checkpoint holds, where, and how to tell that it is whole.

Each rank writes a table of its own files and of the boxes in them; the manifest names all tables with their digests, and is
written last, so a folder that has one is complete. It carries a digest of itself. Nobody has to know all boxes when a checkpoint
is saved: the first rank's work is one line for each rank. In version 2, which is still read, there was one table, in the manifest.
`docs/checkpoint-format.md` describes both for readers of other programs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from petatron.checkpoint.disk import BLOCK_BYTES, StoredFile
from petatron.mesh.boxes import Box, Shape

VERSION = 3
_ONE_TABLE = 2
_FORMAT, _TABLE_FORMAT = "petatron checkpoint", "petatron checkpoint table"


class UnknownVersion(ValueError):
    """The manifest was written by a format this code does not know."""


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of a logical tensor, and where it stands: from `at` on in the entry `name` of a file.

    Leading dimensions of size 1 that the entry does not have are dropped; `transposed` says that the entry has its two
    dimensions the other way round.
    """

    file: str
    name: str
    box: Box
    at: Shape
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A logical tensor and the boxes it was saved as; dtype is safetensors' code for it."""

    shape: Shape
    dtype: str
    boxes: tuple[StoredBox, ...]


@dataclass(frozen=True, slots=True)
class RankTable:
    """What one rank wrote: files, boxes as (key, whole tensor with some of its boxes), and which file has its local entries."""

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

    One that was just read from a file of version 3 has `tables` in place of tensors, local entries and files
    (`storage.complete` reads them).
    """

    step: int
    layout: str
    facts: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    local: Mapping[str, str]
    files: Mapping[str, StoredFile]
    tables: tuple[TableFile, ...] = ()


def merge(tables: Iterable[RankTable]) -> dict[str, StoredTensor]:
    """One table of logical tensors from all ranks' boxes; ValueError if two do not describe a tensor alike."""
    boxes: dict[str, list[StoredBox]] = {}
    seen: dict[str, tuple[Shape, str]] = {}
    for key, part in (entry for table in tables for entry in table.entries):
        if seen.setdefault(key, (part.shape, part.dtype)) != (part.shape, part.dtype):
            raise ValueError(f"{key} is {seen[key]} in one table and {(part.shape, part.dtype)} in another")
        boxes.setdefault(key, []).extend(part.boxes)
    return {key: StoredTensor(*seen[key], tuple(found)) for key, found in boxes.items()}


def to_json(
    step: int, *, layout: str, facts: Mapping[str, Any], tables: Sequence[TableFile], version: int = VERSION
) -> str:
    """The text of manifest.json."""
    body = {
        "format": _FORMAT,
        "version": version,
        "step": step,
        "layout": layout,
        "facts": dict(facts),
        "block_bytes": BLOCK_BYTES,
        "tables": {table.path: [table.size_bytes, table.digest] for table in tables},
    }
    # Facts may hold tuples or integer keys, which JSON turns into something else; the digest is of what will be read.
    body = json.loads(json.dumps(body))
    return json.dumps({**body, "digest": _digest(body)}, indent=1)


def from_json(text: str) -> Manifest:
    """Read manifest.json; ValueError says what is wrong with it."""
    body = _read_object(text, _FORMAT, "the manifest of a Petatron checkpoint")
    if body.get("version") not in (_ONE_TABLE, VERSION) or body.get("block_bytes") != BLOCK_BYTES:
        raise UnknownVersion(
            f"it has format version {body.get('version')}; this version of Petatron reads {_ONE_TABLE} and {VERSION}"
        )
    digest = body.pop("digest", None)
    if digest != _digest(body):
        raise ValueError("its content does not match its own digest")
    try:
        tables = () if body["version"] == _ONE_TABLE else tuple(_table_files(body["tables"]))
        whole = _table_from_body(body) if body["version"] == _ONE_TABLE else RankTable({}, (), {})
        return Manifest(
            step=body["step"],
            layout=body["layout"],
            facts=body["facts"],
            tensors=dict(whole.entries),
            local=whole.local,
            files=whole.files,
            tables=tables,
        )
    except (KeyError, TypeError, AttributeError, AssertionError) as error:
        raise ValueError(f"it lacks or misstates a field: {error!r}") from error


def table_to_json(table: RankTable) -> bytes:
    """The content of a rank's table."""
    body = {
        "format": _TABLE_FORMAT,
        "version": VERSION,
        "tensors": {key: _tensor_to_json(tensor) for key, tensor in merge([table]).items()},
        "local": dict(table.local),
        "files": {name: [file.size_bytes, file.blocks] for name, file in table.files.items()},
    }
    return json.dumps(body).encode()


def table_from_json(content: bytes) -> RankTable:
    """Read a table, whose digest has been checked; ValueError says what is wrong with it."""
    body = _read_object(content, _TABLE_FORMAT, "a table of a Petatron checkpoint")
    try:
        return _table_from_body(body)
    except (KeyError, TypeError, AttributeError, AssertionError) as error:
        raise ValueError(f"it lacks or misstates a field: {error!r}") from error


def table_digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def _read_object(text: str | bytes, form: str, what: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(body, dict) or body.get("format") != form:
        raise ValueError(f"it is not {what}")
    return body


def _table_from_body(body: Mapping[str, Any]) -> RankTable:
    return RankTable(
        files={name: _file_from_json(size, blocks) for name, (size, blocks) in body["files"].items()},
        entries=tuple((key, _tensor_from_json(value)) for key, value in body["tensors"].items()),
        local=dict(body["local"]),
    )


def _table_files(tables: Mapping[str, Any]) -> Iterator[TableFile]:
    for path, (size, digest) in tables.items():
        assert isinstance(size, int) and isinstance(digest, str), f"{path}: {size}, {digest}"
        yield TableFile(path, size, digest)


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(body).encode(), digest_size=32).hexdigest()


def _file_from_json(size: int, blocks: Sequence[str]) -> StoredFile:
    assert len(blocks) == -(-size // BLOCK_BYTES), f"{len(blocks)} digests for {size} bytes"
    return StoredFile(size, tuple(blocks))


def box_to_json(stored: StoredBox) -> list[Any]:
    """File, entry, start, shape, place in the entry, and whether it is transposed there."""
    return [stored.file, stored.name, stored.box.start, stored.box.shape, stored.at, stored.transposed]


def box_from_json(value: Sequence[Any]) -> StoredBox:
    """What `box_to_json` wrote."""
    file, name, start, shape, at, transposed = value
    return StoredBox(file, name, Box(tuple(start), tuple(shape)), tuple(at), bool(transposed))


def _tensor_to_json(tensor: StoredTensor) -> dict[str, Any]:
    return {"shape": tensor.shape, "dtype": tensor.dtype, "boxes": [box_to_json(stored) for stored in tensor.boxes]}


def _tensor_from_json(value: Mapping[str, Any]) -> StoredTensor:
    return StoredTensor(tuple(value["shape"]), value["dtype"], tuple(map(box_from_json, value["boxes"])))
