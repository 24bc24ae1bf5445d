"""Matrix products whose weight gradients go where they are accumulated, without a detour through autograd.

Autograd would make a weight's gradient in the weight's precision, and a second pass would add it to the wide buffer in which
a step's micro-batches are summed. Here the product that makes the gradient writes or adds to that buffer itself. What is
multiplied how is a `Multiplication` (plain here, FP8 in `fp8_gemm.py`, experts in `kernels/moe/grouped_gemm.py`); where the operand comes
from a second time is the business of `recompute_output.py`; who takes gradients is a slot. Without a taker autograd gets them.

A product may have an `Entrance`: what it multiplies is gathered from the ranks that share a sequence, or is the same on all of
them. Then only a rank's own part of the operand is had again, and gathered once more. The gradient of that part is wanted at
once by what lies before, the weight's by nobody; so with m the maker of the operand, communication runs beside both products of
the backward pass:

    computing       m again (own part)   g W               g^T x
    communicating                        gather x          scatter-add g W

If the weight's gradient waited for the backward pass of m, as it does without an entrance, both would be waited for, one before
and one behind m. Making the own part by itself costs one more reading of what it is made of: where 1 / ranks of the rows are a
rank's own, one to three hundredths of the time of one of the products. A taker that postpones weight gradients (zero-bubble
schedules) changes that: then the part is made in passing in the backward pass of m, waits with g, and is gathered while the
weight's gradient before it is computed.

The forward pass of a GEMM is a `Forward`. `AtOnce` gathers the whole input, then multiplies it. Tensor parallelism may put
another in its place that overlaps communication with the GEMM chunk by chunk (`parallel/tensor_parallel.py`); the backward pass is the
same.

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

from petatron.kernels.gemm import PLAIN, Multiplication, Tensors, WeightGrad
from petatron.layers.ops.recompute_output import Remade, Source, remade
from petatron.layers.token_layout import batch_first, from_rows, to_rows

Write = Callable[[Tensor, bool], None]
"""(out, accumulate): write a gradient to a tensor, or add to it."""
Arrival = Callable[[], Tensor]
"""Waits for what is on its way."""


class TakesWeightGrads(Protocol):
    """Where weights' gradients go."""

    @property
    def postpones(self) -> bool:
        """Whether what is given now is written later."""
        ...

    def take(self, weight: Tensor, write: Write, *, now: bool = False, begin: Callable[[], None] | None = None) -> None:
        """Call `write` with the memory of the weight's gradient, at once or when there is time for it.

        `begin` starts communication that `write` waits for; it may be called before, or left out.
        """
        ...


class Entrance(Protocol):
    """Communication before a product: from a rank's own part of the operand to the whole, and with gradients back."""

    def enter(self, x: Tensor) -> Tensor:
        """The whole operand."""
        ...

    def start_enter(self, x: Tensor) -> Arrival:
        """The same, begun."""
        ...

    def start_leave(self, grad: Tensor) -> Arrival:
        """Begin to sum gradients of the whole operand over the ranks, and to give each its part."""
        ...


@dataclass(frozen=True, slots=True)
class Multiplied:
    """The result of a forward pass.

    rows: the input of the whole GEMM, in the form that `Forward.input_rows` takes; saved for backward where it is needed there.
    saved: what the multiplication saves instead of it, if anything. by_batch: the order of the rows.
    """

    y: Tensor
    rows: Tensors
    saved: Tensors = ()
    by_batch: bool = False


class Forward(Protocol):
    """The forward pass of a GEMM together with the communication it needs."""

    def forward(self, x: Tensor, weight: Tensor, multiplication: Multiplication) -> Multiplied:
        """Multiply; `x` is the input before communication, the output is the one after communication."""
        ...

    def input_rows(self, rows: Tensors) -> Tensor:
        """The input of the whole GEMM, [R, D]."""
        ...

    def output_grad(self, grad: Tensor) -> Tensor:
        """The gradient of the output of the whole GEMM, from that of the output after communication."""
        ...


@dataclass(frozen=True, slots=True)
class AtOnce:
    """All input communication, then one GEMM; it has no output communication."""

    entrance: Entrance | None = None

    def forward(self, x: Tensor, weight: Tensor, multiplication: Multiplication) -> Multiplied:
        x = x if self.entrance is None else self.entrance.enter(x)
        by_batch = batch_first(x)
        rows = to_rows(x, by_batch=by_batch)
        y, saved = multiplication.forward(rows, weight)
        return Multiplied(from_rows(y, x, by_batch=by_batch), (rows,), saved, by_batch)

    def input_rows(self, rows: Tensors) -> Tensor:
        return rows[0]

    def output_grad(self, grad: Tensor) -> Tensor:
        return grad


@dataclass(frozen=True, slots=True)
class Multiply:
    """A multiplication as autograd sees it; `weight_grads` None leaves weight gradients to autograd."""

    multiplication: Multiplication = PLAIN
    weight_grads: TakesWeightGrads | None = None

    def __call__(
        self, x: Remade, weight: Tensor, *, entrance: Entrance | None = None, forward: Forward | None = None
    ) -> Tensor:
        """`x` is what stands before the entrance, if there is one; `forward` None means `AtOnce`."""
        forward = AtOnce(entrance) if forward is None else forward
        return _Multiply.apply(x.value, weight, self, x.source, entrance, forward)  # pyright: ignore[reportReturnType]


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        how: Multiply,
        source: Source | None,
        entrance: Entrance | None,
        forward: Forward,
    ) -> Tensor:
        done = forward.forward(x, weight, how.multiplication)
        ctx.keeps_rows = source is None and not done.saved
        ctx.save_for_backward(*(done.rows if ctx.keeps_rows else done.saved))
        ctx.weight, ctx.how, ctx.source, ctx.entrance, ctx.by_batch = weight, how, source, entrance, done.by_batch
        ctx.forward_pass = forward
        return done.y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        how, weight, entrance = ctx.how, ctx.weight, ctx.entrance
        grad = ctx.forward_pass.output_grad(grads[0])
        kept, rows = ctx.saved_tensors, None
        x_wanted, weight_wanted, *_ = ctx.needs_input_grad
        if ctx.keeps_rows:
            rows, kept = ctx.forward_pass.input_rows(kept), ()
        operand = _Operand(rows, ctx.source, entrance, ctx.by_batch)
        if weight_wanted and not kept:
            operand.begin(how.weight_grads)
        grad_rows = to_rows(grad, by_batch=ctx.by_batch)
        x_grad, job = how.multiplication.backward(grad_rows, weight, kept)
        x_grad = from_rows(x_grad, grad, by_batch=ctx.by_batch)
        leaving = entrance.start_leave(x_grad) if x_wanted and entrance is not None else None
        weight_grad = _give(job, weight, how.weight_grads, operand) if weight_wanted else None
        return x_grad if leaving is None else leaving(), weight_grad, None, None, None, None


class _Entering:
    """A value on its way to the rows that were multiplied."""

    __slots__ = ("_arrival", "_by_batch", "_entrance", "_value")

    def __init__(self, value: Tensor, entrance: Entrance, *, by_batch: bool) -> None:
        self._value: Tensor | None = value
        self._entrance, self._by_batch = entrance, by_batch
        self._arrival: Arrival | None = None

    def begin(self) -> None:
        """Beginning twice is beginning once."""
        if self._value is not None:
            self._arrival, self._value = self._entrance.start_enter(self._value), None

    def rows(self) -> Tensor:
        self.begin()
        assert self._arrival is not None
        return to_rows(self._arrival(), by_batch=self._by_batch)


@dataclass(slots=True)
class _Operand:
    """The rows that were multiplied: kept, on their way, or to be had from their source."""

    kept: Tensor | None
    source: Source | None
    entrance: Entrance | None
    by_batch: bool
    entering: _Entering | None = None

    def begin(self, taker: TakesWeightGrads | None) -> None:
        """Send what must be gathered on its way, if it will be used in this backward pass."""
        if self.kept is None and self.entrance is not None and not (taker is not None and taker.postpones):
            assert self.source is not None
            self.entering = _Entering(self.source.again(), self.entrance, by_batch=self.by_batch)
            self.entering.begin()

    def now(self) -> Tensor:
        if self.kept is not None:
            return self.kept
        if self.entering is not None:
            return self.entering.rows()
        assert self.source is not None
        return to_rows(self.source.again(), by_batch=self.by_batch)


def _give(job: WeightGrad, weight: Tensor, taker: TakesWeightGrads | None, operand: _Operand) -> Tensor | None:
    """Hand a weight's gradient to its taker, once the operand is there; without a taker, to autograd."""
    if taker is None:
        out = torch.empty_like(weight)
        job.write(operand.now() if job.needs_input else None, out, accumulate=False)
        return out
    if operand.entering is not None:
        _take_entering(job, weight, taker, operand.entering)
    elif job.needs_input and operand.kept is None:
        assert operand.source is not None
        operand.source.when_made(partial(_take_later, job, weight, taker, operand))
    else:
        _take(job, weight, taker, operand.kept)
    return None


def _take_later(job: WeightGrad, weight: Tensor, taker: TakesWeightGrads, operand: _Operand, value: Tensor) -> None:
    if operand.entrance is None:
        _take(job, weight, taker, to_rows(value, by_batch=operand.by_batch))
    else:
        _take_entering(job, weight, taker, _Entering(value, operand.entrance, by_batch=operand.by_batch))


def _take(job: WeightGrad, weight: Tensor, taker: TakesWeightGrads, rows: Tensor | None) -> None:
    taker.take(weight, lambda out, accumulate: job.write(rows, out, accumulate=accumulate))


def _take_entering(job: WeightGrad, weight: Tensor, taker: TakesWeightGrads, entering: _Entering) -> None:
    def write(out: Tensor, accumulate: bool) -> None:
        job.write(entering.rows(), out, accumulate=accumulate)

    taker.take(weight, write, begin=entering.begin)


def multiply_here(x: Tensor | Remade, weight: Tensor) -> Tensor:
    """x W^T on one device, as layers do it before anything fills their slots."""
    return MULTIPLY(remade(x), weight)


MULTIPLY = Multiply()
"""In the precision of the operands, with weight gradients for autograd."""
