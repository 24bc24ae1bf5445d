"""Muon trains the same model in every layout: matrices are iterated whole, wherever their parts lie."""

from __future__ import annotations

import pytest

from petatron.verify.compare_traces import Tolerances, compare_traces
from tests.dist import RankPool
from tests.longform import later
from tests.parity.harness import check_order, reference, tiny_run, train_recorded

MUON = "--optimizer muon --muon-nesterov --muon-extra-scale-factor 0.2 --train-iters 3 --num-query-groups 2"
EXPERTS = f"{MUON} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 16"
ZERO1 = "--use-distributed-optimizer"
ZERO2 = "--data-parallel-sharding-strategy optim_grads"
ZERO3 = "--data-parallel-sharding-strategy optim_grads_params"
BOUNDS = Tolerances(loss=1e-9, gradient=1e-9, parameter=1e-9)


def check(ranks: RankPool, layout: str, model: str, world_size: int) -> None:
    run = tiny_run(f"{model} {layout}", world_size=world_size, dtype="float64")
    traces, records = map(list, zip(*ranks.run(train_recorded, world_size, run)))
    check_order(records)
    verdict = compare_traces([reference(model, "float64")], traces, BOUNDS)
    assert len(verdict.steps) == 3
    assert verdict.agrees, verdict.first_departure


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ("--tp 2", 2),
        later("--tp 2 --sequence-parallel", 2),
        ("--tp 4 --sequence-parallel", 4),
        ("--pp 2", 2),
        later("--dp 2", 2),
        (f"--dp 2 {ZERO1}", 2),
        (f"--dp 4 {ZERO1} --ddp-bucket-size 1 --overlap-grad-reduce --overlap-param-gather", 4),
        (f"--dp 2 {ZERO1} --ddp-bucket-size 20000", 2),
        later(f"--tp 2 --dp 2 {ZERO1}", 4),
        later(f"--cp 2 --dp 2 {ZERO1} --num-distributed-optimizer-instances 2", 4),
        (f"--dp 2 {ZERO2}", 2),
        later(f"--dp 4 {ZERO3}", 4),
        (f"--dp 4 --num-distributed-optimizer-instances 2 {ZERO3}", 4),
        (f"--tp 2 --dp 2 --sequence-parallel {ZERO3}", 4),
        later(f"--pp 2 --dp 2 {ZERO3}", 4),
    ],
)
def test_dense(ranks: RankPool, layout: str, world_size: int):
    check(ranks, layout, MUON, world_size)


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ("--dp 2 --ep 2", 2),
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
