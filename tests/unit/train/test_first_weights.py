"""First weights are drawn where training begins with them, and nowhere else: for a large model drawing takes minutes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import petatron
from petatron.base.errors import CheckpointError
from petatron.config import RunConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.pretrained.load_checkpoint import has_weights
from petatron.sharding import initial_values
from petatron.train.state.train_state import TrainState
from tests.checkpoint_chunks import checkpoint_chunks
from tests.dist import RankPool
from tests.longform import diagonal
from tests.parity.harness import tiny_run


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is drawn."""
    names: list[str] = []
    draw = initial_values.draw_normal_shard

    def noted(piece, **arguments):
        names.append(piece.name)
        return draw(piece, **arguments)

    monkeypatch.setattr(initial_values, "draw_normal_shard", noted)
    return names


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint whose weights are not those that a run draws."""
    state = TrainState.build(tiny_run(f"--save {tmp_path}/saved"), ParallelMesh.single())
    for chunk in checkpoint_chunks(state.model, state.optimizer):
        chunk.tensor.add_(0.5)
    state.record_data_fingerprint("none")
    state.save()
    return tmp_path / "saved"


def started(run: RunConfig) -> TrainState:
    return TrainState.build_for_load(run, ParallelMesh.single())


def tensors(state: TrainState) -> dict[tuple, Tensor]:
    return {(chunk.key, chunk.start): chunk.tensor for chunk in checkpoint_chunks(state.model, state.optimizer)}


def assert_equal(one: TrainState, two: TrainState) -> None:
    left, right = tensors(one), tensors(two)
    assert left.keys() == right.keys()
    for key, tensor in left.items():
        assert torch.equal(tensor, right[key]), key


@diagonal(2)
@pytest.mark.parametrize("flags", ["", "--bf16", "--bf16 --num-experts 4"])
def test_a_resumed_run_draws_nothing_and_has_every_bit(saved: Path, tmp_path: Path, drawn: list[str], flags: str):
    if flags:  # a checkpoint of this model
        state = TrainState.build(tiny_run(f"{flags} --save {tmp_path}/own"), ParallelMesh.single())
        state.record_data_fingerprint("none")
        state.save()
        saved = tmp_path / "own"
    run = tiny_run(f"{flags} --load {saved}")
    as_before = TrainState.build(run, ParallelMesh.single())
    assert as_before.load(str(saved)) and drawn
    drawn.clear()
    state = started(run)
    assert state.load(str(saved)) and not drawn
    assert_equal(state, as_before)
    assert all(bool(norm.any()) for key, norm in tensors(state).items() if key[0].startswith("model/norm"))


@pytest.mark.parametrize("which", ["checkpoint", "model"])
def test_pretrained_weights_replace_the_first_ones(saved: Path, tmp_path: Path, drawn: list[str], which: str):
    source = next(saved.glob("step-*/model")) if which == "model" else saved
    drawn.clear()
    state = started(tiny_run(f"--load {tmp_path}/nothing-yet --pretrained-checkpoint {source}"))
    assert not state.load(f"{tmp_path}/nothing-yet")
    state.load_pretrained_weights(str(source))
    assert not drawn
    there = tensors(TrainState.build(tiny_run(), ParallelMesh.single()))
    for key, tensor in tensors(state).items():
        if key[0].startswith("model/"):
            assert torch.equal(tensor, there[key] + 0.5), key


def test_an_empty_folder_is_a_start_from_scratch(tmp_path: Path, drawn: list[str]):
    state = started(tiny_run(f"--load {tmp_path}"))
    assert drawn
    assert not state.load(str(tmp_path))
    assert_equal(state, TrainState.build(tiny_run(), ParallelMesh.single()))


def test_a_load_that_would_leave_a_tensor_without_weights_is_refused(saved: Path, drawn: list[str]):
    """Nothing goes into training with the zeros that a model begins with when nothing is drawn."""
    drawn.clear()
    state = started(tiny_run(f"--load {saved} --finetune --num-layers 3"))
    with pytest.raises(CheckpointError, match=r"layers\.2"):
        state.load(str(saved))
    assert not drawn


def test_a_checkpoint_that_disappears_meanwhile_is_an_error(saved: Path):
    state = started(tiny_run(f"--load {saved}"))
    shutil.rmtree(saved)
    with pytest.raises(CheckpointError, match=r"disappeared while the run started\. Start it again"):
        state.load(str(saved))


def test_from_pretrained_draws_nothing(saved: Path, drawn: list[str]):
    drawn.clear()
    model = petatron.from_pretrained(next(saved.glob("step-*/model")))
    assert not drawn and bool(model.module.norm.weight.eq(1.5).all())


def _seen(run: RunConfig, folder: str) -> bool:
    """Only the first rank is told where the checkpoint is."""
    rank = dist.get_rank()
    mesh = ParallelMesh(Layout.from_config(run.parallel), rank)
    return has_weights(folder if rank == 0 else f"{folder}/elsewhere", mesh)


def test_all_ranks_go_by_what_the_first_sees(ranks: RankPool, saved: Path, tmp_path: Path):
    run = tiny_run("--dp 2", world_size=2)
    assert ranks.run(_seen, 2, run, str(saved)) == [True, True]
    assert ranks.run(_seen, 2, run, str(tmp_path / "none")) == [False, False]
