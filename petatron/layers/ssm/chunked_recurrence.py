"""A recurrence in its chunked form under autograd: it saves its inputs, and a kernel's backward recomputes the rest.

S sequence, B batch, H heads, P (value) head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from petatron.base.autograd_op import AutogradOp, first_derivative


def chunked_recurrence(
    inputs: tuple[Tensor, ...],
    *,
    forward: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[..., tuple[Tensor | None, ...]],
    values: int,
    chunk_size: int,
    starts_SB: Tensor | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Returns the outputs [S, B, H, P], which have the shape of `inputs[values]`, and the final state."""
    return _ChunkedRecurrence.apply(forward, backward, values, chunk_size, starts_SB, initial_state, *inputs)  # pyright: ignore[reportReturnType]


class _ChunkedRecurrence(AutogradOp):
    @staticmethod
    def forward(
        ctx: Any,
        forward: Callable[..., tuple[Tensor, Tensor]],
        backward: Callable[..., tuple[Tensor | None, ...]],
        values: int,
        chunk_size: int,
        starts: Tensor | None,
        initial: Tensor | None,
        *inputs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.kernel, ctx.values, ctx.chunk_size = backward, values, chunk_size
        ctx.save_for_backward(starts, initial, *inputs)
        return forward(*inputs, chunk_size=chunk_size, starts_SB=starts, initial_state=initial)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        starts, initial, *inputs = ctx.saved_tensors
        grad_outputs, grad_state = grads
        if grad_outputs is None:
            grad_outputs = torch.zeros_like(inputs[ctx.values])
        *input_grads, initial_grad = ctx.kernel(
            grad_outputs, grad_state, *inputs, chunk_size=ctx.chunk_size, starts_SB=starts, initial_state=initial
        )
        return None, None, None, None, None, initial_grad, *input_grads
