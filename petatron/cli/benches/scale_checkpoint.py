"""What a save and a load cost beside the writing and reading, on one rank of a large world: the adapter of `bench scale`.

A rank plans from what all ranks hold, so the tables of the others are made up, as sharded optimizer state cuts a model: layers over
pipeline stages, rows over tensor-parallel ranks, then buckets of consecutive tensors in equal ranges over the ranks that share them.
Everything that is timed is what a run calls.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
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
    boxes = _boxes(logical_shapes(*parts), run)
    mine = [
        Chunk(key, shape, box.start, torch.empty(box.shape, dtype=dtype, device="meta"))
        for key, shape, dtype, box in _facts(boxes[rank])
    ]
    folder = ModelFolder(folder_entries(*parts), {})
    weights = folder_chunks(mine, folder)
    others = [[fact for fact in _facts(held) if fact[0].startswith(WEIGHTS)] for held in boxes]
    others[rank] = timed("survey", lambda: [chunk.facts for chunk in folder_chunks(mine, folder)])
    plan = partial(plan_job, 1, mine, weights, others, model=folder, local={}, rank=rank, layout="", facts={})
    timed("save plan", plan)
    manifest = timed("manifest", partial(_publish, _tables(boxes, folder, others)))
    read = timed("read manifest", lambda: from_json(manifest))
    wanted = set(read.tensors)
    timed("load plan", lambda: plan_reads(Path(), read, mine, wanted=wanted, strict=True))
    return CheckpointSizes(len(mine), sum(len(tensor.boxes) for tensor in read.tensors.values()), len(manifest))


_Held = list[tuple[str, Shape, Box]]


def _boxes(shapes: Mapping[str, Shape], run: RunConfig) -> list[_Held]:
    """The boxes of logical tensors that each rank of the world owns, in the order of ranks."""
    layout, bucket_size = Layout.from_config(run.parallel), run.parallel.ddp_bucket_size
    assert bucket_size is not None
    held: list[_Held] = [[] for _ in range(layout.world_size)]
    owners = layout.dp * layout.cp
    for stage in range(layout.pp):
        here = {name: shape for name, shape in shapes.items() if _stage(name, layout.pp, run.model.num_layers) == stage}
        for tp_rank in range(layout.tp):
            first = stage * owners * layout.tp + tp_rank
            for bucket in _buckets(here, tp=layout.tp, tp_rank=tp_rank, size=bucket_size):
                for place, boxes in enumerate(_shares(bucket, owners)):
                    held[first + place * layout.tp] += boxes
    return held


def _stage(name: str, pp: int, num_layers: int) -> int:
    layer = _LAYER.match(name)
    return int(layer.group(1)) * pp // num_layers if layer else 0 if name.startswith("embed") else pp - 1


def _buckets(shapes: Mapping[str, Shape], *, tp: int, tp_rank: int, size: int) -> Iterator[_Held]:
    """What a tensor-parallel rank holds, rows of matrices and whole vectors, filled into buckets of at least `size` elements."""
    for vectors in (False, True):
        bucket: _Held = []
        for name, shape in ((name, shape) for name, shape in shapes.items() if (len(shape) == 1) == vectors):
            split = tp if not vectors else 1
            begin, end = shape[0] * tp_rank // split, shape[0] * (tp_rank + 1) // split
            if vectors and tp_rank:
                continue
            bucket.append((name, shape, Box((begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:]))))
            if sum(math.prod(box.shape) for _, _, box in bucket) >= size:
                yield bucket
                bucket = []
        if bucket:
            yield bucket


def _shares(bucket: _Held, owners: int) -> list[_Held]:
    """A bucket in as many equal ranges as ranks share its state, to whole rows."""
    shares: list[_Held] = [[] for _ in range(owners)]
    total, before = sum(math.prod(box.shape) for _, _, box in bucket), 0
    for name, shape, box in bucket:
        width = math.prod(box.shape[1:])
        first = before * owners // total
        last = -(-(before + math.prod(box.shape)) * owners // total)
        cuts = [
            min(max(-(-(total * place // owners - before) // width), 0), box.shape[0])
            for place in range(first, last + 1)
        ]
        for place, (begin, end) in enumerate(pairwise(cuts), start=first):
            if begin < end:
                part = Box((box.start[0] + begin, *box.start[1:]), (end - begin, *box.shape[1:]))
                shares[place].append((name, shape, part))
        before += math.prod(box.shape)
    return shares


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
