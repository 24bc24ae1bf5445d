"""Autograd ops: as PyTorch's own, at less cost; a second derivative is refused as `once_differentiable` refuses it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from petatron.base.autograd_op import AutogradOp, first_derivative


class Cube(AutogradOp):
    grad_modes: list[bool]

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return factor * x**3

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        Cube.grad_modes.append(torch.is_grad_enabled())
        return grads[0] * ctx.factor * 3 * x**2, None


@pytest.fixture(autouse=True)
def no_modes():
    Cube.grad_modes = []


def leaf() -> Tensor:
    return torch.randn(5, dtype=torch.float64, requires_grad=True)


def test_value_and_gradient():
    x = leaf()
    y = Cube.apply(x, 2.0)
    torch.testing.assert_close(y.detach(), 2 * x.detach() ** 3)
    y.sum().backward()
    torch.testing.assert_close(x.grad, 6 * x.detach() ** 2)
    assert Cube.grad_modes == [False]


def test_without_gradients_there_is_no_node():
    with torch.no_grad():
        assert Cube.apply(leaf(), 2.0).grad_fn is None
    assert Cube.apply(leaf().detach(), 2.0).grad_fn is None


def test_a_second_derivative_is_refused():
    x = leaf()
    (grad,) = torch.autograd.grad(Cube.apply(x, 2.0).square().sum(), x, create_graph=True)
    torch.testing.assert_close(grad.detach(), 24 * x.detach() ** 5)
    assert Cube.grad_modes == [False]  # nothing of backward is recorded, although a graph of it was asked for
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


def test_the_engine_calls_backward_without_looking_it_up(monkeypatch: pytest.MonkeyPatch):
    """PyTorch's own way, which would call what is put in its place here, is not taken."""
    node = Cube._backward_cls  # pyright: ignore[reportAttributeAccessIssue]
    assert "apply" in vars(node)
    called: list[Any] = []

    def recorded(*args: Any) -> Any:
        called.append(args)
        return Cube.backward(*args)

    monkeypatch.setattr(node, "apply", recorded)
    x = leaf()
    (grad,) = torch.autograd.grad(Cube.apply(x, 2.0).sum(), [x])
    assert len(called) == 1 and torch.equal(grad, 6 * x.detach() ** 2)
