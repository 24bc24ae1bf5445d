"""A recurrence in its chunked form under autograd: it saves its inputs, and a kernel's backward recomputes the rest.

S sequence, B batch, H heads, P (value) head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from petatron.base.autograd_op import AutogradOp, first_derivative
from petatron.layers.parallel_slots import ContextSlot, SequenceParts


class RecurrenceInputs(Protocol):
    """What a recurrence takes of every token and head, besides the state before: a tuple of tensors.

    operation: the name of its function in a kernel module; `<operation>_backward` is the derivative.
    values: the index of the tensor whose shape the outputs have.
    """

    @property
    def operation(self) -> str: ...
    @property
    def values(self) -> int: ...
    def __iter__(self) -> Iterator[Tensor]: ...


def chunked_recurrence(
    inputs: RecurrenceInputs,
    *,
    kernels: Any,
    chunk_size: int,
    starts_SB: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the outputs [S, B, H, P] and the final state."""
    forward, backward = (getattr(kernels, f"{inputs.operation}{suffix}") for suffix in ("", "_backward"))
    return _ChunkedRecurrence.apply(forward, backward, inputs.values, chunk_size, starts_SB, initial_state, *inputs)  # pyright: ignore[reportReturnType]


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


class ChunkedRecurrence(nn.Module):
    """A recurrence over whole sequences of this rank's heads, or over contiguous parts of them, by `over_parts`.

    operation: what the registry calls the kernels.
    """

    context_slots: Mapping[str, ContextSlot] = {"parts": "sequence parts"}

    def __init__(self, chunk_size: int, *, operation: str, kernels: Any, over_parts: Callable[..., Tensor]) -> None:
        super().__init__()
        self.chunk_size, self.operation, self.kernels, self._over_parts = chunk_size, operation, kernels, over_parts
        self.parts: SequenceParts | None = None

    def kernel_slots(self) -> Mapping[str, str]:
        return {"kernels": self.operation}

    def forward(self, inputs: RecurrenceInputs, starts_SB: Tensor | None) -> Tensor:
        sizes = {"kernels": self.kernels, "chunk_size": self.chunk_size, "starts_SB": starts_SB}
        if self.parts is not None:
            return self._over_parts(inputs, self.parts, **sizes)
        return chunked_recurrence(inputs, **sizes)[0]

    def after_state(self, inputs: RecurrenceInputs, state: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the outputs of tokens after a state, and the state after them."""
        return chunked_recurrence(inputs, kernels=self.kernels, chunk_size=self.chunk_size, initial_state=state)
