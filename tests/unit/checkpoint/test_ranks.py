"""Several ranks: split boxes, other layouts, and failures that everybody hears of."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from petatron.base.errors import CheckpointError
from petatron.checkpoint.files.digested_file_io import Disk
from petatron.checkpoint.manager import CheckpointManager
from petatron.checkpoint.tensor_chunk import Chunk
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from tests.dist import RankPool

SHAPE = (6, 4)


def _world():
    if not dist.is_initialized():
        return ParallelMesh.single().world
    return ParallelMesh(Layout(tp=dist.get_world_size()), dist.get_rank()).world


def _content(kind: str) -> torch.Tensor:
    return torch.arange(24.0).reshape(SHAPE) + {"model": 0.0, "exp_avg": 100.0, "norm": 200.0}[kind]


def _chunks(world, *, dim: int, filled: bool) -> list[Chunk]:
    """Weights cut along a dimension, moments cut along the other, and a replicated tensor."""
    chunks = []
    for kind, cut in (("model", dim), ("exp_avg", 1 - dim)):
        size = SHAPE[cut] // world.size
        start = tuple(size * world.rank if d == cut else 0 for d in range(2))
        part = _content(kind).narrow(cut, size * world.rank, size)
        chunks.append(Chunk(f"{kind}/w", SHAPE, start, part.clone() if filled else torch.zeros_like(part)))
    norm = _content("norm") if filled else torch.zeros(SHAPE)
    chunks.append(Chunk("model/norm", SHAPE, (0, 0), norm, world.rank == 0))
    return chunks


def _save(folder: str, dim: int, step: int = 10, disk: Disk | None = None) -> list[str]:
    world = _world()
    local = {"cpu": torch.full((4,), world.rank, dtype=torch.uint8)}
    manager = CheckpointManager(folder, world, disk=disk)
    manager.save(
        step,
        _chunks(world, dim=dim, filled=True),
        metadata={"saved by": world.size},
        same_layout_key=f"tp{world.size}",
        local=local,
    )
    step_folder = Path(folder, f"step-{step:08d}")
    return sorted(str(path.relative_to(step_folder)) for path in step_folder.rglob("*") if path.is_file())


def _load(folder: str, dim: int) -> tuple[int, int | None, bool]:
    """(ranks that saved, this rank's local byte, whether every tensor is right)."""
    world = _world()
    chunks = _chunks(world, dim=dim, filled=False)
    loaded = CheckpointManager(folder, world).load(None, chunks, same_layout_key=f"tp{world.size}")
    expected = _chunks(world, dim=dim, filled=True)
    right = all(torch.equal(have.tensor, want.tensor) for have, want in zip(chunks, expected))
    return loaded.metadata["saved by"], int(loaded.local["cpu"][0]) if loaded.local else None, right


class FullDisk(Disk):
    def write(self, path, parts):
        raise OSError(28, "No space left on device")


def _save_with_one_full_disk(folder: str, unlucky: int) -> tuple[str, int | None]:
    world = _world()
    _save(folder, 0, step=10)
    error = ""
    try:
        _save(folder, 0, step=20, disk=FullDisk() if world.rank == unlucky else None)
    except CheckpointError as caught:
        error = str(caught)
    return error, CheckpointManager(folder, world).latest()


def _load_what_one_rank_cannot_use(folder: str) -> str:
    world = _world()
    _save(folder, 0)
    shape = (6, 4) if world.rank == 0 else (6, 5)
    chunks = [Chunk("exp_avg/w", shape, (0, 0), torch.zeros(shape))]
    try:
        CheckpointManager(folder, world).load(10, chunks)
    except CheckpointError as caught:
        return str(caught)
    return ""


def _load_what_is_not_there(folder: str) -> str:
    try:
        CheckpointManager(folder, _world()).load(None, [])
    except CheckpointError as caught:
        return str(caught)
    return ""


def _load_a_damaged_file(folder: str, damaged: int) -> str:
    world = _world()
    _save(folder, 0)
    if world.rank == 0:
        path = Path(folder, "step-00000010", f"state/rank-{damaged:05d}.safetensors")
        content = bytearray(path.read_bytes())
        content[-3] ^= 4
        path.write_bytes(content)
    manager = CheckpointManager(folder, world)
    manager.latest()  # collective: the other rank waits for the damage
    try:
        manager.load(10, _chunks(world, dim=0, filled=False))
    except CheckpointError as caught:
        return str(caught)
    return ""


def test_two_ranks_to_one_and_back(ranks: RankPool, tmp_path):
    folder = str(tmp_path)
    files = ["manifest.json", "state/rank-00000.safetensors", "state/rank-00000.table.json"]
    both = [*files, "state/rank-00001.safetensors", "state/rank-00001.table.json"]
    assert ranks.run(_save, 2, folder, 0) == [both, both]
    assert ranks.run(_load, 2, folder, 0) == [(2, 0, True), (2, 1, True)]
    assert ranks.run(_load, 2, folder, 1) == [(2, 0, True), (2, 1, True)]
    assert _load(folder, 0) == (2, None, True)
    assert _save(folder, 0) == files
    assert _load(folder, 1) == (1, 0, True)
    assert ranks.run(_load, 2, folder, 1) == [(1, None, True), (1, None, True)]


@pytest.mark.parametrize("unlucky", [0, 1])
def test_one_full_disk_is_an_error_on_every_rank(ranks: RankPool, tmp_path, unlucky):
    for error, latest in ranks.run(_save_with_one_full_disk, 2, str(tmp_path), unlucky):
        assert error.startswith(f"[rank {unlucky}] step 20 could not be saved") and "No space left" in error
        assert latest == 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000010"]


def test_a_misfit_on_one_rank_is_an_error_on_every_rank(ranks: RankPool, tmp_path):
    first, second = ranks.run(_load_what_one_rank_cannot_use, 2, str(tmp_path))
    assert first == second and first.startswith("[rank 1]") and "has shape [6, 4] there and [6, 5]" in first


def test_nothing_to_load_is_the_same_error_on_every_rank(ranks: RankPool, tmp_path):
    first, second = ranks.run(_load_what_is_not_there, 2, str(tmp_path))
    assert first == second and "holds no checkpoint" in first


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_damaged_file_is_an_error_on_every_rank(ranks: RankPool, tmp_path, damaged):
    first, second = ranks.run(_load_a_damaged_file, 2, str(tmp_path), damaged)
    assert first == second and f"rank-{damaged:05d}.safetensors does not have the content" in first
