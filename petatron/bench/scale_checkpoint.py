"""What a save and a load cost beside the writing and reading, on one rank of a large world: the adapter of `bench scale`.

Ranks send each other messages when they plan, and the rank that gets most makes all others wait, so that one is timed. What the others
hold is made up, as a distributed optimizer shards a model: layers over pipeline stages, rows over tensor-parallel ranks, then
buckets of consecutive tensors in equal ranges over the ranks that share them. Everything that is timed is what a run calls.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch

from petatron.checkpoint.files.disk import BLOCK_BYTES, StoredFile
from petatron.checkpoint.files.manifest import (
    RankTable,
    StoredBox,
    StoredTensor,
    TableFile,
    from_json,
    table_digest,
    table_from_json,
    table_to_json,
    to_json,
)
from petatron.checkpoint.files.step_folder import MODEL, rank_file, table_path
from petatron.checkpoint.load.box_directory import Directory, Row, read_answer, requests_for, table_rows
from petatron.checkpoint.load.box_reads import plan_reads
from petatron.checkpoint.save.file_plan import Weight, file_table, plan_files
from petatron.checkpoint.save.save_plan import SavePlan, Survey, checker_of, layout_of
from petatron.checkpoint.state import MASTERS, WEIGHTS, Chunk, ModelFolder
from petatron.config import RunConfig
from petatron.mesh.rank_layout import Layout
from petatron.models.hf.folder_entries import folder_entries, logical_shapes
from petatron.sharding.boxes import Box, Shape
from petatron.train.build import architecture_of

_STATE_KINDS = (MASTERS, "exp_avg/", "exp_avg_sq/")
_LAYER = re.compile(r"layers\.(\d+)\.")
Result = TypeVar("Result")
Timed = Callable[[str, Callable[[], Result]], Result]
"""Runs a function and notes the seconds under a name."""


@dataclass(frozen=True, slots=True)
class CheckpointSizes:
    """What grows with the world: the counts of the busiest rank, and the manifest, which has a line for every rank.

    messages: ranks that it sends its boxes to. rows: boxes that it is told of. transfer_peers: ranks that it sends weights to or
    receives some from, over the world's communicator.
    """

    boxes_of_rank: int
    boxes: int
    messages: int
    rows: int
    transfer_peers: int
    table_bytes: int
    manifest_bytes: int


def measure_checkpoint(run: RunConfig, timed: Timed) -> CheckpointSizes:
    """Times a save and a load on the busiest rank, and what rank 0 does for all."""
    architecture = architecture_of(run)
    parts = architecture.model, architecture.moe, architecture.experts_in
    boxes = _boxes(logical_shapes(*parts), run)
    folder = ModelFolder(timed("folder entries", lambda: folder_entries(*parts)), {})
    world = _World(boxes, folder)
    mine = _chunks(boxes[world.busiest])
    timed("layout", lambda: layout_of(mine, {}, folder) == layout_of(mine, {}, folder))
    sent, received, plan = _plan_save(world, mine, timed)
    table = RankTable(_files(plan, mine, world.busiest), plan.table, {})
    content, digest = timed("table", lambda: _table(table))
    tables = [TableFile(table_path(rank), len(content), digest) for rank in range(world.size)]
    manifest = timed("manifest", lambda: to_json(1, layout="", facts={}, tables=tables))
    timed("read manifest", lambda: from_json(manifest))
    _plan_load(world, mine, content, timed)
    peers = {move.peer for moves in plan.transfers.rounds for move in (*moves.sending, *moves.receiving)}
    return CheckpointSizes(
        boxes_of_rank=len(mine),
        boxes=(1 + len(_STATE_KINDS)) * sum(map(len, boxes)),
        messages=sent,
        rows=sum(len(rows) for message in received.values() for rows in message.values()),
        transfer_peers=len(peers),
        table_bytes=len(content),
        manifest_bytes=len(manifest),
    )


def _plan_save(
    world: _World, mine: Sequence[Chunk], timed: Timed
) -> tuple[int, Mapping[int, Mapping[str, list[Any]]], SavePlan]:
    """How many ranks the busiest one sends messages to, the messages that it gets, and its plan."""
    rank = world.busiest

    def survey() -> tuple[Survey, list[int]]:
        made = Survey(mine, world.folder, rank=rank, world_size=world.size)
        return made, made.dtype_numbers()

    def messages() -> dict[int, str]:
        own.agree(world.largest)
        return {to: json.dumps(message) for to, message in own.messages().items()}

    own, _ = timed("survey", survey)
    sent = timed("messages", messages)
    texts = world.messages_to_busiest() | ({rank: sent[rank]} if rank in sent else {})
    received = {source: json.loads(text) for source, text in texts.items()}
    plan = timed("save plan", lambda: own.plan({source: json.loads(text) for source, text in texts.items()}))
    return len(sent), received, plan


def _plan_load(world: _World, mine: Sequence[Chunk], content: bytes, timed: Timed) -> None:
    """A load in the layout of the save: the busiest rank asks for its boxes, and answers for the tensors that it checks."""
    wanted = [chunk for chunk in mine if not chunk.key.startswith(WEIGHTS)]

    def questions() -> dict[int, list[Row]]:
        table_digest(content)
        rows = table_rows(table_from_json(content).entries, world.busiest, world.size)
        asks = requests_for(wanted, world.size)
        json.dumps([rows, asks])
        return asks

    def answer(text: str) -> str:
        rows, asks = json.loads(text)
        directory = Directory(Path())
        directory.add(rows)
        answers = [directory.answers(asked) for asked in asks]
        assert not directory.surplus(lambda kind: False), "every tensor is asked for"
        return json.dumps(answers)

    def reads() -> None:
        found = dict[int, tuple[str, StoredTensor | None]]()
        for row in (row for rows in json.loads(told) for row in rows):
            number, key, stored, _ = read_answer(row)
            found[number] = key, stored
        plan_reads(Path(), wanted, [found[number] for number in range(len(wanted))], strict=True)

    asks = timed("load requests", questions)
    checked = {name for name in world.shapes if world.checker(name) == world.busiest}
    text = json.dumps([world.rows_of(checked), world.requests_of(checked)])
    timed("directory", lambda: answer(text))
    names = {chunk.key.partition("/")[2] for chunk in wanted}
    told = answer(json.dumps([world.rows_of(names), list(asks.values())]))
    timed("load plan", reads)


class _World:
    """What all ranks hold, and what the busiest of them is told."""

    def __init__(self, boxes: Sequence[_Held], folder: ModelFolder) -> None:
        self.boxes, self.folder, self.size = boxes, folder, len(boxes)
        self.shapes = {name: shape for held in boxes for name, shape, _ in held}
        whole = [(name, shape, Box((0,) * len(shape), shape)) for name, shape in self.shapes.items()]
        self.largest = Survey(_chunks(whole), folder, rank=0, world_size=self.size).dtype_numbers()
        self.files = plan_files(folder.entries, dict.fromkeys(self.shapes, torch.bfloat16), self.size)
        self.busiest = self._busiest()

    def checker(self, name: str) -> int:
        return checker_of(WEIGHTS + name, self.size)

    def _busiest(self) -> int:
        """The rank that is told of most boxes: of state that it checks, and of weights that it writes."""
        count = Counter(name for held in self.boxes for name, _, _ in held)
        rows: Counter[int] = Counter()
        for name, number in count.items():
            rows[self.checker(name)] += len(_STATE_KINDS) * number
        for file in self.files:
            for region in (region for entry in file.entries for region in entry.regions):
                share = math.prod(region.shape) / math.prod(self.shapes[region.name])
                rows[file.rank] += math.ceil(count[region.name] * share)
        return rows.most_common(1)[0][0]

    def messages_to_busiest(self) -> dict[int, str]:
        """By the rank that sends it. Only tensors that concern the receiver are surveyed there, so chunks have other numbers."""
        writes = {
            region.name
            for file in self.files
            if file.rank == self.busiest
            for entry in file.entries
            for region in entry.regions
        }
        found: dict[int, str] = {}
        for rank, held in enumerate(self.boxes):
            some = [box for box in held if box[0] in writes or self.checker(box[0]) == self.busiest]
            if rank == self.busiest or not some:
                continue
            survey = Survey(_chunks(some), self.folder, rank=rank, world_size=self.size)
            survey.agree(self.largest)
            message = survey.messages().get(self.busiest)
            if message is not None:
                found[rank] = json.dumps(message)
        return found

    def rows_of(self, names: set[str]) -> list[Row]:
        """What all tables say of these tensors and their optimizer state."""
        rows: list[Row] = []
        for rank, held in enumerate(self.boxes):
            entries = [
                (f"{kind}{name}", _stored(rank_file(rank), f"{kind}{name}", shape, box))
                for name, shape, box in held
                if name in names
                for kind in _STATE_KINDS
            ]
            rows += [row for found in table_rows(entries, rank, self.size).values() for row in found]
        weights = {name: Weight(shape, torch.bfloat16) for name, shape in self.shapes.items()}
        for file in self.files:
            entries = file_table(file, weights, f"{MODEL}/{file.name}")
            entries = [(key, stored) for key, stored in entries if key.removeprefix(WEIGHTS) in names]
            rows += [row for found in table_rows(entries, file.rank, self.size).values() for row in found]
        return rows

    def requests_of(self, names: set[str]) -> list[list[Row]]:
        """What each rank asks about these tensors."""
        found: list[list[Row]] = []
        for held in self.boxes:
            some = [
                chunk
                for chunk in _chunks([box for box in held if box[0] in names])
                if not chunk.key.startswith(WEIGHTS)
            ]
            found += requests_for(some, self.size).values()
        return found


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


def _chunks(held: _Held) -> list[Chunk]:
    """The weights and the optimizer state in these boxes, without memory."""
    return [
        Chunk(f"{kind}{name}", shape, box.start, torch.empty(box.shape, dtype=dtype, device="meta"))
        for name, shape, box in held
        for kind, dtype in ((WEIGHTS, torch.bfloat16), *((kind, torch.float32) for kind in _STATE_KINDS))
    ]


def _stored(path: str, key: str, shape: Shape, box: Box) -> StoredTensor:
    name = f"{key}@{','.join(map(str, box.start))}"
    return StoredTensor(shape, "F32", (StoredBox(path, name, box, (0,) * len(shape)),))


def _table(table: RankTable) -> tuple[bytes, str]:
    content = table_to_json(table)
    return content, table_digest(content)


def _files(plan: SavePlan, mine: Sequence[Chunk], rank: int) -> dict[str, StoredFile]:
    """The files that a rank has written, with a digest for every block."""
    written = {rank_file(rank): _file(sum(4 * mine[index].tensor.numel() for _, index in plan.state))}
    for file in (file for file in plan.files if file.rank == rank):
        written[f"{MODEL}/{file.name}"] = _file(sum(2 * math.prod(entry.shape) for entry in file.entries))
    return written


def _file(size: int) -> StoredFile:
    return StoredFile(size, ("00000000",) * -(-size // BLOCK_BYTES))
