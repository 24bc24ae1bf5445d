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
from petatron.verify.compare_traces import Tolerances
from petatron.verify.record_trace import StepTrace
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.outside import encoder_decoder  # noqa: F401  registers the model
from tests.parity.harness import check_traces, tiny_run, train, train_recorded
from tests.parity.state.resharding import Life, check_resume, live

MODEL = "--model-type encoder-decoder --num-layers 4 --position-embedding-type none"
BOUNDS = Tolerances(loss=1e-9, gradient=1e-9, parameter=1e-9)


def two_stream_run(flags: str = "", *, world_size: int = 1) -> RunConfig:
    return tiny_run(f"{MODEL} {flags}", world_size=world_size, dtype="float64")


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


@diagonal(4)
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
        ("--cp 2", 2),
        later("--cp 2 --cp-comm-type all_gather", 2),
        ("--cp 2 --cp-comm-type a2a", 2),
        later("--cp 2 --tp 2 --sequence-parallel", 4),
    ],
)
def test_every_layout_trains_the_same_model(ranks: RankPool, alone: list[StepTrace], layout: str, world_size: int):
    check_traces(ranks, two_stream_run(layout, world_size=world_size), alone, BOUNDS, train_rank=train_two_streams)


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


@pytest.mark.matrix
def test_a_checkpoint_is_resumed_in_another_layout(ranks: RankPool, tmp_path: Path):
    check_resume(
        ranks, tmp_path, MODEL, "--tp 2", world_size=2, saved_in="--pp 4", saving_ranks=4, live_rank=live_two_streams
    )
