"""The Triton update and sum of squares against the plain ones, and both against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from petatron.kernels.optimizer import adam as plain
from petatron.kernels.optimizer.adam import AdamRates, AdamState, adam_scalars

pytest.importorskip("triton")
from petatron.kernels.triton.optimizer import adam as fast

RATES = AdamRates(lr=3e-3, weight_decay=0.1, beta1=0.9, beta2=0.999, eps=1e-8)
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def scalars(*, step: float = 3.0, factor: float = 0.37, skipped: float = 0.0, device: str = "cpu") -> Tensor:
    values = (torch.tensor(value, device=device) for value in (step, factor, skipped))
    return adam_scalars(*values, beta1=RATES.beta1, beta2=RATES.beta2)


def random_state(length: int, moments: torch.dtype, *, weight: bool, seed: int) -> tuple[Tensor, AdamState]:
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(length, generator=generator)

    state = AdamState(
        normal(),
        (0.1 * normal()).to(moments),
        (0.01 * normal().square()).to(moments),
        torch.full((length,), float("nan"), dtype=torch.bfloat16) if weight else None,
    )
    return normal(), state


def tensors(state: AdamState) -> dict[str, Tensor]:
    found = {name: getattr(state, name) for name in ("master", "exp_avg", "exp_avg_sq", "weight")}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def copied(state: AdamState) -> AdamState:
    return AdamState(**{name: tensor.clone() for name, tensor in tensors(state).items()})


@pytest.mark.parametrize("length", [1, 16, 1024, 2050])
@pytest.mark.parametrize("moments", FORMATS)
@pytest.mark.parametrize("grads", FORMATS)
def test_equals_the_plain_update(length: int, moments: str, grads: str):
    seed = int(torch.randint(1 << 30, ()))
    grad, ours = random_state(length, FORMATS[moments], weight=True, seed=seed)
    grad, theirs = grad.to(FORMATS[grads]), copied(ours)
    fast.adamw(grad, ours, scalars(), rates=RATES, start=64)
    plain.adamw(grad, theirs, scalars(), rates=RATES, start=64)
    for name, expected in tensors(theirs).items():
        # The interpreter rounds to bfloat16 by cutting off; a device rounds to nearest.
        tolerance = 2**-7 if name == "weight" else 1e-6
        torch.testing.assert_close(
            tensors(ours)[name], expected, rtol=tolerance, atol=tolerance, msg=f"{name} ({seed})"
        )


def test_float32_weights_are_their_own_masters():
    grad, ours = random_state(100, torch.float32, weight=False, seed=5)
    theirs = copied(ours)
    fast.adamw(grad, ours, scalars(), rates=RATES)
    plain.adamw(grad, theirs, scalars(), rates=RATES)
    torch.testing.assert_close(ours.master, theirs.master, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("moments", FORMATS)
def test_a_skipped_update_leaves_no_trace(moments: str):
    grad, state = random_state(1040, FORMATS[moments], weight=True, seed=6)
    grad[7] = float("nan")
    before = copied(state)
    fast.adamw(grad, state, scalars(step=0.0, factor=float("nan"), skipped=1.0), rates=RATES)
    for name, tensor in tensors(state).items():
        assert torch.equal(tensor.nan_to_num(), tensors(before)[name].nan_to_num()), name


def test_elements_outside_are_left_alone():
    grad, state = random_state(64, torch.float32, weight=True, seed=7)
    before = copied(state)
    fast.adamw(grad[16:43], state.slice_range(16, 43), scalars(), rates=RATES)
    for name, tensor in tensors(state).items():
        changed = tensor.nan_to_num() != tensors(before)[name].nan_to_num()
        assert changed.nonzero().flatten().tolist() == list(range(16, 43)), name


def test_rounding_depends_on_place_and_step_alone():
    grad, state = random_state(96, torch.bfloat16, weight=False, seed=8)
    whole, parts, later = copied(state), copied(state), copied(state)
    fast.adamw(grad, whole, scalars(), rates=RATES)
    for begin, end in ((0, 48), (48, 96)):
        fast.adamw(grad[begin:end], parts.slice_range(begin, end), scalars(), rates=RATES, start=begin)
    assert torch.equal(whole.exp_avg, parts.exp_avg) and torch.equal(whole.exp_avg_sq, parts.exp_avg_sq)
    fast.adamw(grad, later, scalars(step=4.0), rates=RATES)
    assert not torch.equal(whole.exp_avg, later.exp_avg)


@pytest.mark.parametrize("dtype", FORMATS.values())
def test_sum_of_squares(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype):
    monkeypatch.setattr(fast, "_SMALL", 1000)
    views = [torch.randn(length).to(dtype) for length in (9000, 3, 20_011, 0, 999)]
    expected = sum(view.double().square().sum() for view in views)
    torch.testing.assert_close(fast.sum_of_squares(views).double(), expected, rtol=1e-6, atol=0)
    assert torch.equal(fast.sum_of_squares(views), fast.sum_of_squares(views))
    assert fast.sum_of_squares([torch.full((2000,), float("inf"))]).isinf()
    assert fast.sum_of_squares([torch.full((2000,), float("nan"))]).isnan()
    assert float(fast.sum_of_squares([torch.ones(3)])) == 3.0
    assert float(fast.sum_of_squares([torch.tensor([4096.0]), *torch.ones(1000, 1)])) == 2**24 + 1000
