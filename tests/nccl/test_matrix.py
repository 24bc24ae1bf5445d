"""Every layout of the proof matrix over NCCL: every tensor of a small model in float64, and multi-megabyte messages in bf16."""

from __future__ import annotations

import dataclasses

import pytest

from petatron.verify.compare_traces import compare_traces
from petatron.verify.proof_matrix import MATRIX, MATRIX_TOLERANCES, MatrixEntry
from tests.dist import RankPool
from tests.nccl.conftest import RANKS
from tests.nccl.layouts import assert_close, small_reference, small_run, train, wide_flags, wide_reference, wide_run

ENTRIES = [entry for entry in MATRIX if entry.world_size <= RANKS]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_layout_over_nccl_equals_one_process(gpu_ranks: RankPool, entry: MatrixEntry):
    model = wide_flags(entry.model_flags)
    runs = [small_run(entry, alone=False), wide_run(model, entry.flags, world_size=entry.world_size)]
    wanted = wide_reference(gpu_ranks, model)
    answers = gpu_ranks.run(train, entry.world_size, runs, timeout_s=60)
    small, wide = ([traces[index] for traces, _ in answers] for index in (0, 1))
    reference = small_reference(dataclasses.replace(entry, name=entry.model, flags="", world_size=1))
    verdict = compare_traces([reference], small, MATRIX_TOLERANCES["float64"])
    assert verdict.agrees, verdict.first_departure
    for steps in wide:
        assert_close(steps, wanted)
