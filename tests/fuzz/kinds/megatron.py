"""What Megatron-LM saves: rank folders with torch's files, and the distributed form with a pickled table.

Nothing of ours covers their content. The zip of a torch file has checksums, which torch does not look at.
"""

from __future__ import annotations

import io
import json
import pickle
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.kind import Files, Kind
from tests.fuzz.kinds import models
from tests.fuzz.kinds.files import files_of
from tests.unit.checkpoint.megatron.megatron_files import Case as Model
from tests.unit.checkpoint.megatron.megatron_files import write_dist, write_legacy

ARGUMENTS, PLACES = "arguments.json", "places.json"
_COMMON, _METADATA = "iter_0000030/common.pt", "iter_0000030/.metadata"
_DOORS = {"read": models.read, "huggingface": models.to_huggingface, "petatron": models.to_petatron}
_FORMATS = {".pt": "torch", ".metadata": "pickle", ".distcp": "torch", ".json": "json", ".txt": "text"}


def make(name: str) -> Kind:
    if name.endswith("old"):
        return make_old(name)
    model = Model(layers=1, tp=2, experts=2 if name.endswith("legacy") else 0, expert_names="grouped")
    with tempfile.TemporaryDirectory() as folder:
        write = write_legacy if name.endswith("legacy") else _write_dist
        write(Path(folder), model)
        files = files_of(Path(folder))
    return kind_of(name, files, model.args(), writes="huggingface")


def make_old(name: str) -> Kind:
    """Files of 2019: a row of pickles and then storages, without a checkpoint version."""
    model = Model(layers=1, tp=2, names="old", swiglu=False, bias=True, learned=True, tied=True, norm="LayerNorm")
    with tempfile.TemporaryDirectory() as folder:
        for path in write_legacy(Path(folder), model, edit=lambda content: content.pop("checkpoint_version")).glob(
            "*/*.pt"
        ):
            torch.save(torch.load(path, weights_only=False), path, _use_new_zipfile_serialization=False)
        files = files_of(Path(folder))
    return kind_of(name, files, model.args(), writes="petatron", formats={**_FORMATS, ".pt": "pickle"})


def kind_of(name: str, files: Files, args: Namespace, *, writes: str, formats: Mapping[str, str] = _FORMATS) -> Kind:
    """Returns the kind of a sample's files, whose arguments and places are mutated as such too; writes: what it is converted to."""
    inner = {**files, ARGUMENTS: json.dumps(_plain(vars(args))).encode()}
    if _METADATA in files:
        inner[PLACES] = json.dumps(_places(files[_METADATA])).encode()
    return Kind(
        name,
        files,
        doors={"read": _DOORS["read"], writes: _DOORS[writes]},
        shares={"read": 9},
        formats=formats,
        inner=inner,
        seal=_sealer(files),
        streams=(".pt",),
    )


def _write_dist(folder: Path, model: Model) -> None:
    write_dist(folder, model).finish(model.args())
    (folder / "latest_checkpointed_iteration.txt").write_text("30")


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if isinstance(value, int | float | str | list | None)}


def _sealer(sample: Files) -> Callable[[Files], Files]:
    """Changed arguments go into the first file of torch, and changed places into the table.

    Only files of the sample are opened here as the pickles they are. A mutated one is an attack, and stays as it is.
    """
    first = _COMMON if _COMMON in sample else min(path for path in sample if path.endswith(".pt"))
    content = torch.load(io.BytesIO(sample[first]), weights_only=False)

    def seal(inner: Files) -> Files:
        files = {path: content for path, content in inner.items() if path not in (ARGUMENTS, PLACES)}
        with suppress(
            ValueError, LookupError, TypeError, AttributeError, RecursionError, RuntimeError, pickle.PicklingError
        ):
            values = json.loads(inner[ARGUMENTS])
            if files[first] == sample[first] and isinstance(values, dict) and values != _plain(vars(content["args"])):
                out = io.BytesIO()
                torch.save({**content, "args": Namespace(**values)}, out)
                files[first] = out.getvalue()
        with suppress(
            ValueError, LookupError, TypeError, AttributeError, RecursionError, RuntimeError, pickle.PicklingError
        ):
            if (
                PLACES in inner
                and files[_METADATA] == sample[_METADATA]
                and json.loads(inner[PLACES]) != _places(sample[_METADATA])
            ):
                table = pickle.loads(sample[_METADATA])
                _put_places(table, json.loads(inner[PLACES]))
                files[_METADATA] = pickle.dumps(table)
        return files

    return seal


def _places(metadata: bytes) -> dict[str, Any]:
    """The table of a distributed checkpoint as JSON: shapes, chunks, and where they are."""
    table = pickle.loads(metadata)
    tensors = {
        name: {"size": list(facts.size), "chunks": [[list(chunk.offsets), list(chunk.sizes)] for chunk in facts.chunks]}
        for name, facts in table.state_dict_metadata.items()
        if hasattr(facts, "chunks")
    }
    places = [
        [index.fqn, list(index.offset), info.relative_path, info.offset, info.length]
        for index, info in table.storage_data.items()
    ]
    return {"tensors": tensors, "places": places}


def _put_places(table: Any, changed: dict[str, Any]) -> None:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

    old = table.state_dict_metadata
    table.state_dict_metadata = {
        name: TensorStorageMetadata(
            old[name].properties
            if name in old and hasattr(old[name], "properties")
            else next(iter(old.values())).properties,
            _size(facts["size"]),
            [ChunkStorageMetadata(_size(offsets), _size(sizes)) for offsets, sizes in facts["chunks"]],
        )
        for name, facts in changed["tensors"].items()
    }
    table.storage_data = {
        MetadataIndex(name, _size(offset)): _StorageInfo(file, at, length)
        for name, offset, file, at, length in changed["places"]
    }


def _size(values: Any) -> Any:
    """A torch.Size where it can be one."""
    try:
        return torch.Size(values)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return tuple(values)
