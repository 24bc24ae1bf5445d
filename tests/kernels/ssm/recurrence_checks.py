"""What is checked of every chunked recurrence: it is its token-by-token form in all ways a sequence is cut, and so are its gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def document_starts(length: int, *positions: tuple[int, ...]) -> Tensor:
    starts = torch.zeros(length, len(positions), dtype=torch.bool)
    for row, begins in enumerate(positions):
        starts[list(begins), row] = True
    return starts


def assert_exact(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A recurrence in its forms; each takes `draw`'s named tuple and returns outputs and the final state.

    by_token: its definition. chunked: the kernel. operation: the kernel under autograd. update: one token, after a state.
    draw: random inputs of a length in float64; those in `of_every_token` are by token, the others by head.
    decay: the name of the input that half precision leaves in float32.
    """

    by_token: Callable[..., tuple[Tensor, Tensor]]
    chunked: Callable[..., tuple[Tensor, Tensor]]
    operation: Callable[..., tuple[Tensor, Tensor]]
    update: Callable[..., tuple[Tensor, Tensor]]
    draw: Callable[..., Any]
    initial: Callable[[Any], Tensor]
    of_every_token: tuple[str, ...]
    decay: str

    def part(self, inputs: Any, tokens: slice | int) -> Any:
        return inputs._replace(**{name: getattr(inputs, name)[tokens] for name in self.of_every_token})

    def check_chunk_size(self, length: int, chunk_size: int, *, with_state: bool, packed: bool) -> None:
        inputs = self.draw(length)
        options = {
            "starts_SB": document_starts(length, (0, length // 3, length // 2), (length - 1,)) if packed else None,
            "initial_state": self.initial(inputs) if with_state else None,
        }
        assert_exact(self.chunked(*inputs, chunk_size=chunk_size, **options), self.by_token(*inputs, **options))

    def check_parts(self, cut: int) -> None:
        inputs = self.draw(13)
        first, state = self.chunked(*self.part(inputs, slice(0, cut)), chunk_size=4)
        second, state = self.chunked(*self.part(inputs, slice(cut, 13)), chunk_size=4, initial_state=state)
        assert_exact((torch.cat((first, second)), state), self.by_token(*inputs))

    def check_packed_documents(self) -> None:
        inputs, begins = self.draw(14, batch=1), (0, 3, 4, 9)
        packed, state = self.chunked(*inputs, chunk_size=4, starts_SB=document_starts(14, begins))
        last = torch.empty(0)
        for begin, end in zip(begins, (*begins[1:], 14)):
            alone, last = self.chunked(*self.part(inputs, slice(begin, end)), chunk_size=4)
            torch.testing.assert_close(packed[begin:end], alone, **EXACT)
        torch.testing.assert_close(state, last, **EXACT)

    def check_decoding(self) -> None:
        inputs = self.draw(9)
        whole, last = self.chunked(*inputs, chunk_size=4)
        state = torch.zeros_like(last)
        for token in range(9):
            y, state = self.update(state, *self.part(inputs, token))
            torch.testing.assert_close(y, whole[token], **EXACT)
        torch.testing.assert_close(state, last, **EXACT)

    def check_gradients_by_differences(self, inputs: NamedTuple, chunk_size: int, *, packed: bool) -> None:
        starts = document_starts(len(inputs[0]), (2,)) if packed else None
        tensors = [tensor.requires_grad_() for tensor in (*inputs, self.initial(inputs))]

        def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
            *given, state = tensors
            return self.operation(type(inputs)(*given), chunk_size=chunk_size, starts_SB=starts, initial_state=state)

        assert torch.autograd.gradcheck(run, tensors)

    def check_gradients_by_token(self, inputs: NamedTuple, chunk_size: int, *, starts: Tensor | None) -> None:
        """Those of the inputs and of the state before them."""
        given, grads = (*inputs, self.initial(inputs)), []
        for chunked in (True, False):
            *leaves, state = (tensor.detach().clone().requires_grad_() for tensor in given)
            options = {"starts_SB": starts, "initial_state": state}
            y, last = (
                self.operation(type(inputs)(*leaves), chunk_size=chunk_size, **options)
                if chunked
                else self.by_token(*leaves, **options)
            )
            grads.append(torch.autograd.grad((y * y.detach().cos()).sum() + last.square().sum(), (*leaves, state)))
        assert_exact(*grads)

    def check_gradients_of_the_state(self, *names: str) -> None:
        """Where no output is used."""
        drawn = self.draw(5)
        inputs = type(drawn)(*(tensor.requires_grad_() for tensor in drawn))
        states = self.operation(inputs, chunk_size=2)[1], self.by_token(*inputs)[1]
        wanted = [getattr(inputs, name) for name in names]
        assert_exact(*(torch.autograd.grad(state.square().sum(), wanted) for state in states))

    def check_half_precision(self) -> None:
        inputs = self.draw(12)
        half = type(inputs)(*(tensor.to(torch.bfloat16) for tensor in inputs))
        half = half._replace(**{self.decay: getattr(inputs, self.decay).float()})
        exact, state = self.chunked(*inputs, chunk_size=4)
        y, half_state = self.chunked(*half, chunk_size=4)
        assert y.dtype == torch.bfloat16 and half_state.dtype == torch.float32
        assert (y - exact).norm() / exact.norm() < 0.02 and (half_state - state).norm() / state.norm() < 0.02
