"""Muon over NCCL: matrices that meet in multi-megabyte messages, iterated in bf16, give what one process gives.

Every tensor in float64 is compared by the `muon` entries of the proof matrix (`test_matrix.py`).
"""

from __future__ import annotations

import pytest

from petatron.verify.matrix import parse_entry
from petatron.verify.trace import StepTrace
from tests.dist import RankPool
from tests.nccl.layouts import train, wide_run
from tests.nccl.test_matrix import assert_close

MUON = "--bf16 --optimizer muon --muon-nesterov --muon-extra-scale-factor 0.2"
_REFERENCES: list[list[StepTrace]] = []


def reference(pool: RankPool) -> list[StepTrace]:
    """One process on the GPU, trained once for all layouts."""
    if not _REFERENCES:
        run = wide_run(parse_entry("dense:tp2"), "", MUON)
        _REFERENCES.append(pool.run(train, 1, [run], timeout_s=120)[0][0][0])
    return _REFERENCES[0]


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
def test_a_layout_over_nccl_equals_one_process(gpu_ranks: RankPool, name: str, buckets: str):
    case, wanted = parse_entry(name), reference(gpu_ranks)
    run = wide_run(case, case.flags, f"{MUON} {buckets}")
    for (steps,), _ in gpu_ranks.run(train, case.world_size, [run], timeout_s=120):
        assert_close(steps, wanted)
