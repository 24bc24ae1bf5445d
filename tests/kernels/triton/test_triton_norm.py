"""The Triton RMS norm against its plain twin in float64: every precision, width, and thing done in the same pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from petatron.kernels import norm as plain
from tests.longform import diagonal, later

pytest.importorskip("triton")
from petatron.kernels.triton import norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3 if DEVICE == "cuda" else 1e-2}
"""Norm of the difference over the norm; half precision rounds twice. The interpreter cuts bfloat16 off
where a device rounds to the nearest."""
SHAPES = [(1, 1), (5, 7), (300, 64), (3, 100), (17, 128), (2, 2048), (5, 3000), (3, 8200)]
"""Rows and width: tiles of many rows and of one, full and not, several for a program, and too wide to read one ahead."""
CASES = [(shape, torch.bfloat16) for shape in SHAPES] + [((17, 100), torch.float32), ((3, 2048), torch.float16)]
CASES += [((9, 3000), torch.float32)]


def far(ours: Tensor, true: Tensor) -> float:
    assert ours.shape == true.shape
    return float((ours.double() - true.double()).norm() / true.double().norm().clamp(min=1e-30))


def sample(shape: tuple[int, int], dtype: torch.dtype, count: int) -> tuple[list[Tensor], Tensor]:
    rows = [torch.randn(shape, device=DEVICE).mul_(1.5).to(dtype) for _ in range(count)]
    return rows, torch.randn(shape[1], device=DEVICE).to(dtype)


@diagonal(3)
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
@pytest.mark.parametrize(("with_branch", "zero_centered_gamma"), [(False, False), (True, False), (True, True)])
def test_forward(shape: tuple[int, int], dtype: torch.dtype, with_branch: bool, zero_centered_gamma: bool):
    (x, branch), weight = sample(shape, dtype, 2)
    options = {"eps": 1e-5, "zero_centered_gamma": zero_centered_gamma}
    total, normal, rstd = norm.rms_norm(x, weight, **options, branch=branch if with_branch else None)
    if with_branch:
        cut_off = dtype == torch.bfloat16 and DEVICE == "cpu"
        torch.testing.assert_close(total, x + branch, rtol=2**-7 if cut_off else 0.0, atol=0.0)
    else:
        assert total is x
    assert normal.dtype == dtype and rstd.dtype == torch.float32
    _, true, true_rstd = plain.rms_norm(total.double(), weight.double(), **options)
    assert far(normal, true) <= BOUNDS[dtype]
    assert far(rstd, true_rstd) <= 1e-6


@diagonal(4)
@pytest.mark.parametrize("shape", [(5, 7), (300, 64), (17, 128), (5, 3000)], ids=str)
@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_amax_of_what_is_written(shape: tuple[int, int], eps: float):
    """To the bit, and without changing the rest; a larger one stays. Rows beyond the last have no norm without an epsilon."""
    (x, branch, grad), weight = sample(shape, torch.bfloat16, 3)
    for first in (0.0, 1e9):
        amax, grad_amax = torch.full((2, 1), first, device=DEVICE)
        total, normal, rstd = norm.rms_norm(x, weight, eps=eps, zero_centered_gamma=False, branch=branch, amax=amax)
        x_grad, *_ = norm.rms_norm_backward(
            grad, total, rstd, weight, zero_centered_gamma=False, grad_residual=branch, amax=grad_amax
        )
        assert torch.equal(normal, norm.rms_norm(x, weight, eps=eps, zero_centered_gamma=False, branch=branch)[1])
        for found, tensor in ((amax, normal), (grad_amax, x_grad)):
            assert float(found) == max(first, float(tensor.abs().max()))


WAYS = [(False, False, False), (True, True, False), (False, True, True)]
"""A gradient of the total joins, the output is recomputed, weights are an offset from one."""


def backward_cases() -> list:
    """Every case in every way; wide rows, which take the interpreter seconds, in one of the ways by default, in turn."""
    return [
        (*case, *way) if case[0][1] < 2000 or number % len(WAYS) == place else later(*case, *way)
        for number, case in enumerate(CASES)
        for place, way in enumerate(WAYS)
    ]


@diagonal(4)
@pytest.mark.parametrize(("shape", "dtype", "joined", "again", "zero_centered_gamma"), backward_cases(), ids=str)
def test_backward(shape: tuple[int, int], dtype: torch.dtype, joined: bool, again: bool, zero_centered_gamma: bool):
    (x, grad, grad_residual), weight = sample(shape, dtype, 3)
    joining = grad_residual if joined else None
    _, normal, rstd = norm.rms_norm(x, weight, eps=1e-5, zero_centered_gamma=zero_centered_gamma)
    ours = norm.rms_norm_backward(
        grad, x, rstd, weight, zero_centered_gamma=zero_centered_gamma, grad_residual=joining, recompute_output=again
    )
    doubles = [tensor.double() for tensor in (grad, x, rstd, weight)]
    wide = None if joining is None else joining.double()
    true = plain.rms_norm_backward(
        *doubles, zero_centered_gamma=zero_centered_gamma, grad_residual=wide, recompute_output=again
    )
    assert ours[0].dtype == dtype and ours[1].dtype == torch.float32
    # A row of one element has no gradient but what joins: all that is left is rounding.
    if shape[1] > 1 or joined:
        assert far(ours[0], true[0]) <= BOUNDS[dtype]
    assert far(ours[1], true[1]) <= 1e-6
    assert (ours[2] is not None) == again
    if again:
        assert torch.equal(ours[2], normal)


@pytest.mark.parametrize("kernels", [norm, plain], ids=["triton", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [96, 2 * norm.MAX_ROW_WIDTH])
def test_a_target_gets_the_gradient_of_the_weight(kernels: Any, dtype: torch.dtype, width: int):
    """Written to its buffer, or added: the bits of a copy and of a sum."""
    (x, grad), weight = sample((6, width), torch.bfloat16, 2)
    _, _, rstd = kernels.rms_norm(x, weight, eps=1e-5, zero_centered_gamma=False)
    want = kernels.rms_norm_backward(grad, x, rstd, weight, zero_centered_gamma=False)
    for accumulate in (False, True):
        buffer = torch.randn(width, device=x.device).to(dtype)
        true = buffer.clone().add_(want[1]) if accumulate else want[1].to(dtype)

        def target(write: Any, buffer: Tensor = buffer, accumulate: bool = accumulate) -> None:
            write(buffer, accumulate)

        found = kernels.rms_norm_backward(grad, x, rstd, weight, zero_centered_gamma=False, submit_weight_grad=target)
        assert torch.equal(found[0], want[0]) and found[1] is None and torch.equal(found[2], want[2])
        assert torch.equal(buffer, true) if DEVICE == "cuda" or dtype == torch.float32 else far(buffer, true) < 8e-3


def test_gradients_are_those_of_the_forward():
    """Independent of the formula: autograd through the plain forward in float64."""
    (x, branch, grad, grad_residual), weight = sample((6, 96), torch.float32, 4)
    inputs = [tensor.double().requires_grad_() for tensor in (x, branch, weight)]
    total, normal, _ = plain.rms_norm(inputs[0], inputs[2], eps=1e-6, zero_centered_gamma=True, branch=inputs[1])
    true = torch.autograd.grad((normal * grad).sum() + (total * grad_residual).sum(), inputs)
    total, _, rstd = norm.rms_norm(x, weight, eps=1e-6, zero_centered_gamma=True, branch=branch)
    grad_x, grad_weight, _ = norm.rms_norm_backward(
        grad, total, rstd, weight, zero_centered_gamma=True, grad_residual=grad_residual
    )
    assert far(grad_x, true[0]) <= 1e-6 and far(grad_x, true[1]) <= 1e-6
    assert far(grad_weight, true[2]) <= 1e-6


@pytest.mark.parametrize("columns_apart", [False, True], ids=["rows apart", "columns apart"])
def test_strided_rows(columns_apart: bool):
    def strided(x: Tensor) -> Tensor:
        return x.t().contiguous().t() if columns_apart else torch.cat((x, x + 1), dim=1)[:, : x.shape[1]]

    (x, branch, grad, grad_residual), weight = sample((5, 48), torch.float32, 4)
    forward = {"eps": 1e-5, "zero_centered_gamma": False}
    want = norm.rms_norm(x, weight, **forward, branch=branch)
    have = norm.rms_norm(strided(x), weight, **forward, branch=strided(branch))
    want += norm.rms_norm_backward(
        grad, want[0], want[2], weight, zero_centered_gamma=False, grad_residual=grad_residual
    )
    apart = [strided(tensor) for tensor in (grad, want[0], grad_residual)]
    have += norm.rms_norm_backward(*apart[:2], want[2], weight, zero_centered_gamma=False, grad_residual=apart[2])
    for one, other in zip(have, want, strict=True):
        assert torch.equal(one, other)


def test_no_rows():
    (x,), weight = sample((0, 16), torch.bfloat16, 1)
    _, normal, rstd = norm.rms_norm(x, weight, eps=1e-5, zero_centered_gamma=False)
    grad_x, grad_weight, again = norm.rms_norm_backward(x, x, rstd, weight, zero_centered_gamma=False)
    assert normal.shape == grad_x.shape == x.shape and again is not None and again.shape == x.shape
    assert torch.equal(grad_weight, torch.zeros(16, device=DEVICE))


@pytest.mark.parametrize("again", [False, True])
def test_rows_too_wide_for_registers(again: bool):
    (x, branch, grad, joining), weight = sample((2, norm.MAX_ROW_WIDTH + 1), torch.float32, 4)
    ours, wanted = (
        [*kind.rms_norm(x, weight, eps=1e-5, zero_centered_gamma=True, branch=branch)] for kind in (norm, plain)
    )
    options = {"zero_centered_gamma": True, "grad_residual": joining, "recompute_output": again}
    for kind, found in ((norm, ours), (plain, wanted)):
        found += kind.rms_norm_backward(grad, found[0], found[2], weight, **options)
    for mine, true in zip(ours, wanted, strict=True):
        assert (mine is None and true is None) or torch.equal(mine, true)
    assert (ours[-1] is not None) == again
