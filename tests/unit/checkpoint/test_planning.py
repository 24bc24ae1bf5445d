"""Plans that no rank knows all of: messages that reach any rank, a fixed number of collectives, plans that are kept."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from petatron.base.errors import CheckpointError
from petatron.checkpoint.checkpoint_contents import ModelFolder
from petatron.checkpoint.files.digested_file_io import Disk
from petatron.checkpoint.files.step_folder import list_steps
from petatron.checkpoint.manager import CheckpointManager, Retention
from petatron.checkpoint.save.assign_files_to_ranks import FilePlan
from petatron.checkpoint.save.plan_weight_transfers import split_into_rounds
from petatron.checkpoint.save.save_plan import SavePlanner
from petatron.checkpoint.sparse_all_to_all import exchange_messages
from petatron.checkpoint.tensor_chunk import Chunk
from petatron.mesh.comm_record import CommRecord
from petatron.mesh.mesh import Axis, ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.models.hf.folder_entries import EntryRegion, FolderEntry
from petatron.sharding.boxes import Box, BoxIndex, overlap, tiling_problem
from tests.dist import RankPool

SHAPE = (8, 6)
ENTRY = FolderEntry("their.w", SHAPE, (EntryRegion("w", (0, 0), SHAPE, (0, 0)),))


def _world() -> Axis:
    if not dist.is_initialized():
        return ParallelMesh.single().world
    return ParallelMesh(Layout(dp_shard=dist.get_world_size()), dist.get_rank()).world


def _chunks(world: Axis, *, kinds: tuple[str, ...] = ("model", "exp_avg"), cut: int = 0) -> list[Chunk]:
    rows = torch.arange(48.0).reshape(SHAPE)
    size = SHAPE[cut] // world.size
    start = tuple(size * world.rank if dim == cut else 0 for dim in range(2))
    return [Chunk(f"{kind}/w", SHAPE, start, rows.narrow(cut, size * world.rank, size).clone()) for kind in kinds]


def _messages() -> dict[int, Any]:
    """Each rank writes to some others and to itself; nobody writes to the last."""
    world = _world()
    to = {(world.rank + 1) % (world.size - 1), (world.rank * 3) % (world.size - 1), min(world.rank, world.size - 2)}
    return exchange_messages({rank: {"from": world.rank, "text": "é" * rank} for rank in to}, world)


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_every_message_arrives_once(ranks: RankPool, world_size: int):
    arrived = ranks.run(_messages, world_size)
    for rank, found in enumerate(arrived):
        senders = [
            source
            for source in range(world_size)
            if rank in {(source + 1) % (world_size - 1), (source * 3) % (world_size - 1), min(source, world_size - 2)}
        ]
        assert found == {source: {"from": source, "text": "é" * rank} for source in senders}
    assert arrived[-1] == {}


def _counted(folder: str, saves: int, *, background: bool) -> list[Counter[tuple[str, str]]]:
    """The collectives of each of several saves."""
    mesh = ParallelMesh(Layout(dp_shard=dist.get_world_size()), dist.get_rank())
    another = mesh.background_control_axis() if background else None
    manager = CheckpointManager(folder, mesh.control, world_axis=mesh.world, async_axis=another)
    chunks = _chunks(mesh.world)
    counts = []
    for step in range(saves):
        before = mesh.record.count
        manager.save(
            step + 1, chunks, metadata={}, same_layout_key="", model=ModelFolder((ENTRY,), {}), wait=not background
        )
        manager.drain()
        counts.append(Counter((event.axis, event.op) for event in mesh.record.events(since=before)))
    return counts


@pytest.mark.parametrize(("background", "agreements"), [(False, 4), (True, 5)])
def test_a_save_has_a_fixed_number_of_collectives(ranks: RankPool, tmp_path: Path, background: bool, agreements: int):
    """After the first one: is the plan still good, may we begin, (is it copied,) all written, all seen, published."""
    for world_size in (2, 4):
        for first, *later in ranks.run(_counted_in, world_size, str(tmp_path / str(world_size)), background):
            second = "background_control" if background else "control"  # what the thread of a save communicates over
            rounds = world_size.bit_length() - 1
            expected = Counter({("world", "all_to_all"): 1, (second, "all_gather"): 1})
            for op in ("send", "receive"):
                expected += Counter({("control", op): rounds * (agreements - 2)}) + Counter({(second, op): rounds * 2})
            assert later == [expected] * 2
            assert sum(first.values()) > sum(expected.values())
            assert not any("object" in op for _, op in first), "texts travel only when something fails"


def _counted_in(folder: str, background: bool) -> list[Counter[tuple[str, str]]]:
    return _counted(folder, 3, background=background)


def _changing(folder: str) -> list[bool]:
    """Whether each of several saves was planned anew on this rank, as the layout of the last rank changes."""
    world = _world()
    manager = CheckpointManager(folder, world)
    last, plans = world.rank == world.size - 1, []
    model = ModelFolder((ENTRY,), {"config.json": b"{}"})
    for step, change in enumerate(("", "", "kind", "kind", "cut")):
        kinds = ("model", "exp_avg") if change != "kind" else ("model", "exp_avg", "exp_avg_sq")
        chunks = _chunks(world, kinds=kinds)
        if change == "cut" and last:
            part = chunks.pop(0)  # the same rows, as two boxes
            for half, rows in enumerate(part.tensor.split(part.tensor.shape[0] // 2)):
                at = (part.start[0] + half * rows.shape[0], 0)
                chunks.append(Chunk(part.key, SHAPE, at, rows))
        manager.save(step + 1, chunks, metadata={}, same_layout_key="", model=model)
        plans.append(manager._cached_plan)
        found = Chunk("model/w", SHAPE, (0, 0), torch.zeros(SHAPE))
        manager.load(step + 1, [found], strict=False)
        assert torch.equal(found.tensor, torch.arange(48.0).reshape(SHAPE))
    return [a is not b for a, b in zip([None, *plans], plans)]


def test_a_plan_is_kept_while_no_ranks_layout_changes(ranks: RankPool, tmp_path: Path):
    for made in ranks.run(_changing, 2, str(tmp_path)):
        assert made == [True, False, True, False, True]


def _refused(folder: str, fault: str) -> str:
    world = _world()
    chunks = _chunks(world)
    model = ModelFolder((ENTRY,), {}) if fault != "state" else None
    if fault == "dtype" and world.rank == 1:
        chunks[0] = Chunk("model/w", SHAPE, chunks[0].start, chunks[0].tensor.bfloat16())
    if fault in ("folder", "state") and world.rank == 1:
        chunks[0] = Chunk("model/w", SHAPE, (0, 0), chunks[0].tensor)
    if fault == "shape" and world.rank == 1:
        chunks[1] = Chunk("exp_avg/w", (8, 7), chunks[1].start, chunks[1].tensor)
    if fault == "nobody":
        chunks = chunks[1:]
    try:
        CheckpointManager(folder, world).save(1, chunks, metadata={}, same_layout_key="", model=model)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("dtype", "model/w is BF16 on one rank and F32 on another. Nothing was saved."),
        ("shape", "exp_avg/w is F32 [8, 6] on one rank and F32 [8, 7] on another. Nothing was saved."),
        ("folder", "not the whole model: w in the ranks: the box at [0, 0] of shape [4, 6] is there twice"),
        ("state", "the ranks' chunks of model/w are not the whole tensor: the box at [0, 0]"),
        ("nobody", "no rank holds w"),
    ],
)
def test_ranks_that_do_not_fit_are_refused_by_all(ranks: RankPool, tmp_path: Path, fault: str, why: str):
    for text in ranks.run(_refused, 2, str(tmp_path), fault):
        assert why in text
    assert not list(tmp_path.iterdir())


class _Watching(Disk):
    """Notes what this rank has told the others when it removes a step."""

    def __init__(self, record: CommRecord) -> None:
        self.record, self.removed_at, self.last = record, [], 0

    def remove(self, path: Path) -> None:
        if path.suffix == ".pruned":
            self.removed_at.append(self.record.count)
        super().remove(path)


def _pruned(folder: str) -> tuple[list[int], int, list[int]]:
    mesh = ParallelMesh(Layout(dp_shard=dist.get_world_size()), dist.get_rank())
    disk = _Watching(mesh.record)
    manager = CheckpointManager(folder, mesh.control, disk=disk, retention=Retention(keep=1))
    for step in (1, 2):
        manager.save(step, _chunks(mesh.world), metadata={}, same_layout_key="")
    return disk.removed_at, mesh.record.count, list(list_steps(Path(folder)))


def test_pruning_is_over_before_the_last_exchange(ranks: RankPool, tmp_path: Path):
    """Or the other ranks would train on, and wait for the first in a collective with a time limit."""
    (removed_at, count, left), second = ranks.run(_pruned, 2, str(tmp_path))
    assert removed_at and max(removed_at) < count and left == [2]
    assert second[0] == []


def _failing(folder: str, unlucky: int) -> tuple[str, Counter[str]]:
    world = _world()

    class Full(Disk):
        def write(self, path: Path, parts: Any) -> Any:
            raise OSError(28, "No space left on device")

    manager = CheckpointManager(folder, world, disk=Full() if world.rank == unlucky else None)
    before = world.record.count
    try:
        manager.save(1, _chunks(world), metadata={}, same_layout_key="")
    except CheckpointError as error:
        return str(error), Counter(event.op for event in world.record.events(since=before))
    return "", Counter()


def test_texts_are_gathered_when_a_rank_fails(ranks: RankPool, tmp_path: Path):
    for text, ops in ranks.run(_failing, 4, str(tmp_path), 2):
        assert text.startswith("[rank 2] step 1 could not be saved") and "No space left" in text
        assert ops["gather_objects"] == 1


@given(st.integers(1, 400), st.sampled_from([(7, 5), (3, 4, 5), (11,), ()]))
def test_rounds_hold_every_element_once(round_bytes: int, shape: tuple[int, ...]):
    regions = (EntryRegion("w", (0,) * len(shape), shape, (0,) * len(shape)),)
    plans = [FilePlan("f", tuple(FolderEntry(f"e{n}", shape, regions) for n in range(2)), 0)]
    found = list(split_into_rounds(plans, {"w": torch.float32}, round_bytes))
    for entry in plans[0].entries:
        assert tiling_problem(shape, [box for _, of_entry, _, box in found if of_entry is entry]) is None
    sizes = Counter[int]()
    for round_index, _, _, box in found:
        sizes[round_index] += 4 * box.volume
    assert max(sizes.values()) <= max(round_bytes, 4)
    assert sorted(sizes) == list(range(len(sizes))), "no round is left out"


def _boxes() -> st.SearchStrategy[Box]:
    pair = st.tuples(st.integers(0, 9), st.integers(0, 9))
    return st.builds(Box, pair, pair)


@given(st.lists(_boxes(), max_size=12), _boxes())
def test_an_index_finds_what_asking_each_box_finds(boxes: list[Box], box: Box):
    expected = [(number, common) for number, other in enumerate(boxes) if (common := overlap(other, box)) is not None]
    assert BoxIndex(boxes).overlaps(box) == expected


def test_a_survey_needs_no_process_group():
    """The plans of sixteen ranks, made one after the other in one process, move every element to its writer once."""
    size, shape = 16, (64, 32)
    entries = tuple(FolderEntry(f"e{n}", shape, (EntryRegion(f"w{n}", (0, 0), shape, (0, 0)),)) for n in range(4))
    surveys = []
    for rank in range(size):
        view = torch.empty(4, 32, device="meta")
        chunks = [Chunk(f"model/w{n}", shape, (4 * rank, 0), view) for n in range(4)]
        surveys.append(SavePlanner(chunks, ModelFolder(entries, {}), rank=rank, world_size=size))
    largest = [max(numbers) for numbers in zip(*(survey.encoded_dtypes() for survey in surveys))]
    mail: dict[int, dict[int, Any]] = {rank: {} for rank in range(size)}
    for rank, survey in enumerate(surveys):
        survey.set_agreed_dtypes(largest)
        for to, message in survey.messages().items():
            mail[to][rank] = message
    plans = [survey.plan(mail[rank]).transfers for rank, survey in enumerate(surveys)]
    sent = [transfer for plan in plans for moves in plan.rounds for transfer in moves.sends]
    received = [transfer for plan in plans for moves in plan.rounds for transfer in moves.receives]
    own = [transfer for plan in plans for transfer in plan.local_copies]
    assert len(sent) == len(received) == 4 * (size - 1)
    assert sum(transfer.box.volume for transfer in (*received, *own)) == 4 * 64 * 32
