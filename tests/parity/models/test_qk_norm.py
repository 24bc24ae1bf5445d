"""Heads that are normalized and rotated by one kernel train as on one process, over every way to split heads and tokens."""

import pytest

from tests.dist import RankPool
from tests.longform import diagonal
from tests.parity.harness import check_layout

MODEL = "--qk-layernorm --num-query-groups 2"
PARTLY = f"{MODEL} --rotary-percent 0.5 --apply-layernorm-1p --reset-position-ids"
CASES = {
    "heads": (MODEL, "--tp 2"),
    "heads and sequence": (PARTLY, "--tp 2 --sequence-parallel"),
    "tokens": (MODEL, "--cp 2 --cp-comm-type p2p"),
    "attention again": (
        PARTLY,
        "--tp 2 --sequence-parallel --recompute-granularity selective --recompute-modules attention",
    ),
    "core attention again": (MODEL, "--dp 2 --recompute-granularity selective --recompute-modules core_attn"),
    "weights": (MODEL, "--dp 2 --data-parallel-sharding-strategy optim_grads_params"),
}


@diagonal(3)
@pytest.mark.parametrize("case", CASES)
def test_layout(ranks: RankPool, case: str):
    model, layout = CASES[case]
    check_layout(ranks, layout, model, world_size=2)
