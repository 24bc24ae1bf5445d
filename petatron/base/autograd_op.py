"""Autograd functions that cost the host little: a layer has six, and a small model's step is as long as Python needs for it.

`torch.autograd.Function.apply` looks through its arguments for the wrappers of functorch's transforms, a node looks up at every call
whether its function has a `backward` or a `vjp`, and `once_differentiable` enters and leaves a context in every backward pass. None of
it is of use here: no op of ours has rules for those transforms, all have a `backward`, and a backward pass that builds no graph runs
without gradients anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionMeta, once_differentiable


class _DirectBackward(FunctionMeta):
    """Makes the node of an autograd function, the class that `FunctionMeta` adds to it, call its backward directly."""

    def __init__(cls, name: str, bases: tuple[type, ...], attributes: dict[str, Any]) -> None:  # pyright: ignore[reportSelfClsParameterName]
        super().__init__(name, bases, attributes)
        if hasattr(cls, "_backward_cls"):  # an internal of PyTorch; without it nodes are slower, and the same
            cls._backward_cls.apply = cls.backward  # pyright: ignore[reportAttributeAccessIssue]


class AutogradOp(torch.autograd.Function, metaclass=_DirectBackward):
    """An autograd function outside of functorch's transforms."""

    apply = vars(torch._C._FunctionBase)["apply"]  # what `Function.apply` calls in the end


def first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a backward that cannot be differentiated itself, as `once_differentiable` does; free where nobody could try."""
    marked = once_differentiable(backward)

    @wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        return marked(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return call


class SavedInputsOp(AutogradOp):
    """A kernel and its derivative: the inputs are saved, and the derivative recomputes the rest.

    Called with the kernel, its derivative and the inputs. The derivative takes the gradient of the output before the inputs, and returns
    the gradients of the first of them; an input after those has none.
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
