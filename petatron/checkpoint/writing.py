"""What a rank writes of a checkpoint: decided once, copied if training is to go on meanwhile, then written.

The weights go into the model folder, whole (`assemble.py`); everything else, and weights that the folder has no place for,
goes as boxes into the rank's own file in `state/`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.checkpoint.assemble import Assembly, FilePlan, Weight, check_covered, file_table, plan_files, weights_of
from petatron.checkpoint.background import Staging
from petatron.checkpoint.disk import Disk, free_bytes
from petatron.checkpoint.manifest import RankTable, StoredBox, StoredTensor
from petatron.checkpoint.safetensors_file import dtype_code, file_parts
from petatron.checkpoint.state import WEIGHTS, Chunk, ChunkFacts, ModelFolder
from petatron.checkpoint.storage import MODEL, STATE, make_draft
from petatron.mesh.mesh import Axis

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One rank's part of a save. `tensors` maps a file's path in the step to its entries; `chunks` are this rank's boxes
    of weights that are still to be brought to the ranks that write them."""

    step: int
    rank: int
    layout: str
    facts: Mapping[str, Any]
    chunks: tuple[Chunk, ...]
    weights: Mapping[str, Weight]
    files: tuple[FilePlan, ...]
    documents: Mapping[str, bytes]
    tensors: Mapping[str, Mapping[str, Tensor]]
    table: tuple[tuple[str, StoredTensor], ...]
    local: Mapping[str, str]

    @property
    def bytes(self) -> int:
        """How much this rank will write; its files of the model folder are counted by their boxes' owners."""
        held = [chunk.tensor for chunk in self.chunks]
        held += [tensor for entries in self.tensors.values() for tensor in entries.values()]
        return sum(tensor.numel() * tensor.dtype.itemsize for tensor in held) + sum(map(len, self.documents.values()))

    def assembly(self, world: Axis, device: torch.device) -> Assembly:
        """What brings the model folder's tensors to the ranks that write them."""
        return Assembly(self.files, self.weights, self.chunks, world, device)

    def with_weights(self, whole: Mapping[str, Tensor]) -> Job:
        """The same with the entries that this rank writes."""
        own = {
            f"{MODEL}/{file.name}": {entry.name: whole[entry.name] for entry in file.entries}
            for file in self.files
            if file.rank == self.rank
        }
        return replace(self, chunks=(), tensors={**own, **self.tensors})

    def copied(self, staging: Staging) -> Job:
        """The same with all tensors as they are now; later changes of the run's own do not show."""
        named = {f"{path}\0{name}": tensor for path, part in self.tensors.items() for name, tensor in part.items()}
        copies = staging.copy(named)
        tensors = {path: {name: copies[f"{path}\0{name}"] for name in part} for path, part in self.tensors.items()}
        return replace(self, tensors=tensors)


def folder_chunks(chunks: Sequence[Chunk], model: ModelFolder) -> list[Chunk]:
    """The boxes that this rank is primary for and that go into the model folder."""
    keys = {WEIGHTS + region.name for entry in model.entries for region in entry.regions}
    return [chunk for chunk in chunks if chunk.primary and chunk.key in keys]


def plan_job(
    step: int,
    chunks: Sequence[Chunk],
    in_folder: Sequence[Chunk],
    survey: Sequence[Sequence[ChunkFacts]],
    *,
    model: ModelFolder | None,
    local: Mapping[str, Tensor],
    rank: int,
    layout: str,
    facts: Mapping[str, Any],
) -> Job:
    """Decide what goes where. `in_folder` are this rank's `folder_chunks`, and `survey` every rank's facts of its own."""
    path = f"{STATE}/rank-{rank:05d}.safetensors"
    weights, files, documents = {}, [], {}
    if model is not None:
        weights = weights_of(survey)
        check_covered(model.entries, weights)
        files = plan_files(model.entries, weights, world_size=len(survey))
        documents = {**model.documents, **index_document(files, weights)} if rank == 0 else {}
    tensors: dict[str, Tensor] = {f"local/{rank}/{name}": tensor for name, tensor in local.items()}
    own = dict.fromkeys(tensors, path)
    table = [
        entry for file in files if file.rank == rank for entry in file_table(file, weights, f"{MODEL}/{file.name}")
    ]
    apart = set(map(id, in_folder))
    for chunk in chunks:
        if not chunk.primary or id(chunk) in apart or not chunk.tensor.numel():
            continue
        name = f"{chunk.key}@{','.join(map(str, chunk.start))}"
        stored = StoredBox(path, name, chunk.box, (0,) * chunk.tensor.dim())
        table.append((chunk.key, StoredTensor(chunk.logical_shape, dtype_code(chunk.key, chunk.tensor), (stored,))))
        tensors[name] = chunk.tensor
    return Job(
        step=step,
        rank=rank,
        layout=layout,
        facts=facts,
        chunks=tuple(in_folder),
        weights=weights,
        files=tuple(files),
        documents=documents,
        tensors={path: tensors} if tensors or model is None else {},
        table=tuple(table),
        local=own,
    )


def index_document(files: Sequence[FilePlan], weights: Mapping[str, Weight]) -> dict[str, bytes]:
    """The file that says which tensor is in which file, as transformers reads it; none is needed for a single file."""
    if len(files) == 1:
        return {}
    names = {entry.name: file.name for file in files for entry in file.entries}
    total = sum(weight.num_bytes for weight in weights.values())
    return {INDEX: json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=1).encode()}


def check_room(folder: Path, needed_bytes: int) -> None:
    """Raise before anything is written if it cannot fit."""
    existing = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    free = free_bytes(existing)
    if free < needed_bytes:
        raise CheckpointError(
            f"a checkpoint needs {needed_bytes / 1e6:,.1f} MB, and the disk of {folder} has {free / 1e6:,.1f} MB left. Free space "
            "there, keep fewer steps (--save-total-limit), or give --save another disk; earlier checkpoints are untouched."
        )


def write_job(folder: Path, job: Job, disk: Disk) -> RankTable:
    """Write a rank's files into the draft of a step."""
    draft = make_draft(folder, job.step, disk)
    written = {path: disk.write(draft / path, file_parts(tensors)) for path, tensors in job.tensors.items()}
    for name, content in job.documents.items():
        written[f"{MODEL}/{name}"] = disk.write(draft / MODEL / name, [content])
    return RankTable(written, job.table, job.local)
