"""The executor does what the list says, trains the same model in every cut, and can say when it did what."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from petatron.config import RunConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.schedule.actions import COMPUTE_KINDS, Action
from petatron.schedule.measured_timeline import read_measured
from petatron.train.build_run import build_loader, build_model
from petatron.train.state.train_state import TrainState
from petatron.train.train_step import train_step
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.parity.harness import check_layout, tiny_run

MODEL = "--num-layers 4 --train-iters 2 --lr-warmup-iters 1"
SCHEDULES = {
    "gpipe": "--pipeline-schedule gpipe",
    "1f1b": "",
    "interleaved": "--num-layers-per-virtual-pipeline-stage 1",
    "zb-h1": "--pipeline-schedule zb-h1",
    "zb-v": "--pipeline-schedule zb-v",
}


@diagonal(2)
@pytest.mark.parametrize("count", [1, later(2), 3, later(8)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_for_any_number_of_micro_batches(ranks: RankPool, name: str, count: int):
    model = f"{MODEL} --global-batch-size {count} --micro-batch-size 1"
    check_layout(ranks, f"--pp 2 {SCHEDULES[name]}", model, world_size=2)


@diagonal(2)
@pytest.mark.parametrize("tied", ["", "--no-untie-embeddings-and-output-weights"])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_four_ranks(ranks: RankPool, name: str, tied: str):
    check_layout(ranks, f"--pp 4 {SCHEDULES[name]}", f"{MODEL} {tied}", world_size=4)


RECOMPUTED_MLP = "--recompute-granularity selective --recompute-modules mlp"


@diagonal(2)
@pytest.mark.parametrize("name", ["interleaved", "zb-v"])
def test_four_ranks_with_two_stages_each(ranks: RankPool, name: str):
    flags = "--num-layers 8 --train-iters 2 --no-untie-embeddings-and-output-weights --position-embedding-type learned_absolute"
    check_layout(ranks, f"--pp 4 {SCHEDULES[name]}", flags, world_size=4)


@diagonal(2)
@pytest.mark.parametrize(
    ("name", "more"), [("zb-h1", RECOMPUTED_MLP), ("zb-v", ""), later("zb-h1", ""), later("zb-v", RECOMPUTED_MLP)]
)
def test_weight_gradients_that_wait_for_a_split_sequence(ranks: RankPool, name: str, more: str):
    """The operand waits as a rank's own part, and is gathered when its turn comes."""
    check_layout(ranks, f"--pp 2 --tp 2 --sequence-parallel {SCHEDULES[name]} {more}", MODEL, world_size=4)


CUTS = {
    "short first": ("--num-layers 5", "--pp 2 --decoder-first-pipeline-num-layers 1"),
    "short last": (
        "--num-layers 5",
        "--pp 3 --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 1",
    ),
    "embedding and loss count": (
        "--num-layers 4",
        "--pp 3 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
    ),
    "layout string": ("--num-layers 4", "--pp 2 --pipeline-model-parallel-layout E|tt|t|tL"),
    "ends without layers": ("--num-layers 2", "--pp 4 --pipeline-model-parallel-layout E|t|t|L"),
}


@diagonal(3)
@pytest.mark.parametrize("name", CUTS)
def test_stages_of_any_size(ranks: RankPool, name: str):
    model, layout = CUTS[name]
    check_layout(ranks, layout, f"{model} --train-iters 2", world_size=int(layout.split()[1]))


def _walk(run: RunConfig) -> tuple[list[Action], list[Action], bool]:
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank())
    model = build_model(run, mesh)
    batches = next(iter(build_loader(run, mesh)))
    timed = []
    model.train_step(batches, timeline=timed.extend)
    in_order = all(a.start <= b.start and a.end <= b.end for a, b in itertools.pairwise(timed))
    planned = model.plan.training_schedule(len(batches), rank=mesh.pp.rank)
    return [action for batch in planned.action_batches() for action in batch], [t.action for t in timed], in_order


@diagonal(2)
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_order_of_the_executor_is_the_list(ranks: RankPool, name: str):
    run = tiny_run(f"{MODEL} --pp 2 {SCHEDULES[name]} --global-batch-size 6", world_size=2)
    for planned, done, in_order in ranks.run(_walk, 2, run):
        assert planned == done and in_order and len(done) > 6


def _evaluate(run: RunConfig) -> float:
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank() if dist.is_initialized() else 0)
    model = build_model(run, mesh)
    total, tokens = model.evaluate(next(iter(build_loader(run, mesh))))
    return float(total / tokens)


@diagonal(2)
@pytest.mark.parametrize("layout", ["--pp 2", "--pp 2 --pipeline-schedule zb-v", "--pp 2 --cp 2 --tp 2"])
def test_evaluation_on_every_rank_is_that_of_one(ranks: RankPool, layout: str):
    alone = _evaluate(tiny_run(MODEL, dtype="float64"))
    world_size = 8 if "--tp" in layout else 2
    run = tiny_run(f"{MODEL} {layout}", world_size=world_size, dtype="float64")
    assert ranks.run(_evaluate, world_size, run) == pytest.approx([alone] * world_size, rel=1e-12)


def _measured(run: RunConfig) -> None:
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank())
    state = TrainState.build(run, mesh)
    for batches in build_loader(run, mesh):
        train_step(state, batches)


def test_a_run_writes_its_measured_timeline(ranks: RankPool, tmp_path: Path):
    path = tmp_path / "timeline.json"
    flags = f"{MODEL} --pp 2 --dp 2 --pipeline-timeline {path} --pipeline-timeline-step 2"
    ranks.run(_measured, 4, tiny_run(flags, world_size=4))
    found = read_measured(path)
    assert found.name == "1f1b" and len(found.ranks) == 2
    for rank in found.ranks:
        assert len(rank) == 2 * 2 and {timed.action.kind for timed in rank} <= COMPUTE_KINDS
    assert min(timed.start for rank in found.ranks for timed in rank) == 0.0


def _alive(run: RunConfig) -> list[int]:
    """Graphs alive after each action, seen through the saved tensors that they keep."""
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank())
    model = build_model(run, mesh)
    alive = [0]

    class Kept:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value
            alive[0] += value.numel()

        def __del__(self) -> None:
            alive[0] -= self.value.numel()

    most = 0

    def pack(value: torch.Tensor) -> Kept:
        nonlocal most
        kept = Kept(value)
        most = max(most, alive[0])
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.value):
        model.train_step(next(iter(build_loader(run, mesh))))
    return [most, alive[0]]


def test_one_forward_one_backward_keeps_fewer_activations_than_gpipe(ranks: RankPool):
    """8 micro-batches on 2 ranks: GPipe holds 8 of them, 1F1B 2 on the first rank and 1 on the last; nothing stays."""
    flags = f"{MODEL} --pp 2 --global-batch-size 8 --micro-batch-size 1 --position-embedding-type none"
    peaks = {}
    for name in ("gpipe", "1f1b"):
        found = ranks.run(_alive, 2, tiny_run(f"{flags} {SCHEDULES[name]}", world_size=2))
        assert [left for _, left in found] == [0, 0]
        peaks[name] = [most for most, _ in found]
    assert peaks["gpipe"][0] == pytest.approx(4 * peaks["1f1b"][0], rel=0.01)
    assert peaks["gpipe"][1] == pytest.approx(8 * peaks["1f1b"][1], rel=0.15)
