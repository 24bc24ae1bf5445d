"""A model of two streams and two losses, defined outside of the package, trains the same in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from petatron.config import RunConfig
from petatron.mesh.comm_record import CommEvent
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.train.build_run import build_loader, build_model
from petatron.verify.compare_traces import Tolerances, compare_traces
from petatron.verify.trace import StepTrace
from tests.dist import RankPool
from tests.longform import later
from tests.outside import encoder_decoder  # noqa: F401  registers the model
from tests.parity.harness import check_order, tiny_run, train, train_recorded
from tests.parity.state.resharding import END, STOP, Life, live, whole

BOUNDS = Tolerances(loss=1e-9, gradient=1e-9, parameter=1e-9)


def two_stream_run(flags: str = "", *, world_size: int = 1) -> RunConfig:
    model = "--model-type encoder-decoder --num-layers 4 --position-embedding-type none"
    return tiny_run(f"{model} {flags}", world_size=world_size, dtype="float64")


def train_two_streams(run: RunConfig) -> tuple[list[StepTrace], list[CommEvent]]:
    """On one rank, which imports this module and with it the model."""
    return train_recorded(run)


def live_two_streams(run: RunConfig) -> Life:
    return live(run)


def logits_of(run: RunConfig) -> list[torch.Tensor]:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    mesh = ParallelMesh(Layout.from_config(run.parallel), rank)
    model = build_model(run, mesh)
    outputs = model.forward(next(build_loader(run, mesh)), collect=["logits"])
    return [output["logits"] for output in outputs if "logits" in output]


@pytest.fixture(scope="module")
def alone() -> list[StepTrace]:
    return train(two_stream_run())


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ("--pp 2", 2),
        ("--pp 4", 4),
        later("--tp 2 --pp 2", 4),
        ("--tp 2 --pp 2 --sequence-parallel", 4),
        ("--pp 2 --num-layers-per-virtual-pipeline-stage 1", 2),
        ("--pp 2 --pipeline-schedule zb-h1", 2),
        ("--pp 2 --decoder-first-pipeline-num-layers 1", 2),
        ("--dp 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", 2),
        ("--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2),
        later("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 1),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 4", 1),
        ("--cpu-offloading-num-layers 2", 1),
    ],
)
def test_every_layout_trains_the_same_model(ranks: RankPool, alone: list[StepTrace], layout: str, world_size: int):
    run = two_stream_run(layout, world_size=world_size)
    if world_size == 1:
        traces = [train(run)]
    else:
        traces, records = map(list, zip(*ranks.run(train_two_streams, world_size, run)))
        check_order(records)
    verdict = compare_traces([alone], traces, BOUNDS)
    assert len(verdict.steps) == run.train.train_iters
    assert verdict.agrees, verdict.first_departure


def test_the_objective_is_the_weighted_sum_of_both_losses():
    run = two_stream_run()
    mesh = ParallelMesh.single()
    model = build_model(run, mesh)
    batches = next(build_loader(run, mesh))
    objective = model.train_step(batches)
    named = model.named_losses
    assert set(named) == {"lm loss", "source loss"}
    assert float(objective) == pytest.approx(float(named["lm loss"] + 0.5 * named["source loss"]), rel=1e-14)
    assert float(named["lm loss"]) != pytest.approx(float(named["source loss"]), rel=1e-3)


def test_the_decoder_reads_what_was_encoded():
    """Another source gives another answer, and the encoder's weights get gradients from both losses."""
    run = two_stream_run()
    mesh = ParallelMesh.single()
    model = build_model(run, mesh)
    batches = next(build_loader(run, mesh))
    before = model.forward(batches, collect=["logits"])[0]["logits"]
    batches[0].arrays["source"].zero_()  # pyright: ignore[reportAttributeAccessIssue]
    after = model.forward(batches, collect=["logits"])[0]["logits"]
    assert not torch.allclose(before, after)


@pytest.mark.parametrize(("layout", "world_size"), [("--pp 2", 2), ("--tp 2 --pp 2", 4)])
def test_logits_are_collected_from_the_last_stage(ranks: RankPool, layout: str, world_size: int):
    expected = logits_of(two_stream_run())
    found = ranks.run(logits_of, world_size, two_stream_run(layout, world_size=world_size))
    with_logits = [one for one in found if one]
    assert len(with_logits) == world_size // 2
    for one in with_logits:
        torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-13)


def test_a_checkpoint_is_resumed_in_another_layout(ranks: RankPool, tmp_path: Path):
    common = f"--train-iters {END} --log-interval 1"
    first = two_stream_run(f"{common} --save {tmp_path} --save-interval {STOP} --pp 4", world_size=4)
    lives = ranks.run(live_two_streams, 4, first)
    again = two_stream_run(f"{common} --load {tmp_path} --ckpt-step {STOP} --tp 2", world_size=2)
    resumed = ranks.run(live_two_streams, 2, again)
    at_stop, began = whole([one.at_stop for one in lives]), whole([one.began for one in resumed])
    assert at_stop.keys() == began.keys()
    for key, values in at_stop.items():
        assert torch.equal(began[key], values), key
    for step in range(STOP + 1, END + 1):
        assert resumed[0].losses[step] == pytest.approx(lives[0].losses[step], rel=1e-12)
