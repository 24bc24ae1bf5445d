"""MXFP8 on a CUDA device: the casts of the reference, and GEMMs that multiply the same numbers."""

from __future__ import annotations

import pytest
import torch

from petatron.kernels.fp8 import mxfp8
from petatron.kernels.fp8.cast_and_gemm import E4M3, E5M2
from petatron.kernels.registry import KernelContext, choose_kernel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE = torch.device("cuda", 0)


def draw(*shape: int, seed: int) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (x * torch.logspace(-9, 9, shape[-1])).to(torch.bfloat16)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_casts_have_the_bits_of_a_cpu(dtype: torch.dtype):
    x = draw(256, 384, seed=0)
    ours, theirs = mxfp8.cast_block_1x32(x.to(DEVICE), dtype), mxfp8.cast_block_1x32(x, dtype)
    for mine, wanted in ((ours.rows, theirs.rows), (ours.columns, theirs.columns)):
        assert torch.equal(mine.values.cpu().view(torch.uint8), wanted.values.view(torch.uint8))
        assert torch.equal(mine.scale.cpu().view(torch.uint8), wanted.scale.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gradients", [E4M3, E5M2])
def test_the_chosen_gemm_is_that_of_the_reference(dtype: torch.dtype, gradients: torch.dtype):
    """On Blackwell that of its tensor cores, below it in bfloat16."""
    choice = choose_kernel("MXFP8 casts and GEMMs", KernelContext.of(DEVICE, torch.bfloat16, allow_compile=False))
    assert choice.name == (
        "hardware" if torch.cuda.get_device_capability(DEVICE) >= (10, 0) else "emulation in bfloat16"
    )
    a = choice.functions.cast_block_1x32(draw(256, 384, seed=0).to(DEVICE), gradients).rows
    b = choice.functions.cast_block_1x32(draw(512, 384, seed=1).to(DEVICE), E4M3).rows
    found = choice.functions.gemm(a, b, dtype=dtype, fast=False)
    wanted = mxfp8.dequantize(a.values, a.scale).double() @ mxfp8.dequantize(b.values, b.scale).double().t()
    assert found.dtype == dtype
    error = (found.double() - wanted).norm() / wanted.norm()
    assert error < (2**-8 if dtype == torch.bfloat16 else 1e-5)
    out = torch.empty_like(found)
    assert choice.functions.gemm(a, b, dtype=dtype, fast=False, out=out) is out and torch.equal(out, found)


def test_grouped_gemms_are_those_of_the_reference():
    choice = choose_kernel("MXFP8 casts and GEMMs", KernelContext.of(DEVICE, torch.bfloat16, allow_compile=False))
    x, w = draw(128, 64, seed=0).to(DEVICE), draw(3, 96, 64, seed=1).to(DEVICE)
    counts = torch.tensor([40, 0, 88], device=DEVICE)
    rows, matrices = mxfp8.cast_rowwise_operand(x, E4M3), mxfp8.cast_matrices(w, E4M3).rows
    options = {"dtype": torch.bfloat16, "fast": True}
    found = choice.functions.grouped_gemm(rows.values, rows.scale, matrices, counts, **options)
    wanted = mxfp8.emulated_grouped_gemm(rows.values, rows.scale, matrices, counts, **options)
    assert (found.double() - wanted.double()).norm() / wanted.double().norm() < 2**-7
