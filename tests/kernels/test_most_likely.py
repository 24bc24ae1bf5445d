"""The most likely id of rows of logits, by both implementations: sizes, ties, strides, rows without a finite logit."""

from __future__ import annotations

import pytest
import torch

from petatron.kernels import logits_argmax as plain

pytest.importorskip("triton")
from petatron.kernels.triton import logits_argmax as fast

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32] if DEVICE == "cpu" else [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [5, 4096, 9001])
def test_is_the_first_of_the_largest(size: int, dtype: torch.dtype):
    torch.manual_seed(size)
    logits = torch.randn(6, size).to(DEVICE, dtype)
    logits[1] = 7.0  # all the same
    logits[2, [3, size - 1]] = 50.0
    logits[3, size - 1] = 50.0
    logits[4] = -torch.inf
    logits[5, :-1] = -torch.inf
    wanted = [int(row.argmax()) for row in logits.cpu().double()]
    assert wanted[1:] == [0, 3, size - 1, 0, size - 1]
    for implementation in (fast, plain):
        assert implementation.most_likely(logits).tolist() == wanted
        assert implementation.most_likely(logits.t().contiguous().t()).tolist() == wanted


def test_a_row_of_nothing_but_nan_names_an_id_of_the_vocabulary():
    logits = torch.full((1, 5000), torch.nan, device=DEVICE)
    for implementation in (fast, plain):
        assert 0 <= int(implementation.most_likely(logits)) < 5000
