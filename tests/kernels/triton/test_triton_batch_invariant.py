"""Batch-invariant kernels in Triton beside their references; and the bits of a row, whatever it is computed with."""

from __future__ import annotations

import pytest
import torch

from petatron.kernels.batch_invariant import attention as reference_attention
from petatron.kernels.batch_invariant import cross_entropy as reference_entropy
from petatron.kernels.batch_invariant import gemm as reference_gemm
from petatron.kernels.batch_invariant.attention import AttentionPlan, QuerySegment
from petatron.kernels.triton.batch_invariant import attention, cross_entropy, gemm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter multiplies no bfloat16
BOUNDS = {torch.float32: 1e-5, HALF: 2e-2}


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("inner", "outputs"), [(64, 128), (50, 70)])
def test_gemm(inner: int, outputs: int, dtype: torch.dtype):
    x, weight, bias = draw(70, inner, dtype=dtype), draw(outputs, inner, dtype=dtype), draw(outputs, dtype=dtype)
    y = gemm.matmul_rows(x, weight, bias)
    expected = reference_gemm.matmul_rows(x, weight, bias)
    torch.testing.assert_close(y, expected, rtol=BOUNDS[dtype], atol=BOUNDS[dtype] * 4)
    for rows in ([69], [3, 40, 1]):
        assert torch.equal(gemm.matmul_rows(x[rows], weight, bias), y[rows])


def test_grouped_gemm():
    x, weight, counts = draw(45, 40), draw(5, 36, 40), torch.tensor([3, 0, 34, 1, 5], device=DEVICE)
    y = gemm.grouped_matmul_rows(x, weight, counts)
    torch.testing.assert_close(y[:43], reference_gemm.grouped_matmul_rows(x, weight, counts)[:43], rtol=1e-5, atol=1e-5)
    single = gemm.grouped_matmul_rows(x[36:37], weight, torch.tensor([0, 0, 1, 0, 0], device=DEVICE))
    assert torch.equal(single[0], y[36])
    equal = gemm.grouped_matmul_rows(x, weight, 9)
    torch.testing.assert_close(equal, reference_gemm.grouped_matmul_rows(x, weight, 9), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("columns", [50, 2100])
def test_statistics(columns: int):
    logits, targets = draw(5, columns + 6) * 3, torch.tensor([0, 7, columns - 1, -1, columns], device=DEVICE)
    values = cross_entropy.statistics(logits, targets, columns)
    torch.testing.assert_close(values, reference_entropy.statistics(logits, targets, columns), rtol=1e-5, atol=1e-5)
    rows = logits[2:4, :columns].contiguous()
    assert torch.equal(cross_entropy.statistics(rows, targets[2:4], columns), values[:, 2:4])


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("heads", "groups", "width", "value_width"), [(6, 2, 16, 16), (2, 2, 24, 20)])
def test_attention(heads: int, groups: int, width: int, value_width: int, window: int | None):
    lengths = [70, 1, 45]
    total = sum(lengths)
    q, k, v = draw(total, heads, width), draw(total, groups, width), draw(total, groups, value_width)
    starts = [0, 70, 71]
    segments = [QuerySegment(at, length, 0, at) for at, length in zip(starts, lengths)]
    plan = AttentionPlan(torch.arange(total, dtype=torch.int32, device=DEVICE), segments)
    out = attention.attend(q, k, v, plan, window=window)
    expected = reference_attention.attend(q, k, v, plan, window=window)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    # The same keys in another order of rows, and tokens one by one or in chunks.
    place = torch.randperm(total, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    stored_k, stored_v = torch.empty_like(k), torch.empty_like(v)
    stored_k[place], stored_v[place] = k, v
    chunks = [QuerySegment(0, 1, 69, 0), QuerySegment(1, 1, 44, 71), QuerySegment(2, 9, 5, 71)]
    rows = [69, 115, *range(76, 85)]
    again = attention.attend(q[rows], stored_k, stored_v, AttentionPlan(place.to(torch.int32), chunks), window=window)
    assert torch.equal(again, out[rows])
