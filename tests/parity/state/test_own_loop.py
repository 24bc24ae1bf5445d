"""A loop of one's own that restores a checkpoint goes on to the bit as `petatron train` does, in every layout, and the other way round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import petatron
from petatron.config import RunConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.verify.record_trace import TracedShard
from tests.dist import RankPool
from tests.longform import diagonal
from tests.parity.harness import tiny_run
from tests.parity.state.resharding import END, STOP, live, parts_of, whole

STEPS = f"--train-iters {END} --log-interval 1 --hidden-dropout 0.1 --bf16"


def own_loop(run: RunConfig, stop: int = END, save: str | None = None) -> list[TracedShard]:
    """On one rank: what a user writes, from the checkpoint if one is named."""
    torch.set_num_threads(1)
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank() if dist.is_initialized() else 0)
    model = petatron.build_model(run, mesh)
    optimizer = petatron.build_optimizer(run, model)
    state = petatron.restore(run, model, optimizer)
    for batches in petatron.build_loader(run, mesh, state=state):
        settings = state.update_settings()
        model.train_step(batches, loss_scale=settings["loss_scale"])
        state.advance(batches, optimizer.step(**settings))
        if state.progress.iteration == stop:
            break
    if save is not None:
        petatron.save_checkpoint(save, step=stop, model=model, optimizer=optimizer, state=state)
    return parts_of(state)


def assert_same(first: list[list[TracedShard]], second: list[list[TracedShard]]) -> None:
    ours, theirs = whole(first), whole(second)
    assert ours.keys() == theirs.keys()
    for key, values in theirs.items():
        assert torch.equal(ours[key], values), key


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run in one process, at its step STOP."""
    folder = tmp_path_factory.mktemp("saved")
    live(tiny_run(f"{STEPS} --save {folder} --save-interval {STOP}"))
    return folder


@diagonal(2)
@pytest.mark.parametrize(
    ("layout", "world_size"), [("", 1), ("--tp 2", 2), ("--pp 2", 2), ("--dp 2 --use-distributed-optimizer", 2)]
)
def test_restore_goes_on_as_petatron_train_does(ranks: RankPool, saved: Path, layout: str, world_size: int):
    run = tiny_run(f"{STEPS} {layout} --load {saved} --ckpt-step {STOP}", world_size=world_size)
    expected = ranks.run(live, world_size, run)
    assert_same(ranks.run(own_loop, world_size, run), [life.ended for life in expected])


def test_petatron_train_resumes_from_a_loop_of_ones_own(ranks: RankPool, tmp_path: Path):
    """The state goes there and back on two ranks, and nothing tells the result from a run that was not stopped."""
    flags = f"{STEPS} --tp 2"
    whole_run = ranks.run(live, 2, tiny_run(flags, world_size=2))
    ranks.run(own_loop, 2, tiny_run(flags, world_size=2), STOP, str(tmp_path))
    resumed = ranks.run(live, 2, tiny_run(f"{flags} --load {tmp_path}", world_size=2))
    assert_same([life.ended for life in resumed], [life.ended for life in whole_run])


@pytest.mark.parametrize("start", ["--pretrained-checkpoint", "--finetune --load"])
def test_first_weights_have_the_precision_of_the_folder(saved: Path, start: str):
    """A bf16 model that starts from wider weights has master weights that were not rounded."""
    run = tiny_run(f"{STEPS} {start} {saved}")
    assert_same([own_loop(run)], [live(run).ended] if "--load" in start else [_live_pretrained(run)])


def _live_pretrained(run: RunConfig) -> list[TracedShard]:
    from petatron.train.state.train_state import TrainState
    from petatron.train.train_step import train_step

    mesh = ParallelMesh.single()
    state = TrainState.build_for_load(run, mesh)
    assert run.checkpoint.pretrained_checkpoint is not None
    state.load_pretrained_weights(run.checkpoint.pretrained_checkpoint)
    for batches in petatron.build_loader(run, mesh):
        train_step(state, batches)
    return parts_of(state)
