"""The plain update: the formula against torch's optimizer, torch's kernel against the formula, and rounding at random."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from petatron.kernels.optimizer import adam
from petatron.kernels.optimizer.adam import AdamKernel, AdamRates, AdamState, adam_scalars, adamw, adamw_fused

RATES = AdamRates(lr=2e-3, weight_decay=0.1, beta1=0.9, beta2=0.999, eps=1e-8)


def scalars(step: int, dtype: torch.dtype, *, factor: float = 1.0, skipped: float = 0.0) -> Tensor:
    count, skip = torch.tensor(float(step)), torch.tensor(skipped)
    return adam_scalars(count, torch.tensor(factor, dtype=dtype), skip, beta1=RATES.beta1, beta2=RATES.beta2)


def zero_state(master: Tensor, moments: torch.dtype | None = None, weight: torch.dtype | None = None) -> AdamState:
    zeros = torch.zeros_like(master, dtype=moments or master.dtype)
    copy = None if weight is None else master.to(weight)
    return AdamState(master.clone(), zeros, zeros.clone(), copy)


@pytest.mark.parametrize("kernel", [adamw, adamw_fused])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_equals_torch(monkeypatch: pytest.MonkeyPatch, kernel: AdamKernel, dtype: torch.dtype, tolerance: float):
    monkeypatch.setattr(adam, "_CHUNK", 64)
    master = torch.randn(150, dtype=dtype)
    theirs = nn.Parameter(master.clone())
    optimizer = torch.optim.AdamW([theirs], lr=RATES.lr, weight_decay=RATES.weight_decay, foreach=False)
    ours = zero_state(master, weight=torch.bfloat16)
    for step in range(1, 6):
        grad = torch.randn(150, dtype=dtype)
        theirs.grad = grad * 0.25
        optimizer.step()
        before = grad.clone()
        kernel(grad, ours, scalars(step, dtype, factor=0.25), rates=RATES)
        assert torch.equal(grad, before)
    torch.testing.assert_close(ours.master, theirs.detach(), rtol=tolerance, atol=tolerance)
    assert ours.weight is not None and torch.equal(ours.weight, ours.master.bfloat16())


@pytest.mark.parametrize("moments", [None, torch.bfloat16])
@pytest.mark.parametrize("kernel", [adamw, adamw_fused])
def test_a_skipped_update_leaves_no_trace(kernel: AdamKernel, moments: torch.dtype | None):
    state = zero_state(torch.randn(20), moments, torch.bfloat16)
    kernel(torch.randn(20), state, scalars(1, torch.float32), rates=RATES)
    before = [tensor.clone() for tensor in (state.master, state.exp_avg, state.exp_avg_sq, state.weight)]
    bad = torch.full((20,), float("nan"))
    kernel(bad, state, scalars(0, torch.float32, factor=float("nan"), skipped=1.0), rates=RATES)
    after = (state.master, state.exp_avg, state.exp_avg_sq, state.weight)
    assert all(torch.equal(a, b) for a, b in zip(before, after))


def test_corrections_have_all_their_digits():
    found = scalars(1, torch.float32)
    torch.testing.assert_close(found[2].double(), torch.tensor(10.0, dtype=torch.float64), rtol=1e-7, atol=0)
    torch.testing.assert_close(found[3].double(), torch.tensor(1e3**0.5, dtype=torch.float64), rtol=1e-7, atol=0)


def test_bfloat16_moments_follow_the_wide_ones():
    """On average: a thousand updates that each move the second moment by less than half a unit of its last bit."""
    wide, narrow = (
        AdamState(torch.ones(4000), torch.ones(4000, dtype=dtype), torch.ones(4000, dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16)
    )
    nearest = torch.ones(4000, dtype=torch.bfloat16)
    for step in range(1, 1001):
        grad = torch.full((4000,), 0.1)
        for state in (wide, narrow):
            adamw(grad, state, scalars(step, torch.float32), rates=RATES)
        nearest = (nearest.float() + 1e-3 * (0.01 - nearest.float())).bfloat16()
    assert nearest.eq(1.0).all(), "this test needs updates that rounding to nearest loses"
    torch.testing.assert_close(narrow.exp_avg_sq.float().mean(), wide.exp_avg_sq.mean(), rtol=0.005, atol=0)
    torch.testing.assert_close(narrow.exp_avg.float().mean(), wide.exp_avg.mean(), rtol=0.005, atol=0)
    assert narrow.exp_avg_sq.float().std() > 0.001


def test_rounding_is_up_or_down_by_the_distance_and_repeats():
    value = torch.full((20_000,), 1.0 + 0.3 * 2**-7)
    low, high = adam._rounding_bits(20_000, 5, torch.tensor(9.0))
    for noise in (low, high):
        rounded = adam._stochastic_round(value, torch.bfloat16, noise).float()
        assert set(rounded.unique().tolist()) == {1.0, 1.0 + 2**-7}
        assert float((rounded > 1.0).float().mean()) == pytest.approx(0.3, abs=0.02)
        assert torch.equal(adam._stochastic_round(-value, torch.bfloat16, noise).float(), -rounded)
    assert abs(float(torch.corrcoef(torch.stack((low, high)).float())[0, 1])) < 0.05
    again, _ = adam._rounding_bits(10, 5 + 100, torch.tensor(9.0))
    assert torch.equal(again, low[100:110])
    exact = torch.tensor([0.0, -2.5, 1e-30])
    assert torch.equal(adam._stochastic_round(exact.bfloat16().float(), torch.bfloat16, low[:3]), exact.bfloat16())


def test_sum_of_squares():
    views = [torch.randn(100), torch.randn(7).bfloat16()[:3].float(), torch.zeros(0)]
    expected = sum(view.double().square().sum() for view in views)
    torch.testing.assert_close(adam.sum_of_squares(views).double(), expected, rtol=1e-6, atol=0)
    assert adam.sum_of_squares([torch.ones(4).bfloat16()]).dtype == torch.float32
    many = [torch.tensor([4096.0]), *torch.ones(1000, 1)]
    assert float(adam.sum_of_squares(many)) == 2**24 + 1000, "in float32 a small one would vanish beside the large one"
    large = torch.randn(3_000_000, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        adam.sum_of_squares([large]).double(), large.double().square().sum(), rtol=2e-6, atol=0
    )  # torch's norm of the whole is 1e-4 too small
