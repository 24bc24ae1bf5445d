"""State defined outside of the package is saved and restored with the rest, in every layout; what is missing or extra is said."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import petatron
from petatron.base.errors import CheckpointError
from petatron.cli.main import main
from petatron.config import RunConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.optim.mixed_precision import MixedPrecisionOptimizer
from petatron.train.build_run import build_loader
from petatron.train.state.optional_components import _KINDS
from petatron.train.state.train_state import TrainState
from petatron.train.train_step import train_step
from petatron.verify.record_trace import TracedShard, assemble_tensors
from tests.dist import RankPool
from tests.parity.harness import tiny_run

FLAGS = "--train-iters 4 --lr-decay-iters 4"


class Travel(petatron.Stateful):
    """How far every weight has traveled: a tensor sharded like the optimizer's state, a count, and the rank's own tensor."""

    name, title = "travel", "traveled distances"

    def __init__(self, optimizer: MixedPrecisionOptimizer) -> None:
        self.optimizer, self.steps, self.seen = optimizer, 0, torch.zeros(2, dtype=torch.int64)
        self.before = [view.clone() for _, _, view in optimizer.master_weights()]
        self.distances = [torch.zeros_like(view) for view in self.before]

    def after_update(self, *, updates: int, skipped: torch.Tensor | None) -> None:
        self.steps += 1
        self.seen += 1
        for (_, _, now), before, distance in zip(self.optimizer.master_weights(), self.before, self.distances):
            distance += (now - before).abs()
            before.copy_(now)

    def chunks(self):
        for (group, shard, _), distance in zip(self.optimizer.master_weights(), self.distances, strict=True):
            yield petatron.Chunk.of_shard(self.name, group, shard, distance)

    def local(self):
        return {"seen": self.seen}

    def values(self):
        return {"steps": self.steps}

    def restore(self, saved: petatron.SavedState) -> str | None:
        self.steps = saved.values["steps"]
        for (_, _, now), before in zip(self.optimizer.master_weights(), self.before):
            before.copy_(now)
        if saved.local is None:
            return "what a rank has seen starts anew"
        self.seen.copy_(saved.local["seen"])
        return None


class RequiredTravel(Travel):
    required = True


def train_with(run: RunConfig, kind: type[Travel] | None = Travel, steps: int = 2) -> tuple[TrainState, Travel | None]:
    """On one rank: from the checkpoint in --load on; saves at the end."""
    torch.set_num_threads(1)
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank() if dist.is_initialized() else 0)
    state = TrainState.build_for_load(run, mesh)
    travel = None if kind is None else kind(state.optimizer)
    if travel is not None:
        state.add(travel)
    if run.checkpoint.load is not None:
        state.load(run.checkpoint.load)
    for _, batches in zip(range(steps), build_loader(run, mesh, state=state)):
        train_step(state, batches)
    if state.checkpoint_manager is not None:
        state.save(wait=not run.checkpoint.async_save)
        state.checkpoint_manager.drain()
    return state, travel


@dataclass
class Outcome:
    counts: tuple[int, list[int]]
    shards: list[TracedShard]
    changes: list[str]


def outcome(run: RunConfig, steps: int = 2) -> Outcome:
    state, travel = train_with(run, steps=steps)
    assert travel is not None
    shards = [
        TracedShard("travel", chunk.key, chunk.logical_shape, chunk.start, chunk.tensor.clone())
        for chunk in travel.chunks()
    ]
    return Outcome((travel.steps, travel.seen.tolist()), shards, state.resume_changes)


def run_of(flags: str, world_size: int = 1) -> RunConfig:
    return tiny_run(f"{FLAGS} {flags}", world_size=world_size, dtype="float64")


@pytest.fixture(scope="module")
def whole() -> Outcome:
    """Four steps in one process, without a stop."""
    return outcome(run_of(""), steps=4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("state") / "run"
    train_with(run_of(f"--save {folder}"))
    return folder


def test_state_of_ones_own_moves_from_layout_to_layout(ranks: RankPool, tmp_path: Path, whole: Outcome):
    ranks.run(outcome, 2, run_of(f"--dp 2 --use-distributed-optimizer --async-save --save {tmp_path}", 2))
    found = ranks.run(outcome, 2, run_of(f"--tp 2 --load {tmp_path}", 2))
    assert [one.counts for one in found] == [(4, [2, 2])] * 2, "a rank's own tensor belongs to a layout"
    tensors = assemble_tensors([shard for one in found for shard in one.shards])
    for key, distance in assemble_tensors(whole.shards).items():
        torch.testing.assert_close(tensors[key], distance, rtol=1e-9, atol=1e-12)
    assert all("what a rank has seen starts anew" in one.changes for one in found)


def test_the_same_layout_continues_bitwise(saved: Path, whole: Outcome):
    resumed = outcome(run_of(f"--load {saved}"))
    assert resumed.counts == whole.counts == (4, [4, 4]) and resumed.changes == []
    expected = assemble_tensors(whole.shards)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in assemble_tensors(resumed.shards).items())


def test_inspect_and_diff_show_it(saved: Path, capsys):
    assert main(["checkpoint", "inspect", str(saved)]) == 0
    assert "travel/" in capsys.readouterr().out
    assert main(["checkpoint", "diff", str(saved), str(saved)]) == 0


def test_what_is_missing_or_extra_is_said(saved: Path, tmp_path: Path):
    state, _ = train_with(run_of(f"--load {saved} --save {tmp_path}"), None, steps=0)
    assert state.resume_changes == [
        "traveled distances of the checkpoint are not used by this run, and its checkpoints will not have them"
    ]
    found = outcome(run_of(f"--load {tmp_path}"), steps=0)
    assert found.counts == (0, [0, 0])
    assert found.changes == ["traveled distances start anew: the checkpoint has none"]


def test_what_a_run_cannot_do_without_is_refused(saved: Path, tmp_path: Path):
    train_with(run_of(f"--save {tmp_path}"), RequiredTravel, steps=1)
    with pytest.raises(CheckpointError, match="has traveled distances, without which its run cannot continue"):
        train_with(run_of(f"--load {tmp_path}"), None)
    train_with(run_of(f"--load {tmp_path} --finetune"), None, steps=1)
    train_with(run_of(f"--save {tmp_path}/plain"), None, steps=1)
    with pytest.raises(CheckpointError, match="has no traveled distances, which this run needs to continue"):
        train_with(run_of(f"--load {tmp_path}/plain"), RequiredTravel)


def test_a_loop_of_ones_own_restores_it(saved: Path, tmp_path: Path, whole: Outcome):
    run = run_of(f"--load {saved}")
    model = petatron.build_model(run, ParallelMesh.single())
    optimizer = petatron.build_optimizer(run, model)
    travel = Travel(optimizer)
    state = petatron.restore(run, model, optimizer, components=[travel])
    assert travel.steps == 2
    with pytest.raises(CheckpointError, match="came after the checkpoint was loaded"):
        state.add(Travel(optimizer))
    for batches in petatron.build_loader(run, model.mesh, state=state):
        model.train_step(batches)
        state.advance(batches, optimizer.step(**state.update_settings()))
    petatron.save_checkpoint(tmp_path, step=4, model=model, optimizer=optimizer, state=state)
    again = Travel(optimizer)
    petatron.load_checkpoint(str(tmp_path), model=model, optimizer=optimizer, components=[again])
    assert again.steps == 4
    expected = assemble_tensors(whole.shards)
    for chunk in again.chunks():
        assert torch.equal(chunk.tensor, expected["travel", chunk.key])


def test_a_registered_component_is_part_of_every_run(saved: Path):
    kinds = list(_KINDS)
    petatron.register_component(lambda run, model, optimizer: Travel(optimizer))
    try:
        state, _ = train_with(run_of(f"--load {saved}"), None, steps=0)
        [travel] = state.added_components
        assert isinstance(travel, Travel) and travel.steps == 2 and state.resume_changes == []
        with pytest.raises(CheckpointError, match="Two components of the run's state save under 'travel'"):
            TrainState.build(run_of(""), ParallelMesh.single()).add(Travel(state.optimizer))
    finally:
        _KINDS[:] = kinds
