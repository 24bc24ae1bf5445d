"""Matrix products whose weight gradients go where they are accumulated, without a detour through autograd.

Autograd would make a weight's gradient in the weight's precision, and a second pass would add it to the wide buffer in which
a step's micro-batches are summed. Here the product that makes the gradient writes or adds to that buffer itself. What is
multiplied how is a `Gemm` (plain here, FP8 in `fp8_gemm.py`, experts in `kernels/moe/grouped_gemm.py`); where the operand comes
from a second time is the business of `recompute_output.py`; who takes gradients is a slot. Without a taker autograd gets them.

A product may have an `InputComm`: what it multiplies is gathered from the ranks that share a sequence, or is the same on all of
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

The forward pass of a GEMM is a `GemmForward`. `GatherThenGemm` gathers the whole input, then multiplies it. Tensor parallelism may put
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

from petatron.kernels.gemm import PLAIN_GEMM, Gemm, Tensors, WeightGrad
from petatron.layers.ops.recompute_output import Recomputable, RecomputeHandle, as_recomputable
from petatron.layers.token_layout import from_rows, is_batch_first, to_rows

WriteWeightGrad = Callable[[Tensor, bool], None]
"""(out, accumulate): write a gradient to a tensor, or add to it."""
PendingTensor = Callable[[], Tensor]
"""Waits for what is on its way."""


class WeightGradSink(Protocol):
    """Where weights' gradients go."""

    @property
    def defers(self) -> bool:
        """Whether what is given now is written later."""
        ...

    def submit(
        self, weight: Tensor, write: WriteWeightGrad, *, now: bool = False, start_comm: Callable[[], None] | None = None
    ) -> None:
        """Call `write` with the memory of the weight's gradient, at once or when there is time for it.

        `start_comm` starts communication that `write` waits for; it may be called before, or left out.
        """
        ...


class InputComm(Protocol):
    """Communication before a product: from a rank's own part of the operand to the whole, and with gradients back."""

    def gather_input(self, x: Tensor) -> Tensor:
        """The whole operand."""
        ...

    def start_gather_input(self, x: Tensor) -> PendingTensor:
        """The same, begun."""
        ...

    def start_reduce_input_grad(self, grad: Tensor) -> PendingTensor:
        """Begin to sum gradients of the whole operand over the ranks, and to give each its part."""
        ...


@dataclass(frozen=True, slots=True)
class GemmResult:
    """The result of a forward pass.

    gemm_input: the input of the whole GEMM, in the form that `GemmForward.input_rows` takes; saved for backward where it is needed there.
    saved: what the multiplication saves instead of it, if anything. batch_first: the order of the rows.
    """

    y: Tensor
    gemm_input: Tensors
    saved: Tensors = ()
    batch_first: bool = False


class GemmForward(Protocol):
    """The forward pass of a GEMM together with the communication it needs."""

    def forward(self, x: Tensor, weight: Tensor, gemm: Gemm) -> GemmResult:
        """Multiply; `x` is the input before communication, the output is the one after communication."""
        ...

    def input_rows(self, gemm_input: Tensors) -> Tensor:
        """The input of the whole GEMM, [R, D]."""
        ...

    def output_grad(self, grad: Tensor) -> Tensor:
        """The gradient of the output of the whole GEMM, from that of the output after communication."""
        ...


@dataclass(frozen=True, slots=True)
class GatherThenGemm:
    """All input communication, then one GEMM; it has no output communication."""

    input_comm: InputComm | None = None

    def forward(self, x: Tensor, weight: Tensor, gemm: Gemm) -> GemmResult:
        x = x if self.input_comm is None else self.input_comm.gather_input(x)
        batch_first = is_batch_first(x)
        rows = to_rows(x, batch_first=batch_first)
        y, saved = gemm.forward(rows, weight)
        return GemmResult(from_rows(y, x, batch_first=batch_first), (rows,), saved, batch_first)

    def input_rows(self, gemm_input: Tensors) -> Tensor:
        return gemm_input[0]

    def output_grad(self, grad: Tensor) -> Tensor:
        return grad


@dataclass(frozen=True, slots=True)
class GemmOp:
    """A multiplication as autograd sees it; `weight_grad_sink` None leaves weight gradients to autograd."""

    gemm: Gemm = PLAIN_GEMM
    weight_grad_sink: WeightGradSink | None = None

    def __call__(
        self,
        x: Recomputable,
        weight: Tensor,
        *,
        input_comm: InputComm | None = None,
        gemm_forward: GemmForward | None = None,
    ) -> Tensor:
        """`x` is what stands before the entrance, if there is one; `gemm_forward` None means `GatherThenGemm`."""
        gemm_forward = GatherThenGemm(input_comm) if gemm_forward is None else gemm_forward
        return _GemmFunction.apply(x.value, weight, self, x.handle, input_comm, gemm_forward)  # pyright: ignore[reportReturnType]


class _GemmFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        op: GemmOp,
        handle: RecomputeHandle | None,
        input_comm: InputComm | None,
        gemm_forward: GemmForward,
    ) -> Tensor:
        done = gemm_forward.forward(x, weight, op.gemm)
        ctx.saves_input = handle is None and not done.saved
        ctx.save_for_backward(*(done.gemm_input if ctx.saves_input else done.saved))
        ctx.weight, ctx.op, ctx.handle, ctx.input_comm, ctx.batch_first = (
            weight,
            op,
            handle,
            input_comm,
            done.batch_first,
        )
        ctx.gemm_forward = gemm_forward
        return done.y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        op, weight, input_comm = ctx.op, ctx.weight, ctx.input_comm
        grad = ctx.gemm_forward.output_grad(grads[0])
        kept, rows = ctx.saved_tensors, None
        x_wanted, weight_wanted, *_ = ctx.needs_input_grad
        if ctx.saves_input:
            rows, kept = ctx.gemm_forward.input_rows(kept), ()
        operand = _GemmInput(rows, ctx.handle, input_comm, ctx.batch_first)
        if weight_wanted and not kept:
            operand.start_gather(op.weight_grad_sink)
        grad_rows = to_rows(grad, batch_first=ctx.batch_first)
        x_grad, job = op.gemm.backward(grad_rows, weight, kept)
        x_grad = from_rows(x_grad, grad, batch_first=ctx.batch_first)
        leaving = input_comm.start_reduce_input_grad(x_grad) if x_wanted and input_comm is not None else None
        weight_grad = _submit_weight_grad(job, weight, op.weight_grad_sink, operand) if weight_wanted else None
        return x_grad if leaving is None else leaving(), weight_grad, None, None, None, None


class _InputGather:
    """A value on its way to the rows that were multiplied."""

    __slots__ = ("_batch_first", "_input_comm", "_pending", "_value")

    def __init__(self, value: Tensor, input_comm: InputComm, *, batch_first: bool) -> None:
        self._value: Tensor | None = value
        self._input_comm, self._batch_first = input_comm, batch_first
        self._pending: PendingTensor | None = None

    def start(self) -> None:
        """Beginning twice is beginning once."""
        if self._value is not None:
            self._pending, self._value = self._input_comm.start_gather_input(self._value), None

    def rows(self) -> Tensor:
        self.start()
        assert self._pending is not None
        return to_rows(self._pending(), batch_first=self._batch_first)


@dataclass(slots=True)
class _GemmInput:
    """The rows that were multiplied: kept, on their way, or to be had from their source."""

    saved: Tensor | None
    handle: RecomputeHandle | None
    input_comm: InputComm | None
    batch_first: bool
    gather: _InputGather | None = None

    def start_gather(self, sink: WeightGradSink | None) -> None:
        """Send what must be gathered on its way, if it will be used in this backward pass."""
        if self.saved is None and self.input_comm is not None and not (sink is not None and sink.defers):
            assert self.handle is not None
            self.gather = _InputGather(self.handle.recompute(), self.input_comm, batch_first=self.batch_first)
            self.gather.start()

    def rows(self) -> Tensor:
        if self.saved is not None:
            return self.saved
        if self.gather is not None:
            return self.gather.rows()
        assert self.handle is not None
        return to_rows(self.handle.recompute(), batch_first=self.batch_first)


def _submit_weight_grad(
    weight_grad: WeightGrad, weight: Tensor, sink: WeightGradSink | None, gemm_input: _GemmInput
) -> Tensor | None:
    """Hand a weight's gradient to its taker, once the operand is there; without a taker, to autograd."""
    if sink is None:
        out = torch.empty_like(weight)
        weight_grad.write(gemm_input.rows() if weight_grad.needs_input else None, out, accumulate=False)
        return out
    if gemm_input.gather is not None:
        _submit_gathered(weight_grad, weight, sink, gemm_input.gather)
    elif weight_grad.needs_input and gemm_input.saved is None:
        assert gemm_input.handle is not None
        gemm_input.handle.on_recomputed(partial(_submit_recomputed, weight_grad, weight, sink, gemm_input))
    else:
        _submit_rows(weight_grad, weight, sink, gemm_input.saved)
    return None


def _submit_recomputed(
    weight_grad: WeightGrad, weight: Tensor, sink: WeightGradSink, gemm_input: _GemmInput, value: Tensor
) -> None:
    if gemm_input.input_comm is None:
        _submit_rows(weight_grad, weight, sink, to_rows(value, batch_first=gemm_input.batch_first))
    else:
        _submit_gathered(
            weight_grad, weight, sink, _InputGather(value, gemm_input.input_comm, batch_first=gemm_input.batch_first)
        )


def _submit_rows(weight_grad: WeightGrad, weight: Tensor, sink: WeightGradSink, rows: Tensor | None) -> None:
    sink.submit(weight, lambda out, accumulate: weight_grad.write(rows, out, accumulate=accumulate))


def _submit_gathered(weight_grad: WeightGrad, weight: Tensor, sink: WeightGradSink, gather: _InputGather) -> None:
    def write(out: Tensor, accumulate: bool) -> None:
        weight_grad.write(gather.rows(), out, accumulate=accumulate)

    sink.submit(weight, write, start_comm=gather.start)


def local_linear(x: Tensor | Recomputable, weight: Tensor) -> Tensor:
    """x W^T on one device, as layers do it before anything fills their slots."""
    return DEFAULT_GEMM_OP(as_recomputable(x), weight)


DEFAULT_GEMM_OP = GemmOp()
"""In the precision of the operands, with weight gradients for autograd."""
