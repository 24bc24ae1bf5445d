"""Writes one rank's files of a checkpoint: planned at the first save, staged if the save is async, then written.

Weights go into the model folder, whole (`gather_weights.py`); all other state, and weights that the folder cannot store, goes as
boxes into the rank's own file in `state/`. The rank's table, which describes its files, is written last.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.base.format_text import format_bytes
from petatron.checkpoint.checkpoint_contents import ModelFolder
from petatron.checkpoint.files.digested_file_io import Disk, free_bytes
from petatron.checkpoint.files.manifest import RankTable, StoredTensor, TableFile
from petatron.checkpoint.files.safetensors_file import serialize_tensors
from petatron.checkpoint.files.step_folder import MODEL_FOLDER, make_tmp_step, rank_file_path, write_table
from petatron.checkpoint.save.assign_files_to_ranks import FilePlan, entry_bytes
from petatron.checkpoint.save.async_save import StagingBuffer
from petatron.checkpoint.save.save_plan import SavePlan
from petatron.checkpoint.tensor_chunk import Chunk

INDEX_FILE = "model.safetensors.index.json"


class SaveRequest(NamedTuple):
    """What a rank saves in one step. `local` are its own tensors, which only a run of the same `layout` gets back."""

    step: int
    chunks: Sequence[Chunk]
    layout: str
    local: Mapping[str, Tensor]
    model: ModelFolder | None


@dataclass(frozen=True, slots=True, eq=False)
class RankWriteJob:
    """One rank's part of a save. `tensors` maps a file's path in the step to its entries."""

    step: int
    rank: int
    layout: str
    metadata: Mapping[str, Any]
    aux_files: Mapping[str, bytes]
    tensors: Mapping[str, Mapping[str, Tensor]]
    table_entries: tuple[tuple[str, StoredTensor], ...]
    local: Mapping[str, str]

    def staged(self, staging: StagingBuffer) -> RankWriteJob:
        """Returns the same job with all tensors copied; later changes by the run do not show."""
        named = {f"{path}\0{name}": tensor for path, part in self.tensors.items() for name, tensor in part.items()}
        copies = staging.stage(named)
        tensors = {path: {name: copies[f"{path}\0{name}"] for name in part} for path, part in self.tensors.items()}
        return replace(self, tensors=tensors)


def build_write_job(
    request: SaveRequest, plan: SavePlan, gathered: Mapping[str, Tensor], *, rank: int, metadata: Mapping[str, Any]
) -> RankWriteJob:
    """Binds this save's tensors to a plan; `gathered` are the entries of the model folder that this rank writes."""
    path, model = rank_file_path(rank), request.model
    tensors: dict[str, Tensor] = {f"local/{rank}/{name}": tensor for name, tensor in request.local.items()}
    local_files = dict.fromkeys(tensors, path)
    tensors |= {name: request.chunks[index].tensor for name, index in plan.state_entries}
    files = {
        f"{MODEL_FOLDER}/{file.name}": {entry.name: gathered[entry.name] for entry in file.entries}
        for file in plan.files
        if file.rank == rank
    }
    if tensors or model is None:
        files[path] = tensors
    documents: dict[str, bytes] = {}
    if rank == 0 and model is not None:
        documents = {**model.aux_files, **weight_index_file(plan.files, plan.dtypes)}
    return RankWriteJob(request.step, rank, request.layout, metadata, documents, files, plan.table_entries, local_files)


def weight_index_file(files: Sequence[FilePlan], dtypes: Mapping[str, torch.dtype]) -> dict[str, bytes]:
    """Returns the index of tensor to file that transformers reads; none is needed for a single file."""
    if len(files) == 1:
        return {}
    names = {entry.name: file.name for file in files for entry in file.entries}
    total = sum(entry_bytes(entry, dtypes) for file in files for entry in file.entries)
    return {INDEX_FILE: json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=1).encode()}


def check_free_space(folder: Path, needed_bytes: int) -> None:
    """Raises before anything is written if it cannot fit."""
    free = free_bytes(next(path for path in (folder, *folder.resolve().parents) if path.exists()))
    if free < needed_bytes:
        raise CheckpointError(
            f"a checkpoint needs {format_bytes(needed_bytes)}, and the disk of {folder} has {format_bytes(free)} left. Free space "
            "there, keep fewer steps (--save-total-limit), or give --save another disk; earlier checkpoints are untouched."
        )


def write_rank_files(folder: Path, job: RankWriteJob, disk: Disk) -> TableFile:
    """Writes a rank's files and then its table into the temporary folder of a step."""
    tmp_folder = make_tmp_step(folder, job.step, disk)
    written = {path: disk.write(tmp_folder / path, serialize_tensors(tensors)) for path, tensors in job.tensors.items()}
    for name, content in job.aux_files.items():
        written[f"{MODEL_FOLDER}/{name}"] = disk.write(tmp_folder / MODEL_FOLDER / name, [content])
    return write_table(tmp_folder, job.rank, RankTable(written, job.table_entries, job.local), disk)
