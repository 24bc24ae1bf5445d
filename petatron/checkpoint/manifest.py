"""manifest.json: what a checkpoint holds, where, and how to tell that it is whole.

It is written last, so a folder that has one is complete, and it carries a digest of itself and of every other file.
`docs/checkpoint-format.md` describes it for readers of other programs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from petatron.base.errors import CheckpointError
from petatron.checkpoint.disk import BLOCK_BYTES, StoredFile
from petatron.mesh.boxes import Box, Shape, tiling_problem

VERSION = 2


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
    """What one rank wrote: files, boxes as (key, whole tensor with this one box), and which file has its local entries."""

    files: Mapping[str, StoredFile]
    entries: tuple[tuple[str, StoredTensor], ...]
    local: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The whole checkpoint. `local` maps the entries that belong to one rank to their files."""

    step: int
    layout: str
    facts: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    local: Mapping[str, str]
    files: Mapping[str, StoredFile]


def merge(tables: Sequence[RankTable]) -> dict[str, StoredTensor]:
    """One table of logical tensors from all ranks' boxes; refuses a tensor that is not there exactly once."""
    tensors: dict[str, StoredTensor] = {}
    for key, part in (entry for table in tables for entry in table.entries):
        known = tensors.get(key, StoredTensor(part.shape, part.dtype, ()))
        if (known.shape, known.dtype) != (part.shape, part.dtype):
            raise CheckpointError(
                f"{key} is {known.dtype} {list(known.shape)} on one rank and {part.dtype} {list(part.shape)} on another. "
                "Nothing was saved. Give every rank's chunk the same logical shape and dtype."
            )
        tensors[key] = StoredTensor(part.shape, part.dtype, known.boxes + part.boxes)
    for key, tensor in tensors.items():
        problem = tiling_problem(tensor.shape, [stored.box for stored in tensor.boxes])
        if problem is not None:
            raise CheckpointError(
                f"the ranks' chunks of {key} are not the whole tensor: {problem}. Nothing was saved. "
                "Mark each box primary on exactly one rank."
            )
    return tensors


def to_json(manifest: Manifest) -> str:
    """The text of manifest.json."""
    body = {
        "format": "petatron checkpoint",
        "version": VERSION,
        "step": manifest.step,
        "layout": manifest.layout,
        "facts": dict(manifest.facts),
        "tensors": {key: _tensor_to_json(tensor) for key, tensor in manifest.tensors.items()},
        "local": dict(manifest.local),
        "block_bytes": BLOCK_BYTES,
        "files": {name: [file.size_bytes, file.blocks] for name, file in manifest.files.items()},
    }
    # Facts may hold tuples or integer keys, which JSON turns into something else; the digest is of what will be read.
    body = json.loads(json.dumps(body))
    return json.dumps({**body, "digest": _digest(body)}, indent=1)


def from_json(text: str) -> Manifest:
    """Read manifest.json; ValueError says what is wrong with it."""
    try:
        body = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(body, dict) or body.get("format") != "petatron checkpoint":
        raise ValueError("it is not the manifest of a Petatron checkpoint")
    if body.get("version") != VERSION or body.get("block_bytes") != BLOCK_BYTES:
        raise UnknownVersion(f"it has format version {body.get('version')}; this version of Petatron reads {VERSION}")
    digest = body.pop("digest", None)
    if digest != _digest(body):
        raise ValueError("its content does not match its own digest")
    try:
        return Manifest(
            step=body["step"],
            layout=body["layout"],
            facts=body["facts"],
            tensors={key: _tensor_from_json(value) for key, value in body["tensors"].items()},
            local=body["local"],
            files={name: _file_from_json(size, blocks) for name, (size, blocks) in body["files"].items()},
        )
    except (KeyError, TypeError, AttributeError, AssertionError) as error:
        raise ValueError(f"it lacks or misstates a field: {error!r}") from error


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(body).encode(), digest_size=32).hexdigest()


def _file_from_json(size: int, blocks: Sequence[str]) -> StoredFile:
    assert len(blocks) == -(-size // BLOCK_BYTES), f"{len(blocks)} digests for {size} bytes"
    return StoredFile(size, tuple(blocks))


def _tensor_to_json(tensor: StoredTensor) -> dict[str, Any]:
    boxes = [
        [stored.file, stored.name, stored.box.start, stored.box.shape, stored.at, stored.transposed]
        for stored in tensor.boxes
    ]
    return {"shape": tensor.shape, "dtype": tensor.dtype, "boxes": boxes}


def _tensor_from_json(value: Mapping[str, Any]) -> StoredTensor:
    boxes = tuple(
        StoredBox(file, name, Box(tuple(start), tuple(shape)), tuple(at), bool(transposed))
        for file, name, start, shape, at, transposed in value["boxes"]
    )
    return StoredTensor(tuple(value["shape"]), value["dtype"], boxes)
