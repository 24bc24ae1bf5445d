"""Full attention over padded and packed samples, and prefixes, train the same model in every layout."""

from __future__ import annotations

import pytest
import torch

from petatron.config import RunConfig
from petatron.mesh.comm_record import CommEvent
from petatron.mesh.mesh import ParallelMesh
from petatron.models.batch import Batch
from petatron.models.decoder import Decoder
from petatron.train.build_run import build_loader, build_model
from petatron.verify.compare_traces import Tolerances
from petatron.verify.record_trace import StepTrace
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.outside import padded_encoder  # noqa: F401  registers the models
from tests.parity.harness import check_traces, tiny_run, train, train_recorded

MODELS = ("padded-encoder", "packed-encoder", "prefix-decoder")
BOUNDS = Tolerances(loss=1e-9, gradient=1e-9, parameter=1e-7)
LAYOUTS = {
    "--dp 2 --use-distributed-optimizer": 2,
    "--tp 2": 2,
    "--tp 2 --sequence-parallel": 2,
    "--cp 2": 2,
    "--cp 2 --cp-comm-type a2a": 2,
    "--cp 2 --cp-comm-type all_gather": 2,
    "--pp 2": 2,
    "--dp 2 --data-parallel-sharding-strategy optim_grads_params": 2,
    "--recompute-granularity selective": 1,
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": 1,
    "--cp 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2": 4,
    "--tp 2 --sequence-parallel --cp 2": 4,
    "--pp 2 --tp 2 --sequence-parallel": 4,
}
AT_ONCE = {
    "padded-encoder": ("--tp 2 --sequence-parallel", "--cp 2", "--pp 2"),
    "packed-encoder": ("--cp 2 --cp-comm-type a2a",),
    "prefix-decoder": ("--cp 2", "--recompute-granularity selective"),
}
"""The layouts of the default suite."""


def encoder_run(model: str, flags: str = "", *, world_size: int = 1) -> RunConfig:
    return tiny_run(f"--model-type {model} {flags}", world_size=world_size, dtype="float64")


def train_encoder(run: RunConfig) -> tuple[list[StepTrace], list[CommEvent]]:
    """On one rank, which imports this module and with it the models."""
    return train_recorded(run)


@pytest.fixture(scope="module")
def alone() -> dict[str, list[StepTrace]]:
    return {model: train(encoder_run(model)) for model in MODELS}


@diagonal(3)
@pytest.mark.parametrize(
    ("model", "layout"),
    [(model, layout) if layout in AT_ONCE[model] else later(model, layout) for model in MODELS for layout in LAYOUTS],
)
def test_every_layout_trains_the_same_model(
    ranks: RankPool, alone: dict[str, list[StepTrace]], model: str, layout: str
):
    run = encoder_run(model, layout, world_size=LAYOUTS[layout])
    check_traces(ranks, run, alone[model], BOUNDS, train_rank=train_encoder)


def stage_and_batch(model: str) -> tuple[Decoder, Batch]:
    run, mesh = encoder_run(model), ParallelMesh.single()
    [stage] = build_model(run, mesh).stages.values()
    assert isinstance(stage, Decoder)
    return stage, next(build_loader(run, mesh))[0]


def hidden_states(stage: Decoder, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        return stage(batch, {}, collect=["hidden_states"]).collected["hidden_states"]


@pytest.mark.parametrize("model", ["padded-encoder", "packed-encoder"])
def test_padding_has_no_effect(model: str):
    stage, batch = stage_and_batch(model)
    is_padding = batch.tokens.eq(0) & batch.loss_mask.eq(0)
    assert is_padding.any() and batch.documents is not None
    before = hidden_states(stage, batch)
    batch.tokens[is_padding] = 7
    after = hidden_states(stage, batch)
    assert torch.equal(before[~is_padding], after[~is_padding]) and not torch.equal(before, after)


def test_a_token_sees_those_after_it():
    stage, batch = stage_and_batch("padded-encoder")
    before = hidden_states(stage, batch)
    batch.tokens[:, 2] += 1
    assert (hidden_states(stage, batch)[:, 0] - before[:, 0]).abs().max() > 1e-6


def test_a_prefix_is_seen_by_all_of_it_and_the_rest_is_not():
    stage, batch = stage_and_batch("prefix-decoder")
    in_prefix = batch.loss_mask.eq(0)
    before = hidden_states(stage, batch)
    batch.tokens[:, 1] += 1
    changed = (hidden_states(stage, batch) - before).abs().amax(-1) > 1e-9
    assert in_prefix[:, 1].all() and changed[:, 0].all()
    batch.tokens[:, -1] += 1
    after = hidden_states(stage, batch)
    batch.tokens[:, -1] += 1
    rows = ~in_prefix[:, -1]
    assert rows.any() and torch.equal(hidden_states(stage, batch)[rows, :-1], after[rows, :-1])
