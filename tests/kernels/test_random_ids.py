"""Ids drawn by uniform numbers, by both implementations: sizes, temperatures, ids that are left out, strides, batches."""

from __future__ import annotations

import pytest
import torch

from petatron.kernels import random_ids as plain

pytest.importorskip("triton")
from petatron.kernels.triton import random_ids as fast

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32] if DEVICE == "cpu" else [torch.float32, torch.bfloat16, torch.float64]


def case(size: int, dtype: torch.dtype, rows: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    logits = (3 * torch.randn(rows, size, generator=generator)).to(DEVICE, dtype)
    logits[1, : size // 2] = -torch.inf
    logits[2, 1:] = -torch.inf
    logits[3, :-1] = -torch.inf
    uniform = torch.rand(rows, generator=generator, dtype=torch.float64)
    uniform[4:6] = torch.tensor([0.0, 1 - 2**-53])
    temperatures = 0.5 + torch.rand(rows, generator=generator)
    return logits, temperatures.to(DEVICE), uniform.to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [5, 4096, 9001])
def test_is_the_id_whose_share_the_number_is_in(size: int, dtype: torch.dtype):
    logits, temperatures, uniform = case(size, dtype)
    shares = (logits.double() / temperatures.double().unsqueeze(1)).softmax(dim=1)
    ends = shares.cumsum(dim=1)
    for implementation in (fast, plain):
        drawn = implementation.draw_ids(logits, temperatures, uniform).unsqueeze(1)
        assert bool((shares.gather(1, drawn) > 0).all())
        end, begin = ends.gather(1, drawn).squeeze(1), (ends - shares).gather(1, drawn).squeeze(1)
        assert bool(((begin <= uniform + 1e-6) & (uniform <= end + 1e-6)).all())
        transposed = logits.t().contiguous().t()
        assert torch.equal(implementation.draw_ids(transposed, temperatures, uniform), drawn.squeeze(1))
    assert drawn[2:4].flatten().tolist() == [0, size - 1]


@pytest.mark.parametrize("implementation", [fast, plain], ids=["triton", "reference"])
def test_a_draw_depends_on_its_row_alone(implementation: plain.RandomIdKernels):
    logits, temperatures, uniform = case(9001, torch.float32)
    whole = implementation.draw_ids(logits, temperatures, uniform)
    for row in range(logits.shape[0]):
        part = slice(row, row + 1)
        assert torch.equal(implementation.draw_ids(logits[part], temperatures[part], uniform[part]), whole[part])


def test_frequencies_are_the_probabilities():
    logits = torch.tensor([[0.0, 2.0, -torch.inf, 1.0]], device=DEVICE).expand(500, 4).contiguous()
    uniform = (torch.arange(500, dtype=torch.float64, device=DEVICE) + 0.5) / 500
    temperatures = torch.full((500,), 2.0, device=DEVICE)
    expected = (logits[0] / 2.0).softmax(dim=0)
    for implementation in (fast, plain):
        counts = implementation.draw_ids(logits, temperatures, uniform).bincount(minlength=4)
        assert (counts / 500 - expected).abs().max() < 5e-3
