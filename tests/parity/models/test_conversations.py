"""Conversations train the same in every layout: packed rows, masks of what is learned, and weights of answers."""

from __future__ import annotations

import pytest

from tests.dist import RankPool
from tests.longform import later, over_nccl
from tests.parity.harness import check_layout, check_part_of_model

PACKED = "--dataset-type conversations"
SINGLE = f"{PACKED} --dataset-settings packed=false"
EXPERTS = f"{PACKED} --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --moe-aux-loss-coeff 0"
CASES = [
    over_nccl("--tp 2 --sequence-parallel", PACKED, 2),
    over_nccl("--pp 2", PACKED, 2),
    later("--dp 2 --use-distributed-optimizer", PACKED, 2, nccl=True),
    later("--dp 2 --data-parallel-sharding-strategy optim_grads_params", PACKED, 2, nccl=True),
    over_nccl("--cp 2 --dp 2 --use-distributed-optimizer", PACKED, 4),
    later("--cp 2", PACKED, 2, nccl=True),
    later("--cp 2", SINGLE, 2),
    later("--dp 2 --ep 2", EXPERTS, 2, nccl=True),
    ("--dp 2 --data-parallel-sharding-strategy optim_grads_params", SINGLE, 2),
    later("--tp 2 --sequence-parallel --pp 2", SINGLE, 4),
]


@pytest.mark.parametrize(("layout", "model", "world_size"), CASES)
def test_every_layout_trains_the_same(ranks: RankPool, layout: str, model: str, world_size: int):
    check_layout(ranks, layout, model, world_size=world_size)


def test_packing_is_trained():
    check_part_of_model(PACKED, SINGLE)
