"""Muon trains the same model in every layout: matrices are iterated whole, wherever their parts lie."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from petatron.config import RunConfig
from petatron.mesh.comm_record import CommEvent
from petatron.optim import matrix_update
from petatron.optim.matrix_update import MatrixUpdate
from petatron.sharding.logical_matrices import LogicalMatrix, matrix_shape
from petatron.verify.compare_traces import Tolerances, compare_traces
from petatron.verify.matrix import parse_entry
from petatron.verify.trace import StepTrace
from tests.dist import RankFailure, RankPool
from tests.longform import later
from tests.parity.harness import check_order, layout_run, reference, tiny_run, train, train_recorded
from tests.parity.state.resharding import SMALL_BATCH, STOP, Life, configured, live, whole
from tests.parity.state.test_resume import ITERATIONS, trained

MUON = "--optimizer muon --muon-nesterov --muon-extra-scale-factor 0.2 --train-iters 2 --num-query-groups 2"
EXPERTS = (
    f"{MUON} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 16"
)
ZERO1 = "--use-distributed-optimizer"
ZERO2 = "--data-parallel-sharding-strategy optim_grads"
ZERO3 = "--data-parallel-sharding-strategy optim_grads_params"
STOPPED_AT = 2
BOUNDS = Tolerances(loss=1e-9, gradient=1e-9, parameter=1e-9)


def check(ranks: RankPool, layout: str, model: str, world_size: int) -> list[list[CommEvent]]:
    run = layout_run(layout, model, world_size=world_size, dtype="float64")
    traces, records = map(list, zip(*ranks.run(train_recorded, world_size, run)))
    check_order(records)
    verdict = compare_traces([reference(model, "float64")], traces, BOUNDS)
    assert len(verdict.steps) == 2
    assert verdict.agrees, verdict.first_departure
    return records


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        later("--tp 2", 2),
        later("--tp 2 --sequence-parallel", 2),
        ("--tp 4 --sequence-parallel", 4),
        ("--pp 2", 2),
        later("--dp 2", 2),
        later(f"--dp 2 {ZERO1}", 2),
        (f"--dp 4 {ZERO1} --ddp-bucket-size 1 --overlap-grad-reduce --overlap-param-gather", 4),
        later(f"--tp 2 --dp 2 {ZERO1}", 4),
        later(f"--cp 2 --dp 2 {ZERO1} --num-distributed-optimizer-instances 2", 4),
        (f"--dp 2 {ZERO2}", 2),
        later(f"--dp 4 {ZERO3}", 4),
        later(f"--dp 4 --num-distributed-optimizer-instances 2 {ZERO3}", 4),
        (f"--tp 2 --dp 2 --sequence-parallel {ZERO3}", 4),
        later(f"--pp 2 --dp 2 {ZERO3}", 4),
    ],
)
def test_dense(ranks: RankPool, layout: str, world_size: int):
    check(ranks, layout, MUON, world_size)


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        later("--dp 2 --ep 2", 2),
        ("--tp 2 --expert-tensor-parallel-size 2", 2),
        (f"--tp 2 --dp 2 --ep 2 {ZERO1}", 4),
        later(f"--dp 4 --ep 2 {ZERO1} --ddp-bucket-size 1", 4),
        (f"--dp 4 --ep 2 {ZERO3}", 4),
        later(f"--dp 2 --tp 2 --expert-tensor-parallel-size 1 {ZERO2}", 4),
    ],
)
def test_experts(ranks: RankPool, layout: str, world_size: int):
    check(ranks, layout, EXPERTS, world_size)


@pytest.mark.parametrize(
    ("layout", "world_size"), [("--tp 4", 4), (f"--dp 2 {ZERO1}", 2), later(f"--tp 2 --dp 2 {ZERO2}", 4)]
)
def test_queries_keys_and_values_as_one_matrix(ranks: RankPool, layout: str, world_size: int):
    check(ranks, layout, f"{MUON} --muon-no-split-qkv", world_size)


def train_without_gathering(run: RunConfig) -> list[StepTrace]:
    """Muon with matrices that are not whole: every tensor-parallel rank orthogonalises its shard by itself."""

    def shards_alone(self: MatrixUpdate, matrices: Sequence[LogicalMatrix], local: Sequence[Sequence[Tensor]]):
        return [torch.cat(list(shards)) for shards in local]

    def own_rows(matrix: LogicalMatrix, result: Tensor) -> list[Tensor]:
        return list(result.split([matrix_shape(shard.shape)[0] for shard in matrix.shards]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MatrixUpdate, "_gather_over_tensor_parallel", shards_alone)
        patch.setattr(matrix_update, "_local_parts", own_rows)
        return train(run)


def test_orthogonalised_shards_are_another_model(ranks: RankPool):
    """So that the comparisons above could fail; the first update, at the start of warm-up, moves nothing."""
    traces = ranks.run(train_without_gathering, 2, tiny_run(f"{MUON} --tp 2", world_size=2, dtype="float64"))
    verdict = compare_traces([reference(MUON, "float64")], traces, BOUNDS)
    assert verdict.first_departure is not None and verdict.first_departure.startswith("step 2: parameter layers.")


@pytest.mark.parametrize(("bucket_size", "exchanged"), [(20_000, False), (1, True)])
def test_a_rank_that_owns_a_matrix_asks_nobody_for_it(ranks: RankPool, bucket_size: int, exchanged: bool):
    """Two layers divide evenly over two ranks; a bucket of one matrix does not."""
    records = check(ranks, f"--dp 2 {ZERO1} --ddp-bucket-size {bucket_size}", MUON, 2)
    assert all(any(event.op == "all_to_all" for event in events) is exchanged for events in records)


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        later("--bf16", 1),
        ("--fp16 --initial-loss-scale 1e6 --loss-scale-window 2 --hysteresis 1", 1),
        (f"--tp 2 --dp 2 {ZERO1} --bf16 --overlap-grad-reduce --overlap-param-gather", 4),
        later(f"--dp 2 {ZERO3} --bf16", 2),
    ],
)
def test_resume_is_bitwise(ranks: RankPool, tmp_path: Path, layout: str, world_size: int):
    muon = "--optimizer muon --muon-nesterov --muon-extra-scale-factor 0.2"
    uninterrupted = trained(ranks, f"{layout} {muon}", world_size)
    saved = f"--save {tmp_path / 'saved'}"
    stopped = trained(ranks, f"{layout} {muon} {saved} --exit-interval {STOPPED_AT}", world_size)
    momenta = [values for (key, _), values in stopped[0][1].items() if key.startswith("momentum_buffer/")]
    assert any(values.any() for values in momenta), "some step before the stop has moved the weights"
    resumed = trained(ranks, f"{layout} {muon} --load {tmp_path / 'saved'}", world_size)
    for (losses, tensors), (wanted, kept) in zip(resumed, uninterrupted, strict=True):
        assert sorted(losses) == [*range(STOPPED_AT + 1, ITERATIONS + 1)]
        assert losses == {step: wanted[step] for step in losses}
        assert tensors.keys() == kept.keys()
        for key, values in tensors.items():
            assert torch.equal(values, kept[key]), key


@pytest.mark.parametrize(
    ("model", "saved_in", "loaded_in"),
    [
        later("dense", "dp2-zero1", "tp2"),
        later("dense", "tp2.dp2-zero1", "dp4-fsdp"),
        later("dense", "dp2-fsdp", "dp1"),
        later("dense", "dp1", "tp2-sp.pp2"),
        ("moe", "dp4-zero1.ep2", "tp2.etp2"),
        later("moe", "tp2.etp2", "dp4-zero2.ep2"),
    ],
)
def test_reshard(ranks: RankPool, tmp_path: Path, model: str, saved_in: str, loaded_in: str):
    """Weights, momenta and moments are found again exactly, and training goes on as it would have."""

    def lives(layout: str, flags: str) -> list[Life]:
        entry = parse_entry(f"{model}:{layout}")
        return ranks.run(live, entry.world_size, configured(entry, f"--optimizer muon --fp64 {SMALL_BATCH} {flags}"))

    first = lives(saved_in, f"--save {tmp_path} --save-interval {STOP}")
    second = lives(loaded_in, f"--load {tmp_path} --ckpt-step {STOP}")
    before, after = whole([life.at_stop for life in first]), whole([life.began for life in second])
    assert {kind for kind, _ in before} >= {"weight", "momentum_buffer", "exp_avg", "exp_avg_sq"}
    assert before.keys() == after.keys()
    assert all(torch.equal(values, before[key]) for key, values in after.items())
    ended = whole([life.ended for life in first])
    for key, values in whole([life.ended for life in second]).items():
        torch.testing.assert_close(values, ended[key], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        ("", "--optimizer muon", r"momentum_buffer/.* is not in the checkpoint[^$]*Use the model and optimizer flags"),
        ("--optimizer muon", "", r"exp_avg/.* is not in the checkpoint"),
        ("--optimizer muon", "--optimizer sgd", r"momentum_buffer/embedding.weight is not in the checkpoint"),
    ],
)
def test_another_optimizer_does_not_take_over(ranks: RankPool, tmp_path: Path, saved: str, loaded: str, message: str):
    trained(ranks, f"{saved} --save {tmp_path} --exit-interval 1", 1)
    with pytest.raises(RankFailure, match=message):
        trained(ranks, f"{loaded} --load {tmp_path}", 1)
    trained(ranks, f"{loaded} --load {tmp_path} --no-load-optim --train-iters 2", 1)
