"""Weights to FP8 and back on a CUDA device: bit for bit as the reference does it, without waiting for the device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from petatron.kernels.fp8 import cast_and_gemm
from petatron.kernels.fp8.cast_and_gemm import BLOCK, E4M3, power_of_two_scale
from petatron.kernels.fp8.param_gather import REFERENCE, SCALE_RUN_ELEMENTS
from tests.kernels.gemm.test_param_gather import assert_same_operands, draw, gathered, same

CAPABLE = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CAPABLE, reason="needs a CUDA device of capability 9.0")]

CASES = [((48, 144), False), ((4096, 1040), False), ((256, 384), True), ((4096, 1024), True)]


@pytest.fixture
def kernels() -> Any:
    return pytest.importorskip("petatron.kernels.triton.fp8.param_gather").TRITON


@pytest.mark.parametrize("top", [225.0, 1e-20, 2.0**127 * 1.99])
@pytest.mark.parametrize(("shape", "squares"), CASES)
def test_as_the_reference(kernels: Any, shape: tuple[int, int], squares: bool, top: float):
    w = draw(shape, seed=1, spread=30.0, top=top, dtype=torch.bfloat16).cuda()
    cuts = [SCALE_RUN_ELEMENTS * 7, SCALE_RUN_ELEMENTS * 80]
    ours, wanted = (gathered(w, squares=squares, cuts=cuts, kernels=way) for way in (kernels, REFERENCE))
    assert torch.equal(ours.view(torch.int16), wanted.view(torch.int16))
    cast = cast_and_gemm.cast_block_128x128 if squares else cast_and_gemm.cast_tensor
    assert_same_operands(cast(ours, E4M3), cast(w, E4M3))


@pytest.mark.parametrize(("shape", "squares"), CASES)
def test_what_is_not_finite(kernels: Any, shape: tuple[int, int], squares: bool):
    w = draw(shape, seed=2, spread=4.0, top=100.0, dtype=torch.bfloat16).cuda()
    w[3, 3], w[-1, -1] = math.inf, math.nan
    ours, wanted = (
        gathered(w, squares=squares, cuts=[SCALE_RUN_ELEMENTS * 9], kernels=way) for way in (kernels, REFERENCE)
    )
    assert same(ours, wanted) and int(ours.isnan().sum()) == 2


@pytest.mark.parametrize("squares", [False, True])
def test_parts_that_lie_apart_without_waiting(kernels: Any, squares: bool):
    """As fully sharded weights come: a rank's part after the other, with other weights between."""
    shape, ranks = (1280, 512), 8
    length, columns = shape[0] * shape[1] // ranks, shape[1] if squares else None
    w = draw(shape, seed=3, spread=8.0, top=3.0, dtype=torch.bfloat16).cuda()
    messages = torch.zeros(ranks, length + 64, dtype=torch.uint8, device="cuda")
    out = torch.zeros(ranks, length + 32, dtype=torch.bfloat16, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        amax = torch.zeros(w.numel() // BLOCK**2 if squares else 1, device="cuda")
        for rank, part in enumerate(w.view(ranks, -1)):
            kernels.update_shard_amax(part, amax, begin=rank * length, columns=columns)
        scale = power_of_two_scale(amax, E4M3)
        for rank, part in enumerate(w.view(ranks, -1)):
            out_N = messages[rank, 16 : 16 + length].view(E4M3)
            kernels.quantize_shard(part, scale, out_N, begin=rank * length, columns=columns)
        kernels.dequantize_shards(messages[:, 16 : 16 + length].view(E4M3), scale, out[:, 32:], columns=columns)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out[:, 32:].reshape(shape), gathered(w, squares=squares, cuts=[]))
    assert not out[:, :32].any() and not messages[:, :16].any() and not messages[:, 16 + length :].any()
