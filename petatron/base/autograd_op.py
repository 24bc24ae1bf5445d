"""Autograd functions with little host overhead: a layer runs six, and Python's time is the step time of a small model.

`torch.autograd.Function.apply` searches its arguments for functorch wrappers, each backward call looks up whether the function has a
`backward` or a `vjp`, and `once_differentiable` enters and leaves a context. `AutogradOp` skips all three: our ops have no functorch
rules, all have a `backward`, and a backward that builds no graph runs without gradients anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionMeta, once_differentiable


class _DirectBackward(FunctionMeta):
    """Makes the autograd node of a function (the class that `FunctionMeta` creates) call `backward` directly."""

    def __init__(cls, name: str, bases: tuple[type, ...], attributes: dict[str, Any]) -> None:  # pyright: ignore[reportSelfClsParameterName]
        super().__init__(name, bases, attributes)
        if hasattr(cls, "_backward_cls"):  # a PyTorch internal; without it nodes are only slower
            cls._backward_cls.apply = cls.backward  # pyright: ignore[reportAttributeAccessIssue]


class AutogradOp(torch.autograd.Function, metaclass=_DirectBackward):
    """An autograd function that functorch transforms do not support."""

    apply = vars(torch._C._FunctionBase)["apply"]  # what `Function.apply` calls after its checks


def first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Forbids a second derivative, as `once_differentiable` does, at no cost where no graph is built."""
    marked = once_differentiable(backward)

    @wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        return marked(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return call


class SavedInputsOp(AutogradOp):
    """Runs a kernel and saves only its inputs; the derivative recomputes the rest.

    `apply` takes the kernel, its derivative and the inputs. The derivative takes the output's gradient and the inputs, and returns the
    gradients of the leading inputs; the other inputs have none.
    """

    @staticmethod
    def forward(
        ctx: Any, kernel: Callable[..., Tensor], derivative: Callable[..., Any], *inputs: Tensor | None
    ) -> Tensor:
        ctx.derivative = derivative
        ctx.save_for_backward(*inputs)
        return kernel(*inputs)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        inputs = ctx.saved_tensors
        input_grads = ctx.derivative(grads[0], *inputs)
        pairs = zip(input_grads, inputs)
        cast = (grad if grad is None or grad.dtype == x.dtype else grad.to(x.dtype) for grad, x in pairs)
        return None, None, *cast, *(None,) * (len(inputs) - len(input_grads))
