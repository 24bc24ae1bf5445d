"""The Triton gated activations against their plain twins in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from petatron.kernels import activation as plain

pytest.importorskip("triton")
from petatron.kernels.triton import activation
from tests.longform import diagonal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUNDS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 3e-3 if DEVICE == "cuda" else 6e-3}
"""Norm of the difference over the norm. The interpreter cuts bfloat16 off where a device rounds to the nearest."""
SHAPES = [(1, 1), (7, 5), (30, 100), (3, 512), (9, 768), (2, 2048), (2, 4096), (2, 2500), (0, 64)]
"""Rows and width: several tiles across and down, full and not, one where the columns divide the width, and nothing."""
CASES = [(shape, torch.bfloat16, "swiglu") for shape in SHAPES]
CASES += [((9, 768), dtype, name) for name in activation.NAMES for dtype in (torch.float32, torch.float16)]


def far(ours: Tensor, true: Tensor) -> float:
    assert ours.shape == true.shape
    return float((ours.double() - true.double()).norm() / true.double().norm().clamp(min=1e-30))


def sample(rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    gate_up = torch.randn(rows, 2 * width, device=DEVICE).mul_(2)
    return gate_up.to(dtype), torch.randn(rows, width, device=DEVICE).to(dtype)


def test_has_all():
    assert set(activation.NAMES) == set(plain.GATE_ACTIVATIONS)


@diagonal(3)
@pytest.mark.parametrize(("shape", "dtype", "name"), CASES, ids=str)
def test_equals_plain(shape: tuple[int, int], dtype: torch.dtype, name: str):
    gate_up, grad = sample(*shape, dtype)
    out = activation.gated_activation(gate_up, name)
    grad_gate_up, again = activation.gated_activation_backward(grad, gate_up, name, recompute_output=True)
    assert again is not None and torch.equal(again, out)
    assert out.dtype == grad_gate_up.dtype == dtype
    true, _ = plain.gated_activation_backward(grad.double(), gate_up.double(), name, recompute_output=False)
    assert far(out, plain.gated_activation(gate_up.double(), name)) <= BOUNDS[dtype]
    assert far(grad_gate_up, true) <= BOUNDS[dtype]


@diagonal(2)
@pytest.mark.parametrize("shape", [(7, 5), (30, 100), (9, 768), (2, 2500), (0, 64)], ids=str)
def test_amax_of_what_is_written(shape: tuple[int, int]):
    """To the bit, and without changing the rest; a larger one stays."""
    gate_up, grad = sample(*shape, torch.bfloat16)
    for first in (0.0, 1e9):
        amax, grad_amax = torch.full((2, 1), first, device=DEVICE)
        out = activation.gated_activation(gate_up, "swiglu", amax=amax)
        x_grad, _ = activation.gated_activation_backward(grad, gate_up, "swiglu", recompute_output=True, amax=grad_amax)
        assert torch.equal(out, activation.gated_activation(gate_up, "swiglu"))
        for found, tensor in ((amax, out), (grad_amax, x_grad)):
            assert float(found) == max([first, *tensor.abs().flatten().tolist()])


def test_amax_keeps_nan():
    gate_up, _ = sample(3, 300, torch.bfloat16)
    gate_up[1, 7] = float("nan")
    activation.gated_activation(gate_up, "swiglu", amax=(amax := torch.zeros(1, device=DEVICE)))
    assert amax.isnan().all()


@pytest.mark.parametrize("name", activation.NAMES)
def test_gradient_is_that_of_the_forward(name: str):
    """Independent of the plain backward: autograd in float64, element by element, far out too."""
    gate_up, grad = sample(4, 300, torch.float32)
    gate_up[0, :300] = torch.linspace(-60, 60, 300)
    wide = gate_up.double().requires_grad_()
    (true,) = torch.autograd.grad((plain.gated_activation(wide, name) * grad).sum(), wide)
    ours, again = activation.gated_activation_backward(grad, gate_up, name, recompute_output=False)
    assert again is None
    torch.testing.assert_close(ours.double(), true, rtol=2e-5, atol=2e-6)


def test_huge_gates_stay_finite():
    gate_up = torch.tensor([[-3e4, 3e4, -100.0, 100.0, 1.0, 1.0, 1.0, 1.0]], device=DEVICE)
    for name in activation.NAMES:
        grad_gate_up, out = activation.gated_activation_backward(
            torch.ones(1, 4, device=DEVICE), gate_up, name, recompute_output=True
        )
        assert out is not None and out.tolist() == [[0.0, 3e4, 0.0, 100.0]], name
        assert grad_gate_up.tolist() == [[0.0, 1.0, 0.0, 1.0, 0.0, 3e4, 0.0, 100.0]], name


@pytest.mark.parametrize("columns_apart", [False, True], ids=["rows apart", "columns apart"])
def test_strided_rows(columns_apart: bool):
    def strided(x: Tensor) -> Tensor:
        return x.t().contiguous().t() if columns_apart else torch.cat((x, x + 1), dim=1)[:, : x.shape[1]]

    gate_up, grad = sample(5, 40, torch.float32)
    assert torch.equal(
        activation.gated_activation(strided(gate_up), "swiglu"), activation.gated_activation(gate_up, "swiglu")
    )
    ours, _ = activation.gated_activation_backward(strided(grad), strided(gate_up), "swiglu", recompute_output=False)
    assert torch.equal(ours, activation.gated_activation_backward(grad, gate_up, "swiglu", recompute_output=False)[0])


def test_bounds_go_the_plain_way_and_other_names_are_refused():
    gate_up, grad = sample(1, 4, torch.float32)
    variant = plain.GluVariant(0.5, 1.0)
    assert torch.equal(
        activation.gated_activation(gate_up, "swiglu", variant), plain.gated_activation(gate_up, "swiglu", variant)
    )
    ours, wanted = (
        kind.gated_activation_backward(grad, gate_up, "swiglu", variant, recompute_output=True)
        for kind in (activation, plain)
    )
    assert all(torch.equal(mine, true) for mine, true in zip(ours, wanted, strict=True))
    with pytest.raises(AssertionError, match="silu"):
        activation.gated_activation(gate_up, "silu")
    with pytest.raises(AssertionError, match="silu"):
        activation.gated_activation_backward(grad, gate_up, "silu", recompute_output=False)
