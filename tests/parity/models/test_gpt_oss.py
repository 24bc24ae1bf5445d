"""gpt-oss at toy size (biases of experts and router, clamped gates, sinks, windows) trains the same model in every layout."""

from __future__ import annotations

import pytest

from petatron.verify.compare_traces import Tolerances, compare_traces
from tests.dist import RankPool
from tests.longform import diagonal, later, over_nccl
from tests.parity.harness import check_layout, check_part_of_model, reference

MODEL = (
    "--num-query-groups 2 --activation quick_geglu --activation-func-clamp-value 0.3 --glu-linear-offset 1.0 --add-bias-linear "
    "--softmax-type learnable --window-size 5 --window-attn-skip-freq 2 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 "
    "--moe-router-linear-bias --moe-aux-loss-coeff 0.05 --position-embedding-type yarn --rope-scaling-factor 4 "
    "--rotary-base 100 --original-max-position-embeddings 64 --yarn-beta-fast 4 --no-yarn-correction-range-round-to-int"
)
A2A, GATHER = "--moe-token-dispatcher-type alltoall", "--moe-token-dispatcher-type allgather"
LAYOUTS = [
    over_nccl(f"--tp 2 --ep 2 --dp 2 {A2A}", 4),
    (f"--tp 2 --sequence-parallel {GATHER}", 2),
    later(f"--tp 2 --ep 2 --etp 1 --sequence-parallel {A2A}", 2),
    later(f"--ep 2 --dp 2 {GATHER}", 2),
    later(f"--tp 2 --dp 2 --ep 2 {GATHER} --no-moe-grouped-gemm", 4),
    later(f"--cp 2 --ep 2 {A2A}", 2, nccl=True),
    later(f"--pp 2 --tp 2 {A2A}", 4, nccl=True),
    later(f"--dp 2 --ep 2 {A2A} --data-parallel-sharding-strategy optim_grads_params", 2, nccl=True),
    later(f"--tp 2 {A2A} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 2),
]


@diagonal(2)
@pytest.mark.parametrize(("layout", "world_size"), LAYOUTS)
def test_layout(ranks: RankPool, layout: str, world_size: int):
    check_layout(ranks, layout, MODEL, world_size=world_size)


def test_experts_one_by_one_are_the_grouped_ones():
    bounds = Tolerances(loss=1e-12, gradient=1e-10, parameter=1e-10)
    looped = reference(f"{MODEL} --no-moe-grouped-gemm", "float64")
    assert compare_traces([reference(MODEL, "float64")], [looped], bounds).agrees


@diagonal(2)
@pytest.mark.parametrize(
    "without",
    [
        "--activation-func-clamp-value 0.3",
        "--glu-linear-offset 1.0",
        "--moe-router-linear-bias",
        "--no-yarn-correction-range-round-to-int",
    ],
)
def test_the_variant_is_part_of_the_model(without: str):
    check_part_of_model(MODEL, MODEL.replace(without, ""))
