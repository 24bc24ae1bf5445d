"""Autograd functions that cost the host little: a layer has ten, and a small model's step is as long as Python needs for it.

`torch.autograd.Function.apply` looks through its arguments for the wrappers of functorch's transforms, and `once_differentiable` enters
and leaves a context in every backward pass. Neither is of use here: no op of ours has rules for those transforms, and a backward
pass that builds no graph runs without gradients anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import once_differentiable


class AutogradOp(torch.autograd.Function):
    """An autograd function outside of functorch's transforms."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        return super(torch.autograd.Function, cls).apply(*args)  # pyright: ignore[reportAttributeAccessIssue]


def first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a backward that cannot be differentiated itself, as `once_differentiable` does; free where nobody could try."""
    marked = once_differentiable(backward)

    @wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        return marked(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return call
