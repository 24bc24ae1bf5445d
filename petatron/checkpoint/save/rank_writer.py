"""What a rank writes of a checkpoint: planned at the first save, copied if training is to go on meanwhile, then written.

The weights go into the model folder, whole (`gather_weights.py`); everything else, and weights that the folder has no place for,
goes as boxes into the rank's own file in `state/`. The rank's table, which says what is in its files, comes last.
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
from petatron.checkpoint.files.disk import Disk, free_bytes
from petatron.checkpoint.files.manifest import RankTable, StoredTensor, TableFile
from petatron.checkpoint.files.safetensors_file import file_parts
from petatron.checkpoint.files.step_folder import MODEL, make_draft, rank_file, write_table
from petatron.checkpoint.save.async_save import Staging
from petatron.checkpoint.save.file_plan import FilePlan, entry_bytes
from petatron.checkpoint.save.save_plan import SavePlan
from petatron.checkpoint.state import Chunk, ModelFolder

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One rank's part of a save. `tensors` maps a file's path in the step to its entries."""

    step: int
    rank: int
    layout: str
    facts: Mapping[str, Any]
    documents: Mapping[str, bytes]
    tensors: Mapping[str, Mapping[str, Tensor]]
    table: tuple[tuple[str, StoredTensor], ...]
    local: Mapping[str, str]

    def copied(self, staging: Staging) -> Job:
        """The same with all tensors as they are now; later changes of the run's own do not show."""
        named = {f"{path}\0{name}": tensor for path, part in self.tensors.items() for name, tensor in part.items()}
        copies = staging.copy(named)
        tensors = {path: {name: copies[f"{path}\0{name}"] for name in part} for path, part in self.tensors.items()}
        return replace(self, tensors=tensors)


def fill_job(
    step: int,
    plan: SavePlan,
    chunks: Sequence[Chunk],
    whole: Mapping[str, Tensor],
    *,
    rank: int,
    local: Mapping[str, Tensor],
    model: ModelFolder | None,
    facts: Mapping[str, Any],
    layout: str,
) -> Job:
    """A plan with this save's tensors; `whole` are the entries of the model folder that this rank writes."""
    path = rank_file(rank)
    tensors: dict[str, Tensor] = {f"local/{rank}/{name}": tensor for name, tensor in local.items()}
    own = dict.fromkeys(tensors, path)
    tensors |= {name: chunks[index].tensor for name, index in plan.state}
    files = {
        f"{MODEL}/{file.name}": {entry.name: whole[entry.name] for entry in file.entries}
        for file in plan.files
        if file.rank == rank
    }
    if tensors or model is None:
        files[path] = tensors
    documents = folder_documents(plan.files, plan.dtypes, model) if rank == 0 and model is not None else {}
    return Job(step, rank, layout, facts, documents, files, plan.table, own)


def folder_documents(
    files: Sequence[FilePlan], dtypes: Mapping[str, torch.dtype], model: ModelFolder
) -> dict[str, bytes]:
    """The files of the model folder that hold no tensors; the first rank writes them."""
    return {**model.documents, **index_document(files, dtypes)}


def index_document(files: Sequence[FilePlan], dtypes: Mapping[str, torch.dtype]) -> dict[str, bytes]:
    """The file that says which tensor is in which file, as transformers reads it; none is needed for a single file."""
    if len(files) == 1:
        return {}
    names = {entry.name: file.name for file in files for entry in file.entries}
    total = sum(entry_bytes(entry, dtypes) for file in files for entry in file.entries)
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


def write_job(folder: Path, job: Job, disk: Disk) -> TableFile:
    """Write a rank's files and then its table into the draft of a step."""
    draft = make_draft(folder, job.step, disk)
    written = {path: disk.write(draft / path, file_parts(tensors)) for path, tensors in job.tensors.items()}
    for name, content in job.documents.items():
        written[f"{MODEL}/{name}"] = disk.write(draft / MODEL / name, [content])
    return write_table(draft, job.rank, RankTable(written, job.table, job.local), disk)
