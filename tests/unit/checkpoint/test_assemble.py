"""Boxes on many ranks become the whole tensors of a model folder, and any rank reads its boxes back from there."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from petatron.base.errors import CheckpointError
from petatron.checkpoint import manager
from petatron.checkpoint.checkpoint_contents import ModelFolder
from petatron.checkpoint.manager import CheckpointManager
from petatron.checkpoint.save import assign_files_to_ranks, gather_weights, plan_weight_transfers
from petatron.checkpoint.tensor_chunk import Chunk
from petatron.mesh.comm_record import CommRecord
from petatron.mesh.mesh import Axis, ParallelMesh
from petatron.models.hf.folder_entries import EntryRegion, FolderEntry
from tests.dist import RankPool
from tests.longform import diagonal

# Cut by rows, cut by columns, experts cut by both, one whole on the last rank, and an odd number of bytes.
TENSORS = {"rows": (8, 6), "columns": (6, 8), "experts": (4, 4, 6), "bias": (7,), "q": (4, 6), "k": (4, 6)}
ENTRIES = (
    FolderEntry("their.rows", (8, 6), (EntryRegion("rows", (0, 0), (8, 6), (0, 0)),)),
    FolderEntry("their.columns", (8, 6), (EntryRegion("columns", (0, 0), (6, 8), (0, 0), transposed=True),)),
    *(
        FolderEntry(f"their.expert.{n}", (4, 6), (EntryRegion("experts", (n, 0, 0), (1, 4, 6), (0, 0)),))
        for n in range(4)
    ),
    FolderEntry("their.bias", (7,), (EntryRegion("bias", (0,), (7,), (0,)),)),
    FolderEntry(
        "their.qk",
        (6, 8),
        (
            EntryRegion("q", (0, 0), (4, 6), (0, 0), transposed=True),
            EntryRegion("k", (0, 0), (4, 6), (0, 4), transposed=True),
        ),
    ),
)


def _logical(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(TENSORS[name], generator=generator).to(torch.bfloat16 if name == "bias" else torch.float32)


def _world() -> Axis:
    if not dist.is_initialized():
        return ParallelMesh.single().world
    size, rank = dist.get_world_size(), dist.get_rank()
    return Axis("world", size, rank, tuple(range(size)), lambda *_: dist.group.WORLD, CommRecord())


def _chunks(world: Axis, *, filled: bool) -> list[Chunk]:
    """This rank's boxes. The second of four ranks has none at all, as may happen with many copies."""
    holders = [rank for rank in range(world.size) if world.size < 4 or rank != 1]
    if world.rank not in holders:
        return []
    part, parts = holders.index(world.rank), len(holders)
    chunks = []
    for name, dim in (("rows", 0), ("columns", 1), ("experts", 0), ("q", 0), ("k", 1)):
        whole = _logical(name)
        low, high = whole.shape[dim] * part // parts, whole.shape[dim] * (part + 1) // parts
        start = tuple(low if d == dim else 0 for d in range(whole.dim()))
        box = whole.narrow(dim, low, high - low).clone()
        chunks.append(Chunk(f"model/{name}", whole.shape, start, box if filled else torch.zeros_like(box)))
    bias = _logical("bias") if filled else torch.zeros(7, dtype=torch.bfloat16)
    return [*chunks, Chunk("model/bias", (7,), (0,), bias, primary=part == parts - 1)]


def _save(folder: str, round_bytes: int, file_bytes: int) -> None:
    world = _world()
    with (
        mock.patch.object(plan_weight_transfers, "ROUND_BYTES", round_bytes),
        mock.patch.object(manager, "_MIN_ROUND_BYTES", 1),
        mock.patch.object(assign_files_to_ranks, "_MAX_FILE_BYTES", file_bytes),
    ):
        CheckpointManager(folder, world).save(
            1,
            _chunks(world, filled=True),
            metadata={},
            same_layout_key="",
            model=ModelFolder(ENTRIES, {"config.json": b"{}"}),
        )


def _load(folder: str) -> bool:
    world = _world()
    found, wanted = _chunks(world, filled=False), _chunks(world, filled=True)
    CheckpointManager(folder, world).load(1, found)
    return all(torch.equal(a.tensor, b.tensor) for a, b in zip(found, wanted, strict=True))


@diagonal(3)
@pytest.mark.parametrize(("round_bytes", "file_bytes"), [(1 << 20, 1 << 20), (100, 1 << 20), (16, 200)])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_entry_is_whole(ranks: RankPool, tmp_path: Path, world_size: int, round_bytes: int, file_bytes: int):
    run = (lambda fn, n, *args: [fn(*args)]) if world_size == 1 else ranks.run
    run(_save, world_size, str(tmp_path), round_bytes, file_bytes)
    folder = tmp_path / "step-00000001" / "model"
    found = sorted(folder.glob("*.safetensors"))
    assert len(found) == (1 if file_bytes > 1000 else 5)
    assert (folder / "model.safetensors.index.json").exists() == (len(found) > 1)
    stored = {name: tensor for file in found for name, tensor in load_file(file).items()}
    assert stored.keys() == {entry.name for entry in ENTRIES}
    assert torch.equal(stored["their.rows"], _logical("rows"))
    assert torch.equal(stored["their.columns"], _logical("columns").t())
    assert all(torch.equal(stored[f"their.expert.{n}"], _logical("experts")[n]) for n in range(4))
    assert torch.equal(stored["their.bias"], _logical("bias"))
    assert torch.equal(stored["their.qk"], torch.cat((_logical("q"), _logical("k"))).t())
    assert all(run(_load, world_size, str(tmp_path)))
    other = 1 if world_size > 1 else 2
    assert all([_load(str(tmp_path))] if other == 1 else ranks.run(_load, other, str(tmp_path)))


@pytest.mark.parametrize(
    ("drop", "why"), [("rows", "no rank holds rows"), ("their.rows", "not the whole model"), ("twice", "there twice")]
)
def test_a_folder_that_would_not_hold_the_model_is_refused(tmp_path: Path, drop: str, why: str):
    chunks = [chunk for chunk in _chunks(_world(), filled=True) if chunk.key != f"model/{drop}"]
    entries = tuple(entry for entry in ENTRIES if entry.name != drop)
    if drop == "their.rows":
        half = FolderEntry("their.rows", (4, 6), (EntryRegion("rows", (0, 0), (4, 6), (0, 0)),))
        entries = (*entries, half)
    if drop == "twice":
        entries = (*entries, FolderEntry("again", (8, 6), ENTRIES[0].regions))
    with pytest.raises(CheckpointError, match=why):
        CheckpointManager(tmp_path, _world()).save(
            1, chunks, metadata={}, same_layout_key="", model=ModelFolder(entries, {})
        )
    assert not list(tmp_path.iterdir())


def _bounded(folder: str, round_bytes: int) -> tuple[int, int, int]:
    """Save one large tensor; the most bytes that were sent and received at once, and the number of exchanges."""
    world = _world()
    rows = torch.arange(4000.0).reshape(40, 100).chunk(world.size)[world.rank].clone()
    start = (40 // world.size * world.rank, 0)
    entry = FolderEntry("their.big", (100, 40), (EntryRegion("big", (0, 0), (40, 100), (0, 0), transposed=True),))
    made: list[gather_weights.WeightGather] = []
    build = gather_weights.WeightGather.__init__

    def watched(self: gather_weights.WeightGather, *args: object) -> None:
        build(self, *args)  # pyright: ignore[reportArgumentType]
        made.append(self)

    with (
        mock.patch.object(plan_weight_transfers, "ROUND_BYTES", round_bytes),
        mock.patch.object(manager, "_MIN_ROUND_BYTES", 8),
        mock.patch.object(gather_weights.WeightGather, "__init__", watched),
    ):
        CheckpointManager(folder, world).save(
            1,
            [Chunk("model/big", (40, 100), start, rows)],
            metadata={},
            same_layout_key="",
            model=ModelFolder((entry,), {}),
        )
    moved = sum(event.op == "all_to_all" for event in world.record.events())
    return made[0]._send_buffer.numel(), made[0]._recv_buffer.numel(), moved


@diagonal(2)
@pytest.mark.parametrize("round_bytes", [1000, 400, 136])
def test_an_entry_larger_than_a_round_is_cut(ranks: RankPool, tmp_path: Path, round_bytes: int):
    """16 kB in rounds of a few rows, of one row, and of a part of a row."""
    for outgoing, incoming, moved in ranks.run(_bounded, 4, str(tmp_path), round_bytes):
        assert outgoing <= round_bytes and incoming <= round_bytes
        assert moved >= 16000 // round_bytes
    stored = load_file(tmp_path / "step-00000001" / "model" / "model.safetensors")
    assert torch.equal(stored["their.big"], torch.arange(4000.0).reshape(40, 100).t())


def _one_sender(folder: str) -> int:
    """The first rank holds everything, and every rank writes a part."""
    world = _world()
    names = [f"w{number}" for number in range(16)]
    entries = tuple(FolderEntry(name, (10, 10), (EntryRegion(name, (0, 0), (10, 10), (0, 0)),)) for name in names)
    chunks = [
        Chunk(f"model/{name}", (10, 10), (0, 0), torch.full((10, 10), float(number)))
        for number, name in enumerate(names if world.rank == 0 else [])
    ]
    with (
        mock.patch.object(plan_weight_transfers, "ROUND_BYTES", 800),
        mock.patch.object(manager, "_MIN_ROUND_BYTES", 8),
        mock.patch.object(assign_files_to_ranks, "_MAX_FILE_BYTES", 1600),
    ):
        saver = CheckpointManager(folder, world)
        saver.save(1, chunks, metadata={}, same_layout_key="", model=ModelFolder(entries, {}))
    assert saver._cached_plan is not None
    return saver._cached_plan[1].transfers.max_send_bytes


def test_what_one_rank_sends_to_many_is_bounded_too(ranks: RankPool, tmp_path: Path):
    assert max(ranks.run(_one_sender, 4, str(tmp_path))) <= 800
    stored = {}
    for file in (tmp_path / "step-00000001" / "model").glob("*.safetensors"):
        stored |= load_file(file)
    assert {name: int(value.mean()) for name, value in stored.items()} == {f"w{n}": n for n in range(16)}
