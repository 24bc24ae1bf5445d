"""FP8 over NCCL: weights gathered in FP8 give what bf16 weights give, and the head's FP8 gradients those of one process."""

from __future__ import annotations

import pytest

from petatron.verify.proof_matrix import parse_entry
from tests.dist import RankPool
from tests.nccl.layouts import assert_close, train, wide_flags, wide_reference, wide_run


@pytest.mark.parametrize("name", ["dense:dp2-zero1", "dense:dp2-fsdp", "dense:tp2-sp.dp2-zero1"])
def test_fp8_parameter_gather_changes_no_loss(gpu_ranks: RankPool, name: str):
    case = parse_entry(name)
    model = f"{wide_flags(case.model_flags)} --fp8-format hybrid --fp8-recipe tensorwise"
    layouts = (case.flags, f"{case.flags} --fp8-param-gather")
    runs = [wide_run(model, layout, world_size=case.world_size) for layout in layouts]
    for (plain, gathered), _ in gpu_ranks.run(train, case.world_size, runs, timeout_s=120):
        assert gathered[0].loss == pytest.approx(plain[0].loss, rel=1e-6)
        # Kernels of the backward pass add up in no fixed order, so the second step is no longer the same to the bit.
        assert gathered[1].loss == pytest.approx(plain[1].loss, rel=2e-4)


@pytest.mark.parametrize("name", ["dense:tp2-sp", "dense:tp2-sp.dp2-zero1", "dense:tp2-sp.pp2"])
def test_fp8_gradients_of_the_output_head_are_those_of_one_process(gpu_ranks: RankPool, name: str):
    case = parse_entry(name)
    model = f"{wide_flags(case.model_flags)} --vocab-size 1024 --fp8-format hybrid --fp8-recipe tensorwise --fp8-output-head-backward"
    wanted = wide_reference(gpu_ranks, model)
    run = wide_run(model, case.flags, world_size=case.world_size)
    for (steps,), _ in gpu_ranks.run(train, case.world_size, [run], timeout_s=120):
        assert_close(steps, wanted)
