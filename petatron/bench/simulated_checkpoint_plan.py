"""Measures how long one rank of a large simulated world plans a save and a load, for `bench scale`.

Ranks exchange messages when they plan, and the rank that receives most makes all others wait, so that one is timed. What the others
hold is simulated as a distributed optimizer shards a model: layers over pipeline stages, rows over tensor-parallel ranks, then
buckets of consecutive tensors in equal ranges over the data-parallel ranks. Everything that is timed is what a run calls.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch

from petatron.checkpoint.checkpoint_contents import ModelFolder
from petatron.checkpoint.files.digested_file_io import BLOCK_BYTES, StoredFile
from petatron.checkpoint.files.manifest import (
    RankTable,
    StoredBox,
    StoredTensor,
    TableFile,
    manifest_from_json,
    manifest_to_json,
    table_digest,
    table_from_json,
    table_to_json,
)
from petatron.checkpoint.files.step_folder import MODEL_FOLDER, rank_file_path, table_path
from petatron.checkpoint.load.reshard_reads import plan_reads
from petatron.checkpoint.load.stored_box_lookup import (
    MessageRow,
    StoredBoxLookup,
    box_requests,
    parse_answer,
    table_rows,
)
from petatron.checkpoint.save.assign_files_to_ranks import WeightSpec, file_table_entries, plan_files
from petatron.checkpoint.save.save_plan import SavePlan, SavePlanner, owner_rank, save_plan_key
from petatron.checkpoint.tensor_chunk import MASTER_PREFIX, WEIGHT_PREFIX, Chunk
from petatron.config import RunConfig
from petatron.mesh.rank_layout import Layout
from petatron.models.hf.folder_entries import folder_entries
from petatron.models.registry import model_spec
from petatron.sharding.boxes import Box, Shape

_STATE_KINDS = (MASTER_PREFIX, "exp_avg/", "exp_avg_sq/")
_LAYER = re.compile(r"layers\.(\d+)\.")
Result = TypeVar("Result")
Timed = Callable[[str, Callable[[], Result]], Result]
"""Runs a function and records the seconds under a name."""


@dataclass(frozen=True, slots=True)
class CheckpointSizes:
    """What grows with the world: the counts of the busiest rank, and the manifest, which has a line for every rank.

    messages: ranks that it sends its boxes to. rows: boxes that it receives. transfer_peers: ranks that it sends weights to or receives
    some from, over the world's communicator.
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
    spec = model_spec(run)
    boxes = _boxes_per_rank(spec.logical_shapes(), run)
    folder = ModelFolder(timed("folder entries", lambda: folder_entries(spec)), {})
    world = _SimulatedWorld(boxes, folder)
    mine = _chunks(boxes[world.busiest])
    timed("layout", lambda: save_plan_key(mine, {}, folder) == save_plan_key(mine, {}, folder))
    sent, received, plan = _plan_save(world, mine, timed)
    table = RankTable(_written_files(plan, mine, world.busiest), plan.table_entries, {})
    content, digest = timed("table", lambda: _table_and_digest(table))
    tables = [TableFile(table_path(rank), len(content), digest) for rank in range(world.world_size)]
    manifest = timed("manifest", lambda: manifest_to_json(1, layout="", metadata={}, tables=tables))
    timed("read manifest", lambda: manifest_from_json(manifest))
    _plan_load(world, mine, content, timed)
    peers = {move.peer for moves in plan.transfers.rounds for move in (*moves.sends, *moves.receives)}
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
    world: _SimulatedWorld, mine: Sequence[Chunk], timed: Timed
) -> tuple[int, Mapping[int, Mapping[str, list[Any]]], SavePlan]:
    """Returns how many ranks the busiest one sends messages to, the messages that it receives, and its plan."""
    rank = world.busiest

    def survey() -> tuple[SavePlanner, list[int]]:
        made = SavePlanner(mine, world.folder, rank=rank, world_size=world.world_size)
        return made, made.encoded_dtypes()

    def messages() -> dict[int, str]:
        planner.set_agreed_dtypes(world.largest)
        return {to: json.dumps(message) for to, message in planner.messages().items()}

    planner, _ = timed("survey", survey)
    sent = timed("messages", messages)
    texts = world.messages_to_busiest() | ({rank: sent[rank]} if rank in sent else {})
    received = {source: json.loads(text) for source, text in texts.items()}
    plan = timed("save plan", lambda: planner.plan({source: json.loads(text) for source, text in texts.items()}))
    return len(sent), received, plan


def _plan_load(world: _SimulatedWorld, mine: Sequence[Chunk], content: bytes, timed: Timed) -> None:
    """Loads in the layout of the save: the busiest rank requests its boxes, and answers for the tensors that it checks."""
    wanted = [chunk for chunk in mine if not chunk.key.startswith(WEIGHT_PREFIX)]

    def questions() -> dict[int, list[MessageRow]]:
        table_digest(content)
        rows = table_rows(table_from_json(content).entries, world.busiest, world.world_size)
        asks = box_requests(wanted, world.world_size)
        json.dumps([rows, asks])
        return asks

    def answer(text: str) -> str:
        rows, asks = json.loads(text)
        directory = StoredBoxLookup(Path())
        directory.add_rows(rows)
        answers = [directory.answer_requests(asked) for asked in asks]
        assert not directory.unexpected_keys(lambda kind: False), "every tensor is asked for"
        return json.dumps(answers)

    def reads() -> None:
        tensors = dict[int, tuple[str, StoredTensor | None]]()
        for row in (row for rows in json.loads(told) for row in rows):
            number, key, stored, _ = parse_answer(row)
            tensors[number] = key, stored
        plan_reads(Path(), wanted, [tensors[number] for number in range(len(wanted))], strict=True)

    asks = timed("load requests", questions)
    checked = {name for name in world.shapes if world.checker(name) == world.busiest}
    text = json.dumps([world.rows_for_tensors(checked), world.requests_for_tensors(checked)])
    timed("directory", lambda: answer(text))
    names = {chunk.key.partition("/")[2] for chunk in wanted}
    told = answer(json.dumps([world.rows_for_tensors(names), list(asks.values())]))
    timed("load plan", reads)


class _SimulatedWorld:
    """What all ranks hold, and what the busiest of them receives."""

    def __init__(self, boxes: Sequence[_HeldBoxes], folder: ModelFolder) -> None:
        self.boxes, self.folder, self.world_size = boxes, folder, len(boxes)
        self.shapes = {name: shape for held in boxes for name, shape, _ in held}
        boxes_of_all = [(name, shape, Box((0,) * len(shape), shape)) for name, shape in self.shapes.items()]
        self.largest = SavePlanner(_chunks(boxes_of_all), folder, rank=0, world_size=self.world_size).encoded_dtypes()
        self.files = plan_files(folder.entries, dict.fromkeys(self.shapes, torch.bfloat16), self.world_size)
        self.busiest = self._busiest()

    def checker(self, name: str) -> int:
        return owner_rank(WEIGHT_PREFIX + name, self.world_size)

    def _busiest(self) -> int:
        """Returns the rank that receives most boxes: of state that it checks, and of weights that it writes."""
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
        """Returns messages by sender. Only the receiver's tensors are planned there, so chunks have other indices."""
        files = [file for file in self.files if file.rank == self.busiest]
        writes = {region.name for file in files for entry in file.entries for region in entry.regions}
        messages: dict[int, str] = {}
        for rank, held in enumerate(self.boxes):
            some = [box for box in held if box[0] in writes or self.checker(box[0]) == self.busiest]
            if rank == self.busiest or not some:
                continue
            survey = SavePlanner(_chunks(some), self.folder, rank=rank, world_size=self.world_size)
            survey.set_agreed_dtypes(self.largest)
            message = survey.messages().get(self.busiest)
            if message is not None:
                messages[rank] = json.dumps(message)
        return messages

    def rows_for_tensors(self, names: set[str]) -> list[MessageRow]:
        """Returns the rows of all tables for these tensors and their optimizer state."""
        rows: list[MessageRow] = []
        for rank, held in enumerate(self.boxes):
            wanted = [held_box for held_box in held if held_box[0] in names]
            keyed = [(f"{kind}{name}", shape, box) for name, shape, box in wanted for kind in _STATE_KINDS]
            entries = [(key, _stored_tensor(rank_file_path(rank), key, shape, box)) for key, shape, box in keyed]
            rows += chain.from_iterable(table_rows(entries, rank, self.world_size).values())
        weights = {name: WeightSpec(shape, torch.bfloat16) for name, shape in self.shapes.items()}
        for file in self.files:
            entries = file_table_entries(file, weights, f"{MODEL_FOLDER}/{file.name}")
            entries = [(key, stored) for key, stored in entries if key.removeprefix(WEIGHT_PREFIX) in names]
            rows += chain.from_iterable(table_rows(entries, file.rank, self.world_size).values())
        return rows

    def requests_for_tensors(self, names: set[str]) -> list[list[MessageRow]]:
        """Returns each rank's requests for these tensors."""
        requests: list[list[MessageRow]] = []
        for held in self.boxes:
            chunks = _chunks([box for box in held if box[0] in names])
            state = [chunk for chunk in chunks if not chunk.key.startswith(WEIGHT_PREFIX)]
            requests += box_requests(state, self.world_size).values()
        return requests


_HeldBoxes = list[tuple[str, Shape, Box]]


def _boxes_per_rank(shapes: Mapping[str, Shape], run: RunConfig) -> list[_HeldBoxes]:
    """Returns the boxes of logical tensors that each rank of the world owns, in rank order."""
    layout, bucket_size = Layout.from_config(run.parallel), run.parallel.ddp_bucket_size
    held: list[_HeldBoxes] = [[] for _ in range(layout.world_size)]
    owners = layout.dp * layout.cp
    for stage in range(layout.pp):
        here = {
            name: shapes[name] for name in shapes if _pipeline_stage(name, layout.pp, run.model.num_layers) == stage
        }
        for tp_rank in range(layout.tp):
            first = stage * owners * layout.tp + tp_rank
            for bucket in _buckets(here, tp=layout.tp, tp_rank=tp_rank, size=bucket_size):
                for place, boxes in enumerate(_shard_bucket(bucket, owners)):
                    held[first + place * layout.tp] += boxes
    return held


def _pipeline_stage(name: str, pp: int, num_layers: int) -> int:
    layer = _LAYER.match(name)
    return int(layer.group(1)) * pp // num_layers if layer else 0 if name.startswith("embed") else pp - 1


def _buckets(shapes: Mapping[str, Shape], *, tp: int, tp_rank: int, size: int) -> Iterator[_HeldBoxes]:
    """Yields a tensor-parallel rank's shards, rows of matrices and whole vectors, in buckets of at least `size` elements."""
    for vectors in (False, True):
        bucket: _HeldBoxes = []
        for name, shape in shapes.items():
            if (len(shape) == 1) != vectors or (vectors and tp_rank):
                continue
            split = 1 if vectors else tp
            begin, end = shape[0] * tp_rank // split, shape[0] * (tp_rank + 1) // split
            bucket.append((name, shape, Box((begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:]))))
            if sum(math.prod(box.shape) for _, _, box in bucket) >= size:
                yield bucket
                bucket = []
        if bucket:
            yield bucket


def _shard_bucket(bucket: _HeldBoxes, owners: int) -> list[_HeldBoxes]:
    """Splits a bucket into one equal range per owner, to whole rows."""
    shares: list[_HeldBoxes] = [[] for _ in range(owners)]
    total, before = sum(math.prod(box.shape) for _, _, box in bucket), 0
    for name, shape, box in bucket:
        width = math.prod(box.shape[1:])
        first = before * owners // total
        last = -(-(before + math.prod(box.shape)) * owners // total)
        ends = (-(-(total * place // owners - before) // width) for place in range(first, last + 1))
        cuts = [min(max(end, 0), box.shape[0]) for end in ends]
        for place, (begin, end) in enumerate(pairwise(cuts), start=first):
            if begin < end:
                part = Box((box.start[0] + begin, *box.start[1:]), (end - begin, *box.shape[1:]))
                shares[place].append((name, shape, part))
        before += math.prod(box.shape)
    return shares


def _chunks(held: _HeldBoxes) -> list[Chunk]:
    """The weights and the optimizer state in these boxes, without memory."""
    return [
        Chunk(f"{kind}{name}", shape, box.start, torch.empty(box.shape, dtype=dtype, device="meta"))
        for name, shape, box in held
        for kind, dtype in ((WEIGHT_PREFIX, torch.bfloat16), *((kind, torch.float32) for kind in _STATE_KINDS))
    ]


def _stored_tensor(path: str, key: str, shape: Shape, box: Box) -> StoredTensor:
    name = f"{key}@{','.join(map(str, box.start))}"
    return StoredTensor(shape, "F32", (StoredBox(path, name, box, (0,) * len(shape)),))


def _table_and_digest(table: RankTable) -> tuple[bytes, str]:
    content = table_to_json(table)
    return content, table_digest(content)


def _written_files(plan: SavePlan, mine: Sequence[Chunk], rank: int) -> dict[str, StoredFile]:
    """Returns the files that a rank has written, with a digest for every block."""
    state_bytes = sum(4 * mine[index].tensor.numel() for _, index in plan.state_entries)
    written = {rank_file_path(rank): _stored_file(state_bytes)}
    for file in (file for file in plan.files if file.rank == rank):
        written[f"{MODEL_FOLDER}/{file.name}"] = _stored_file(sum(2 * math.prod(entry.shape) for entry in file.entries))
    return written


def _stored_file(size: int) -> StoredFile:
    return StoredFile(size, ("00000000",) * -(-size // BLOCK_BYTES))
