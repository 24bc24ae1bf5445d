"""GEMMs of few rows against their definition: widths, rows, splits, FP8 weights; and that the counters are left at zero."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from petatron.kernels import few_rows_gemm as plain
from petatron.kernels.fp8.cast_and_gemm import E4M3, cast_rowwise_operand, dequantize

pytest.importorskip("triton")
from petatron.kernels.triton import few_rows_gemm as fast

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32] if DEVICE == "cpu" else [torch.float32, torch.bfloat16, torch.float16]
"""The interpreter multiplies the bits of half-precision numbers, not the numbers."""
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}


def operands(rows: int, outputs: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows + outputs)
    x, weight = torch.randn(rows, length), 0.05 * torch.randn(outputs, length)
    weight[0] *= 1000
    weight[1] = 0
    weight[2, ::3] *= 2**-9  # some are subnormal in FP8
    counters = torch.zeros(64, dtype=torch.int32)
    return x.to(DEVICE, dtype), weight.to(DEVICE, dtype), counters.to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("rows", "outputs", "length"),
    [(1, 64, 512), (3, 100, 256), (17, 130, 128), (64, 70, 128), (70, 64, 256), (200, 64, 128)],
)
def test_equals_the_definition(rows: int, outputs: int, length: int, fp8: bool, dtype: torch.dtype):
    x, weight, counters = operands(rows, outputs, length, dtype)
    operand = cast_rowwise_operand(weight, E4M3) if fp8 else None
    rounded = weight if operand is None else dequantize(operand)
    true = x.double() @ rounded.double().t()
    for implementation in (fast, plain):
        used = weight if operand is None else implementation.pack_fp8(operand, dtype)
        found = implementation.few_rows_gemm(x, used, counters)
        assert found.dtype == dtype and found.shape == (rows, outputs)
        assert float((found.double() - true).norm() / true.norm()) < BOUNDS[dtype]
        sizes = x.double().norm() * rounded.double().norm(dim=1)
        columns = (found.double() - true).norm(dim=0) / sizes.clamp(min=1e-9)
        assert float(columns.max()) < BOUNDS[dtype], "of the large and of the small rows of the weight"
    assert not counters.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_packed_weight_is_dequantized_exactly(dtype: torch.dtype):
    _, weight, _ = operands(1, 70, 256, dtype)
    operand = cast_rowwise_operand(weight, E4M3)
    true = dequantize(operand).to(dtype)
    packed = fast.pack_fp8(operand, dtype)
    assert packed.permuted == (DEVICE == "cuda" and dtype == torch.bfloat16)
    assert torch.equal(fast.dequantize_weight(packed, dtype), true)
    assert torch.equal(plain.dequantize_weight(packed, dtype), true)


def test_the_permuted_order_is_undone():
    _, weight, _ = operands(1, 70, 256, torch.float32)
    operand = cast_rowwise_operand(weight, E4M3)
    words = operand.values.view(torch.uint8).unflatten(1, (-1, 4))[:, :, list(plain.PERMUTED_ORDER)]
    packed = plain.Fp8Weight(words.flatten(1).view(E4M3), operand.scale, permuted=True)
    assert torch.equal(plain.dequantize_weight(packed, torch.float32), dequantize(operand))


def test_strided_rows():
    x, weight, counters = operands(4, 64, 256, torch.float32)
    wide = torch.randn(4, 300, device=DEVICE)
    wide[:, :256] = x
    assert torch.equal(fast.few_rows_gemm(wide[:, :256], weight, counters), fast.few_rows_gemm(x, weight, counters))


@pytest.mark.parametrize(
    ("rows", "length", "strided"), [(65, 128, False), (2, 100, False), (2, 128, True)], ids=["rows", "length", "stride"]
)
def test_what_it_cannot_do_the_reference_does(monkeypatch: pytest.MonkeyPatch, rows: int, length: int, strided: bool):
    x, weight, counters = operands(rows, 64, length, torch.float32)
    if strided:
        x = x.t().contiguous().t()
    monkeypatch.setattr(fast, "_few_rows_gemm", None)
    assert torch.equal(fast.few_rows_gemm(x, weight, counters), plain.many_rows_gemm(x, weight))
