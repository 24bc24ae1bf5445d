"""Triton's sums of rows against a sum in float64: shapes, strides, dtypes, overwritten or added, the same bits every time."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from petatron.kernels.triton.row_sums import sum_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (70, 300), (513, 16), (0, 8)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sums(rows: int, width: int, dtype: torch.dtype):
    wide = torch.randn(rows, width + 8, device=DEVICE).to(dtype)
    for x in (wide[:, :width], wide.t().contiguous().t()[:, :width]):
        for out_dtype in (torch.float32, torch.bfloat16):
            for accumulate in (False, True):
                out = torch.randn(width, device=DEVICE).to(out_dtype)
                again, exact = out.clone(), x.double().sum(0) + (out.double() if accumulate else 0.0)
                sum_rows(x, out, accumulate)
                bound = 1e-2 if out_dtype is torch.bfloat16 else 1e-4
                torch.testing.assert_close(out.double(), exact, rtol=bound, atol=bound)
                sum_rows(x, again, accumulate)
                assert torch.equal(out, again)
