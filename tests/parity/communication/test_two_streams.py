"""A model of several streams and losses computes in every pipeline what plain autograd does in one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from petatron.config import RunConfig
from petatron.mesh import collectives
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.models.batch import Batch
from petatron.models.stage_inputs_outputs import LossSpec, ModelIO, StageOutput
from petatron.schedule.pipeline_plan import PipelinePlan, pipeline_plan
from petatron.train.build_run import build_loader, build_model
from tests.dist import RankPool
from tests.longform import diagonal
from tests.parity.communication.two_streams import gradients, on_mesh, plain_objective, toy_batches, toy_model
from tests.parity.harness import check_order, tiny_run

MICRO_BATCHES = 6
PIPELINES = {
    "pp2": (2, "--pp 2"),
    "pp4": (4, "--pp 4"),
    "gpipe": (2, "--pp 2 --pipeline-schedule gpipe"),
    "interleaved": (2, "--pp 2 --num-layers-per-virtual-pipeline-stage 1"),
    "zb-h1": (4, "--pp 4 --pipeline-schedule zb-h1"),
    "zb-v": (2, "--pp 2 --pipeline-schedule zb-v"),
    "interleaved over four": (4, "--pp 4 --num-layers-per-virtual-pipeline-stage 1"),
    "zb-v over four": (4, "--pp 4 --pipeline-schedule zb-v"),
    "dp2 pp2": (4, "--dp 2 --pp 2"),
}
Outcome = tuple[float, dict[str, float], dict[str, Tensor], list[dict[str, Tensor]], list[float], list[Any]]


def _toy_step(run: RunConfig) -> Outcome:
    torch.set_num_threads(1)
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank() if dist.is_initialized() else 0)
    model = toy_model(pipeline_plan(run), mesh)
    batches = toy_batches(MICRO_BATCHES)[mesh.dp.rank :: mesh.dp.size]
    loss = model.train_step(batches, loss_scale=4.0)
    found = gradients(model.stages)
    grads = {name: collectives.all_reduce(found[name], mesh.dp) / 4.0 for name in sorted(found)}
    named = {name: float(mean) for name, mean in model.named_losses.items()}
    total, tokens = model.evaluate(batches)
    collected = model.forward(batches, collect=["hidden_states"])
    return float(loss), named, grads, collected, [float(total / tokens)], mesh.record.events()


def _check(outcomes: list[Outcome]) -> None:
    objective, named, grads, hidden = plain_objective(toy_batches(MICRO_BATCHES))
    together: dict[str, Tensor] = {}
    for loss, losses, own_grads, _, [evaluated], _ in outcomes:
        assert loss == pytest.approx(objective, rel=1e-12) and evaluated == pytest.approx(objective, rel=1e-12)
        assert losses == pytest.approx(named, rel=1e-12)
        together |= own_grads
    assert together.keys() == grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(together[name], grad, rtol=1e-12, atol=1e-12 * float(grad.abs().max()), msg=name)
    assert any(outcome[3][0] for outcome in outcomes)
    for outcome in outcomes:
        if len(outcome[3]) == MICRO_BATCHES and outcome[3][0]:
            for one, wanted in zip(outcome[3], hidden, strict=True):
                torch.testing.assert_close(one["hidden_states"], wanted, rtol=1e-12, atol=1e-12)


@diagonal(3)
@pytest.mark.parametrize("name", PIPELINES)
def test_two_streams_equal_plain_autograd(ranks: RankPool, name: str):
    world_size, flags = PIPELINES[name]
    run = tiny_run(f"--num-layers 8 {flags}", world_size=world_size)
    outcomes = ranks.run(_toy_step, world_size, run)
    check_order([outcome[-1] for outcome in outcomes])
    _check(outcomes)


def test_in_one_process():
    _check([_toy_step(tiny_run("--num-layers 8"))])


class Apart(nn.Module):
    """A stage that takes nothing and gives nothing: a loss of the batch alone."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.name = f"loss {stage}"
        self.weight = nn.Parameter(torch.full((), 2.0 + stage, dtype=torch.float64))

    def forward(self, batch: Batch, inputs: dict[str, Tensor], **_: object) -> StageOutput:
        assert not inputs
        return StageOutput({}, {self.name: self.weight * batch.tokens.t()}, {})


def _apart(ranks: int, schedule: str) -> tuple[dict[str, float], dict[str, Tensor], int]:
    mesh = ParallelMesh(Layout(pp=ranks), dist.get_rank() if ranks > 1 else 0)
    plan = PipelinePlan(schedule, ranks, 1)
    io = ModelIO(boundaries=((), ())[:ranks], losses=tuple(LossSpec(f"loss {stage}") for stage in range(ranks)))
    model = on_mesh({mesh.pp.rank: Apart(mesh.pp.rank)}, io, plan, mesh)
    model.train_step(toy_batches(3))
    transfers = [event for event in mesh.record.events() if event.op in ("send", "receive")]
    named = {name: float(mean) for name, mean in model.named_losses.items()}
    return named, gradients(model.stages), len(transfers)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_nothing_is_sent_over_an_empty_boundary(ranks: RankPool, schedule: str):
    batches = toy_batches(3)
    mean = float(sum((b.tokens * b.loss_mask).sum() for b in batches) / sum(b.loss_mask.sum() for b in batches))
    for named, grads, transfers in ranks.run(_apart, 2, 2, schedule):
        assert named == pytest.approx({"loss 0": 2 * mean, "loss 1": 3 * mean}, rel=1e-12)
        assert float(grads["weight"]) == pytest.approx(mean, rel=1e-12) and transfers == 0


def _collected(run: RunConfig) -> list[dict[str, Tensor]]:
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank() if dist.is_initialized() else 0)
    model = build_model(run, mesh)
    batches = next(iter(build_loader(run, mesh)))
    if mesh.world.size == 1:
        batches = [Batch(batch.tokens) for batch in batches]  # logits need no labels
    return model.forward(batches, collect=["logits", "hidden_states"])


@diagonal(3)
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(2, "--pp 2"), (2, "--pp 2 --pipeline-schedule zb-v"), (4, "--pp 2 --tp 2 --sequence-parallel")],
)
def test_collected_logits_are_those_of_one_process(ranks: RankPool, world_size: int, layout: str):
    flags = "--num-layers 4"
    alone = _collected(tiny_run(flags, dtype="float64"))
    assert all(outputs["logits"].shape == (2, 16, 131) for outputs in alone)
    found = ranks.run(_collected, world_size, tiny_run(f"{flags} {layout}", world_size=world_size, dtype="float64"))
    having = [outputs for outputs in found if outputs[0]]
    assert len(having) == world_size // 2
    for outputs in having:
        for one, wanted in zip(outputs, alone, strict=True):
            assert one.keys() == wanted.keys() == {"logits", "hidden_states"}
            for name in wanted:
                torch.testing.assert_close(one[name], wanted[name], rtol=1e-12, atol=1e-12)
