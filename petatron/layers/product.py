"""Matrix products whose weight gradients go where they are accumulated, without a detour through autograd.

Autograd would make a weight's gradient in the weight's precision, and a second pass would add it to the wide buffer in which
a step's micro-batches are summed. Here the product that makes the gradient writes or adds to that buffer itself. What is
multiplied how is a `Multiplication` (plain here, FP8 in `fp8.py`, experts in `kernels/grouped.py`); where the operand comes from
a second time is the business of `remade.py`; who takes gradients is a slot. Without a taker autograd gets them.

R rows, D input width, O output width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from petatron.kernels.multiplication import PLAIN, Multiplication, WeightGrad
from petatron.layers.remade import Remade, Source, remade
from petatron.layers.rows import batch_first, from_rows, to_rows

Write = Callable[[Tensor, bool], None]
"""(out, accumulate): write a gradient to a tensor, or add to it."""


class TakesWeightGrads(Protocol):
    """Where weights' gradients go."""

    def take(self, weight: Tensor, write: Write, *, now: bool = False) -> None:
        """Call `write` with the memory of the weight's gradient, at once or when there is time for it."""
        ...


@dataclass(frozen=True, slots=True)
class Multiply:
    """A multiplication as autograd sees it; `weight_grads` None leaves weight gradients to autograd."""

    multiplication: Multiplication = PLAIN
    weight_grads: TakesWeightGrads | None = None

    def __call__(self, x: Remade, weight: Tensor, *, enter: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """`enter` makes of the source's value what is multiplied here, where that is something else (gathered)."""
        return _Multiply.apply(x.value, weight, self, x.source, enter)  # pyright: ignore[reportReturnType]


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        how: Multiply,
        source: Source | None,
        enter: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        by_batch = batch_first(x)
        rows = to_rows(x, by_batch=by_batch)
        y, kept = how.multiplication.forward(rows, weight)
        ctx.keeps_rows = source is None and not kept
        ctx.save_for_backward(*((rows,) if ctx.keeps_rows else kept))
        ctx.weight, ctx.how, ctx.source, ctx.enter, ctx.by_batch = weight, how, source, enter, by_batch
        return from_rows(y, x, by_batch=by_batch)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, how, weight = grads[0], ctx.how, ctx.weight
        kept = ctx.saved_tensors
        rows = kept[0] if ctx.keeps_rows else None
        grad_rows = to_rows(grad, by_batch=ctx.by_batch)
        x_grad, job = how.multiplication.backward(grad_rows, weight, () if ctx.keeps_rows else kept)
        x_grad = from_rows(x_grad, grad, by_batch=ctx.by_batch)
        weight_grad = None
        if ctx.needs_input_grad[1]:
            weight_grad = _give(job, weight, how.weight_grads, _Operand(rows, ctx.source, ctx.enter, ctx.by_batch))
        return x_grad, weight_grad, None, None, None


@dataclass(frozen=True, slots=True)
class _Operand:
    """The rows that were multiplied: kept, or to be had from their source."""

    rows: Tensor | None
    source: Source | None
    enter: Callable[[Tensor], Tensor] | None
    by_batch: bool

    def entered(self, value: Tensor) -> Tensor:
        return to_rows(value if self.enter is None else self.enter(value), by_batch=self.by_batch)

    def now(self) -> Tensor:
        if self.rows is not None:
            return self.rows
        assert self.source is not None
        return self.entered(self.source.again())


def _give(job: WeightGrad, weight: Tensor, taker: TakesWeightGrads | None, operand: _Operand) -> Tensor | None:
    """Hand a weight's gradient to its taker, once the operand is there; without a taker, to autograd."""
    if taker is None:
        out = torch.empty_like(weight)
        job.write(operand.now() if job.needs_input else None, out, accumulate=False)
        return out
    if job.needs_input and operand.rows is None:
        assert operand.source is not None
        operand.source.when_made(partial(_take_later, job, weight, taker, operand))
    else:
        _take(job, weight, taker, operand.rows)
    return None


def _take_later(job: WeightGrad, weight: Tensor, taker: TakesWeightGrads, operand: _Operand, value: Tensor) -> None:
    _take(job, weight, taker, operand.entered(value))


def _take(job: WeightGrad, weight: Tensor, taker: TakesWeightGrads, rows: Tensor | None) -> None:
    taker.take(weight, lambda out, accumulate: job.write(rows, out, accumulate=accumulate))


def multiply_here(x: Tensor | Remade, weight: Tensor) -> Tensor:
    """x W^T on one device, as layers do it before anything fills their slots."""
    return MULTIPLY(remade(x), weight)


MULTIPLY = Multiply()
"""In the precision of the operands, with weight gradients for autograd."""
