"""Recompute inside every kind of parallelism trains the model that one device trains without it."""

from __future__ import annotations

import pytest

from tests.dist import RankPool
from tests.longform import diagonal, every_second
from tests.parity.harness import check_layout

DENSE = "--num-query-groups 2"
DEEP = f"{DENSE} --num-layers 4"
MIXED = f"{DENSE} --num-experts 4 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.1 --moe-shared-expert-intermediate-size 40"
WHOLE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
CHOSEN = "--recompute-granularity selective --recompute-modules"

LAYOUTS = {
    "tp-sp": (DENSE, f"--tp 2 --sequence-parallel {CHOSEN} layernorm mlp core_attn"),
    "pp": (DEEP, f"--pp 2 {WHOLE} 2"),
    "tp-sp-whole": (DENSE, f"--tp 2 --sequence-parallel {WHOLE} 1"),
    "tp-sp-attention": (DENSE, f"--tp 2 --sequence-parallel {CHOSEN} attention"),
    "interleaved": (DEEP, f"--pp 2 --num-virtual-stages-per-pipeline-rank 2 {CHOSEN} layernorm attention"),
    "zero-bubble": (DEEP, f"--pp 2 --pipeline-schedule zb-h1 {CHOSEN} layernorm mlp"),
    "zero-bubble-whole": (DEEP, f"--pp 2 --pipeline-schedule zb-v {WHOLE} 1"),
    "cp": (DENSE, f"--cp 2 {CHOSEN} attention layernorm"),
    "cp-whole": (DENSE, f"--cp 2 --cp-comm-type a2a {WHOLE} 1"),
    "ep": (MIXED, f"--ep 2 --dp 2 {CHOSEN} moe layernorm"),
    "ep-activation": (
        MIXED,
        f"--tp 2 --ep 2 --expert-tensor-parallel-size 1 {CHOSEN} moe_act shared_experts layernorm core_attn",
    ),
    "ep-whole": (MIXED, f"--ep 2 --dp 2 --moe-token-dispatcher-type alltoall {WHOLE} 2"),
    "fsdp": (DENSE, f"--dp 2 --data-parallel-sharding-strategy optim_grads_params {CHOSEN} layernorm mlp attention"),
    "fsdp-whole": (DENSE, f"--dp 2 --data-parallel-sharding-strategy optim_grads_params {WHOLE} 1"),
    "fsdp-two-together": (DENSE, f"--dp 2 --data-parallel-sharding-strategy optim_grads_params {WHOLE} 2"),
    "budget": (DEEP, "--pp 2 --recompute-memory-budget-gb 0.0003"),
}


@diagonal(3)
@pytest.mark.parametrize("name", every_second(LAYOUTS))
def test_recompute_in_a_layout(ranks: RankPool, name: str):
    model, layout = LAYOUTS[name]
    check_layout(ranks, layout, model, world_size=2)
