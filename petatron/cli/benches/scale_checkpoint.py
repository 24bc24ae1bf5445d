"""What a save and a load cost beside the writing and reading, on one rank of a large world: the adapter of `bench scale`.

A rank plans from what all ranks hold, so the tables of the others are made up: every logical tensor is cut by rows over the ranks of
its pipeline stage, which is as many boxes per rank as sharded optimizer state has. Everything that is timed is what a run calls.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from petatron.checkpoint.assemble import file_table, plan_files, weights_of
from petatron.checkpoint.disk import BLOCK_BYTES, StoredFile
from petatron.checkpoint.manifest import Manifest, RankTable, StoredBox, StoredTensor, from_json, merge, to_json
from petatron.checkpoint.reading import plan_reads
from petatron.checkpoint.state import MASTERS, WEIGHTS, Chunk, ChunkFacts, ModelFolder
from petatron.checkpoint.writing import folder_chunks, plan_job
from petatron.config import RunConfig
from petatron.mesh.boxes import Box, Shape
from petatron.mesh.layout import Layout
from petatron.models.hf.entries import folder_entries, logical_shapes
from petatron.train.build import architecture_of

_STATE_KINDS = (MASTERS, "exp_avg/", "exp_avg_sq/")
_LAYER = re.compile(r"layers\.(\d+)\.")
Result = TypeVar("Result")
Timed = Callable[[str, Callable[[], Result]], Result]
"""Runs a function and notes the seconds under a name."""


@dataclass(frozen=True, slots=True)
class CheckpointSizes:
    """What grows with the world."""

    boxes_of_rank: int
    boxes: int
    manifest_bytes: int


def measure_checkpoint(run: RunConfig, rank: int, timed: Timed) -> CheckpointSizes:
    """Times `survey`, `save plan`, `manifest` (on rank 0), `read manifest` (on rank 0) and `load plan` of one rank."""
    architecture = architecture_of(run)
    parts = architecture.model, architecture.moe, architecture.experts_in
    boxes = _boxes(logical_shapes(*parts), Layout.from_config(run.parallel), run.model.num_layers)
    mine = [Chunk(key, shape, box.start, torch.empty(box.shape, dtype=dtype, device="meta"))
            for key, shape, dtype, box in _facts(boxes[rank])]  # fmt: skip
    folder = ModelFolder(folder_entries(*parts), {})
    weights = folder_chunks(mine, folder)
    others = [[fact for fact in _facts(held) if fact[0].startswith(WEIGHTS)] for held in boxes]
    others[rank] = timed("survey", lambda: [chunk.facts for chunk in folder_chunks(mine, folder)])
    plan = partial(plan_job, 1, mine, weights, others, model=folder, local={}, rank=rank, layout="", facts={})
    timed("save plan", plan)
    tables = _tables(boxes, folder, others)
    manifest = timed("manifest", lambda: _publish(tables))
    del tables, others
    read = timed("read manifest", lambda: from_json(manifest))
    wanted = set(read.tensors)
    timed("load plan", lambda: plan_reads(Path(), read, mine, wanted=wanted, strict=True))
    return CheckpointSizes(len(mine), sum(len(tensor.boxes) for tensor in read.tensors.values()), len(manifest))


_Held = list[tuple[str, Shape, Box]]


def _boxes(shapes: Mapping[str, Shape], layout: Layout, num_layers: int) -> list[_Held]:
    """The box of each logical tensor that each rank of the world holds."""
    of_stage = layout.world_size // layout.pp
    held: list[_Held] = [[] for _ in range(layout.world_size)]
    for name, shape in shapes.items():
        layer = _LAYER.match(name)
        last = layout.pp - 1
        stage = int(layer.group(1)) * layout.pp // num_layers if layer else 0 if name.startswith("embed") else last
        for place in range(of_stage):
            begin, end = shape[0] * place // of_stage, shape[0] * (place + 1) // of_stage
            if begin < end:
                start = (begin, *(0 for _ in shape[1:]))
                held[stage * of_stage + place].append((name, shape, Box(start, (end - begin, *shape[1:]))))
    return held


def _facts(held: _Held) -> Iterator[ChunkFacts]:
    for name, shape, box in held:
        yield f"{WEIGHTS}{name}", shape, torch.bfloat16, box
        for kind in _STATE_KINDS:
            yield f"{kind}{name}", shape, torch.float32, box


def _tables(boxes: Sequence[_Held], folder: ModelFolder, survey: Sequence[Sequence[ChunkFacts]]) -> list[RankTable]:
    """What every rank has written, as rank 0 gets it."""
    weights = weights_of(survey)
    files = plan_files(folder.entries, weights, world_size=len(boxes))
    tables: list[RankTable] = []
    for rank, held in enumerate(boxes):
        path = f"state/rank-{rank:05d}.safetensors"
        own = [
            (f"{kind}{name}", _stored(path, f"{kind}{name}", shape, box))
            for kind in _STATE_KINDS
            for name, shape, box in held
        ]
        size = sum(4 * math.prod(stored.boxes[0].box.shape) for _, stored in own)
        written = {path: _file(size)}
        for file in (file for file in files if file.rank == rank):
            entries = list(file_table(file, weights, f"model/{file.name}"))
            written[f"model/{file.name}"] = _file(sum(2 * math.prod(entry.shape) for entry in file.entries))
            own += entries
        tables.append(RankTable(written, tuple(own), {}))
    return tables


def _stored(path: str, key: str, shape: Shape, box: Box) -> StoredTensor:
    name = f"{key}@{','.join(map(str, box.start))}"
    return StoredTensor(shape, "F32", (StoredBox(path, name, box, (0,) * len(shape)),))


def _file(size: int) -> StoredFile:
    return StoredFile(size, ("00000000",) * -(-size // BLOCK_BYTES))


def _publish(tables: Sequence[RankTable]) -> str:
    """All of publishing but the disk."""
    files = {name: stored for table in tables for name, stored in table.files.items()}
    return to_json(Manifest(step=1, layout="", facts={}, tensors=merge(tables), local={}, files=files))
