"""Half precision on the CPU: layouts stay close, overflowing steps are skipped by all ranks alike and cost no schedule."""

import dataclasses
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from petatron.config import RunConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.optim.loss_scaler import DynamicLossScaler
from petatron.train.build_run import build_loader
from petatron.train.state.train_state import TrainState
from petatron.train.train_step import train_step
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.parity.harness import tiny_run

SMALL = "--num-layers 1 --seq-length 8 --vocab-size 37 --global-batch-size 4 --micro-batch-size 1"


@dataclass(frozen=True)
class Step:
    loss: float
    grad_norm: float
    skipped: bool
    loss_scale: float
    lr: float
    weights: float
    updates: int


def _steps(run: RunConfig) -> tuple[list[Step], dict[str, torch.dtype]]:
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank() if dist.is_initialized() else 0)
    state = TrainState.build(run, mesh)
    steps = []
    for batches in build_loader(run, mesh):
        metrics = train_step(state, batches)
        steps.append(
            Step(
                loss=float(metrics.loss),
                grad_norm=float(metrics.grad_norm or 0.0),
                skipped=bool(metrics.skipped),
                loss_scale=float(metrics.loss_scale),
                lr=metrics.lr,
                weights=float(state.optimizer.weight_norm()),
                updates=state.progress.updates,
            )
        )
    group = state.model.param_groups[0]
    masters = [view for _, _, view in state.optimizer.master_weights()]
    return steps, {"weights": group.weights()[0].dtype, "grads": group.grads()[0].dtype, "masters": masters[0].dtype}


def _first_masters_are_first_weights(run: RunConfig) -> bool:
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank())
    state = TrainState.build(run, mesh)
    return all(
        torch.equal(view, view.to(torch.bfloat16).to(view.dtype)) for _, _, view in state.optimizer.master_weights()
    )


@diagonal(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_masters_begin_with_the_same_numbers_however_state_is_shared(ranks: RankPool, strategy: str):
    run = tiny_run(f"{SMALL} --bf16 --dp 2 --data-parallel-sharding-strategy {strategy}", world_size=2)
    assert ranks.run(_first_masters_are_first_weights, 2, run) == [True, True]


@diagonal(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("layout", "world_size"), [("--tp 2", 2), ("--tp 2 --sequence-parallel", 2), ("--tp 2 --dp 2", 4)]
)
def test_layouts_stay_close(ranks: RankPool, dtype: torch.dtype, layout: str, world_size: int):
    flag = "--bf16" if dtype == torch.bfloat16 else "--fp16 --loss-scale 128"
    flags = f"{SMALL} --train-iters 3 --num-query-groups 1 {flag}"
    reference, dtypes = _of_one_process(flags)
    assert dtypes == {"weights": dtype, "grads": torch.float32, "masters": torch.float32}
    exact = _full_precision(flags)
    for steps, _ in ranks.run(_steps, world_size, tiny_run(f"{flags} {layout}", world_size=world_size)):
        assert len(steps) == 3 and not any(step.skipped for step in steps)
        for ours, theirs, wide in zip(steps, reference, exact):
            assert ours.loss == pytest.approx(theirs.loss, rel=2e-2)
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-1)
            assert ours.loss == pytest.approx(wide.loss, rel=2e-2)


@diagonal(2)
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
def test_eight_bits_with_a_split_sequence(ranks: RankPool, recipe: str):
    """The same products as with a whole one; sums over ranks may be rounded otherwise."""
    sizes = "--ffn-hidden-size 64 --seq-length 32 --train-iters 3"
    flags = f"{SMALL} {sizes} --bf16 --fp8-format hybrid --fp8-recipe {recipe} --tp 2"
    whole = ranks.run(_steps, 2, tiny_run(flags, world_size=2))
    split = ranks.run(_steps, 2, tiny_run(f"{flags} --sequence-parallel", world_size=2))
    for (ours, _), (theirs, _) in zip(split, whole, strict=True):
        assert [step.loss for step in ours] == pytest.approx([step.loss for step in theirs], rel=2e-3)
        assert [step.grad_norm for step in ours] == pytest.approx([step.grad_norm for step in theirs], rel=3e-2)


@cache
def _of_one_process(flags: str) -> tuple[list[Step], dict[str, torch.dtype]]:
    return _steps(tiny_run(flags))


@cache
def _full_precision(flags: str) -> list[Step]:
    run = tiny_run(flags)
    wide = dataclasses.replace(run, precision=dataclasses.replace(run.precision, bf16=False, fp16=False))
    mesh = ParallelMesh.single()
    state = TrainState.build(wide, mesh)
    steps = [train_step(state, batches) for batches in build_loader(wide, mesh)]
    return [Step(float(s.loss), 0.0, False, 1.0, s.lr, 0.0, 0) for s in steps]


def expected_scales(overflows: list[bool], run: RunConfig) -> list[float]:
    scale, values = DynamicLossScaler(run.precision), []
    for overflow in overflows:
        values.append(scale.scale)
        scale.update(overflow)
    return values


@diagonal(2)
@pytest.mark.parametrize(("layout", "world_size"), [("", 1), ("--dp 2", 2), later("--tp 2 --dp 2", 4)])
def test_dynamic_loss_scale_finds_its_level(ranks: RankPool, layout: str, world_size: int):
    """From 2^32 everything overflows; the scale halves, once patience is used up, until gradients fit."""
    flags = f"{SMALL} --train-iters 40 --lr-warmup-iters 4 --fp16 --hysteresis 2 {layout}"
    run = tiny_run(flags, world_size=world_size)
    results = ranks.run(_steps, world_size, run)
    steps = results[0][0]
    for others, _ in results[1:]:
        assert str(others) == str(steps), "all ranks decide alike, with the same numbers"
    overflows = [step.skipped for step in steps]
    first_good = overflows.index(False)
    assert 8 < first_good < 28 and overflows[:first_good] == [True] * first_good
    assert sum(overflows[first_good:]) <= 3, "at the edge a step may still overflow now and then"
    scales = [step.loss_scale for step in steps]
    assert scales == expected_scales(overflows, run)
    assert scales[:4] == [2.0**32, 2.0**32, 2.0**31, 2.0**30]

    trained = [step for step in steps if not step.skipped]
    for before, step in pairwise(steps):
        if step.skipped:
            assert (step.weights, step.updates) == (before.weights, before.updates), "an overflow changes nothing"
    # Skipped steps do not advance the schedule: warm-up starts with the first step that counts.
    schedule = TrainState.build(tiny_run(flags.replace(layout, "")), ParallelMesh.single()).lr_schedule
    batch = run.train.global_batch_size or 0
    assert [step.lr for step in trained] == [schedule.at(n, n * batch) for n in range(len(trained))]
    assert [step.updates for step in trained] == list(range(1, len(trained) + 1))
    assert trained[-1].loss < 0.9 * trained[0].loss, "and then it learns"
    assert all(0.0 < step.grad_norm < 100.0 for step in trained), "the norm is reported without the scale"


def test_the_scale_does_not_change_what_is_learnt():
    """The same steps with two constant scales, both far from the edges of float16."""
    runs = [tiny_run(f"{SMALL} --train-iters 4 --fp16 --loss-scale {scale}") for scale in (256, 1024)]
    (first, _), (second, _) = (_steps(run) for run in runs)
    for ours, theirs in zip(first, second):
        assert ours.loss == pytest.approx(theirs.loss, rel=2e-3)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=2e-2)
