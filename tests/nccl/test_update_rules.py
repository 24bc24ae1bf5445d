"""Optimizers over NCCL: matrices that meet in multi-megabyte messages, and reduced sums of rows and columns, give what one process gives.

Every tensor of Muon in float64 is compared by the `muon` entries of the proof matrix (`test_matrix.py`).
"""

from __future__ import annotations

import pytest

from petatron.verify.proof_matrix import parse_entry
from tests.dist import RankPool
from tests.nccl.layouts import assert_close, train, wide_flags, wide_reference, wide_run

RULES = {
    "muon": "--optimizer muon --muon-nesterov --muon-extra-scale-factor 0.2",
    "lion": "--optimizer lion",
    "adafactor": "--optimizer adafactor --adafactor-scale-parameter",
    "soap": "--optimizer soap --soap-precondition-frequency 2",
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("name", "buckets"),
    [
        ("dense:tp2", ""),
        ("dense:tp2-sp", ""),
        ("dense:dp2-zero1", ""),  # buckets of whole matrices
        ("dense:dp4-zero1", "--ddp-bucket-size 1"),  # one matrix each, whose shards meet on one rank
        ("dense:dp4-fsdp", ""),
        ("dense:tp2-sp.dp2-zero1", ""),
    ],
)
def test_a_layout_over_nccl_equals_one_process(gpu_ranks: RankPool, name: str, buckets: str, rule: str):
    case = parse_entry(name)
    model = f"{wide_flags(case.model_flags)} {RULES[rule]}"
    wanted = wide_reference(gpu_ranks, model)
    run = wide_run(model, f"{case.flags} {buckets}", world_size=case.world_size)
    for (steps,), _ in gpu_ranks.run(train, case.world_size, [run], timeout_s=120):
        assert_close(steps, wanted)
