"""GEMMs whose weight gradients are accumulated into the gradient buffer directly, not through autograd.

Autograd would produce a weight's gradient in the weight's precision, and a second pass would add it to the wider buffer that
sums a step's micro-batches. Here the weight-gradient GEMM writes or adds to that buffer itself. The GEMM is a `Gemm` (plain
here, FP8 in `fp8_gemm.py`, experts in `kernels/moe/grouped_gemm.py`); `recompute_output.py` recomputes its input in backward; the
weight-gradient target is a slot. Without a target autograd gets the gradients.

A bias is added by the GEMM, or once the outputs of tensor-parallel ranks are summed; its gradient, the sum of the rows of the output's
gradient, goes to the same target, at once.

An adapter's GEMM (`layers/adapters/`) has parameters of its own, `GemmOp.adapter_params`: their gradients are computed in the same backward
as the weight's, which usually is frozen, and go to the same target.

A GEMM may have an `InputComm`: its input is all-gathered along the sequence, or is the same on all ranks. Then backward
recomputes only the rank's shard of the input and gathers it again. The gradient of that shard is needed at once by the layer
before, the weight's is not; so with m the function that computes the input, communication overlaps both GEMMs of backward:

    computing       m (local shard)      g W               g^T x
    communicating                        all-gather x      reduce-scatter g W

If the weight's gradient waited for the backward of m, as it does without input communication, both would be exposed, one before
and one after m. Recomputing the shard by itself costs one more read of m's inputs: where a rank has 1 / ranks of the rows, 1 to
3 % of the time of one of the GEMMs. A target that defers weight gradients (zero-bubble schedules) changes that: then the shard is
recomputed within the backward of m, is held with g, and is gathered while the preceding weight gradient is computed.

The forward pass of a GEMM is a `GemmForward`. `GatherThenGemm` gathers the whole input, then multiplies it. Tensor parallelism
may replace it by one that overlaps communication with the GEMM chunk by chunk (`parallel/tensor_parallel.py`); backward is the
same.

R rows, D input width, O output width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from petatron.base.autograd_op import AutogradOp, first_derivative
from petatron.kernels.linear_gemms import PLAIN_GEMM, Gemm, Tensors, WeightGrad, grads_of_adapter
from petatron.kernels.row_sums import fastest_sum_rows
from petatron.layers.ops.recompute_output import (
    DeferredOutput,
    RecomputableFunction,
    RecomputableOutput,
    RecomputeHandle,
    as_recomputable,
)
from petatron.layers.token_rows import from_rows, is_batch_first, rows_in_memory_order, to_rows

WriteWeightGrad = Callable[[Tensor, bool], None]
"""(out, accumulate): writes a gradient to a tensor, or adds to it."""
PendingTensor = Callable[[], Tensor]
"""Waits for pending communication and returns its result."""


class WeightGradTarget(Protocol):
    """Receives weight gradients: accumulates them into `main_grad`, or queues them."""

    @property
    def defers(self) -> bool:
        """Whether submitted gradients are computed later."""
        ...

    def submit(
        self, weight: Tensor, write: WriteWeightGrad, *, now: bool = False, start_comm: Callable[[], None] | None = None
    ) -> None:
        """Calls `write` with the weight's gradient buffer, at once (always if `now`) or later.

        `start_comm` starts communication that `write` waits for; the target may call it before `write`, or not at all.
        """


class InputComm(Protocol):
    """Communication of a GEMM's input: all-gather of the rank's shard in forward, reduce-scatter of its gradient in backward."""

    def gather_input(self, x: Tensor) -> Tensor:
        """Returns the whole input."""
        ...

    def start_gather_input(self, x: Tensor) -> PendingTensor:
        """Starts the same asynchronously."""
        ...

    def start_reduce_input_grad(self, grad: Tensor) -> PendingTensor:
        """Starts to sum the whole input's gradient over the ranks and to return each rank's shard."""
        ...


class GemmResult(NamedTuple):
    """The result of a forward GEMM.

    gemm_input: the input of the whole GEMM, as `GemmForward.input_rows` expects it; saved for backward where needed.
    saved: what the `Gemm` saves instead of it, if anything. batch_first: the order of the rows.
    """

    y: Tensor
    gemm_input: Tensors
    saved: Tensors = ()
    batch_first: bool = False


class GemmForward(Protocol):
    """The forward pass of a GEMM with its communication."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, gemm: Gemm) -> GemmResult:
        """Multiplies; `x` is the input before communication, the result, with the bias, is after communication."""
        ...

    def input_rows(self, gemm_input: Tensors) -> Tensor:
        """Returns the input of the whole GEMM, [R, D]."""
        ...

    def output_grad(self, grad: Tensor) -> Tensor:
        """Returns the gradient of the whole GEMM's output from that of the output after communication."""
        ...


@dataclass(frozen=True, slots=True)
class GatherThenGemm:
    """Completes input communication, then runs one GEMM; has no output communication."""

    input_comm: InputComm | None = None

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, gemm: Gemm) -> GemmResult:
        x = x if self.input_comm is None else self.input_comm.gather_input(x)
        if x.dim() == 2:
            rows = x.contiguous()
            y, saved = gemm.forward(rows, weight, bias)
            return GemmResult(y, (rows,), saved)
        rows, batch_first = rows_in_memory_order(x)
        y, saved = gemm.forward(rows, weight, bias)
        return GemmResult(from_rows(y, x, batch_first=batch_first), (rows,), saved, batch_first)

    def input_rows(self, gemm_input: Tensors) -> Tensor:
        return gemm_input[0]

    def output_grad(self, grad: Tensor) -> Tensor:
        return grad


LOCAL_GEMM = GatherThenGemm()
"""One GEMM without communication."""


@dataclass(frozen=True, slots=True)
class GemmOp:
    """A GEMM as an autograd op; `weight_grad_target` None leaves weight gradients to autograd.

    requantizing_gemm: used for an input that is recomputed in backward, where that costs little; None: `gemm` is used for all.
    adapter_params: the parameters inside of `gemm`, which then is an `AdapterGemm`.
    """

    gemm: Gemm = PLAIN_GEMM
    weight_grad_target: WeightGradTarget | None = None
    requantizing_gemm: Gemm | None = None
    adapter_params: Tensors = ()

    def __call__(
        self,
        x: RecomputableOutput,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        input_comm: InputComm | None = None,
        gemm_forward: GemmForward | None = None,
    ) -> Tensor:
        """Multiplies `x`, the input before communication; `gemm_forward` None means `GatherThenGemm`."""
        if isinstance(x, DeferredOutput) and input_comm is None and gemm_forward is None and self._fuses(x):
            call = x.function, weight, bias, self.gemm, self.weight_grad_target, self.adapter_params
            *others, y = _FusedFunctionGemm.apply(call, *x.inputs)
            x.mark_applied(tuple(others))
            return y
        if gemm_forward is None:
            gemm_forward = LOCAL_GEMM if input_comm is None else GatherThenGemm(input_comm)
        value, handle = x.value, x.handle
        if not torch.is_grad_enabled():  # a node costs more than a small GEMM
            return gemm_forward.forward(value, weight, bias, self.gemm).y
        gemm = self.gemm
        if self.requantizing_gemm is not None and input_comm is None and handle is not None:
            gemm = self.requantizing_gemm if handle.function.requantized_in_backward else gemm
        # Autograd visits every parameter that is an input, also where its gradient goes to a target: then it is none, unless it alone
        # makes the output require a gradient.
        target = self.weight_grad_target
        in_node = target is None or not value.requires_grad
        call = _GemmCall(weight, bias, gemm, target, handle, input_comm, gemm_forward, self.adapter_params)
        node_params = self.adapter_params if in_node else ()
        return _GemmFunction.apply(value, weight if in_node else None, bias if in_node else None, call, *node_params)

    def add_bias(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """Adds a bias that the GEMM did not add; its gradient goes where that of a weight does."""
        if bias is None or not torch.is_grad_enabled():
            return y if bias is None else y + bias
        target = self.weight_grad_target
        in_node = target is None or not y.requires_grad
        return _AddBias.apply(y, bias if in_node else None, bias, target)

    def _fuses(self, x: DeferredOutput) -> bool:
        """Whether a function and the GEMM of its output are one node: it has no weight for autograd, and there is a node.

        Not in FP8, where the GEMM may cast its input a second time: the input is saved, or recomputed, by a node of its own.
        """
        return (
            self.weight_grad_target is not None
            and self.requantizing_gemm is None
            and x.others is None
            and x.inputs[0].requires_grad
            and torch.is_grad_enabled()
        )


class _GemmCall(NamedTuple):
    """One GEMM of a forward pass, as its backward needs it."""

    weight: Tensor
    bias: Tensor | None
    gemm: Gemm
    target: WeightGradTarget | None
    handle: RecomputeHandle | None
    input_comm: InputComm | None
    gemm_forward: GemmForward
    adapter_params: Tensors


_FusedCall = tuple[RecomputableFunction, Tensor, Tensor | None, Gemm, WeightGradTarget, Tensors]


class _GemmFunction(AutogradOp):
    """An adapter needs the input as it is, whatever the GEMM saves of it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        node_weight: Tensor | None,
        node_bias: Tensor | None,
        call: _GemmCall,
        *adapter_params: Tensor,
    ) -> Tensor:
        y, gemm_input, saved, ctx.batch_first = call.gemm_forward.forward(x, call.weight, call.bias, call.gemm)
        ctx.call, ctx.num_adapter_params = call, len(adapter_params)
        saves_input = call.handle is None and (not saved or call.adapter_params != ())
        ctx.num_input_tensors = len(gemm_input) if saves_input else 0
        ctx.save_for_backward(*(gemm_input if saves_input else ()), *saved)
        return y

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, bias, gemm, target, handle, input_comm, gemm_forward, adapter_params = ctx.call
        batch_first, saved, rows = ctx.batch_first, ctx.saved_tensors, None
        grad = gemm_forward.output_grad(grads[0])
        if count := ctx.num_input_tensors:
            rows, saved = gemm_forward.input_rows(saved[:count]), saved[count:]
        gemm_input = _GemmInput(rows, handle, input_comm, batch_first)
        if input_comm is not None and (adapter_params or (weight.requires_grad and not saved)):
            gemm_input.start_gather(target)
        bias_grad = None if bias is None else _submit_bias_grad(bias, grads[0], target, batch_first=batch_first)
        if grad.dim() == 2:
            x_grad, job = gemm.backward(grad.contiguous(), weight, saved)
        else:
            x_grad, job = gemm.backward(to_rows(grad, batch_first=batch_first), weight, saved)
            x_grad = from_rows(x_grad, grad, batch_first=batch_first)
        pending_grad = None
        if input_comm is not None and ctx.needs_input_grad[0]:
            pending_grad = input_comm.start_reduce_input_grad(x_grad)
        weight_grad = _submit_weight_grad(job, weight, target, gemm_input) if weight.requires_grad else None
        if not adapter_params:
            return x_grad if pending_grad is None else pending_grad(), weight_grad, bias_grad, None
        others = [_submit_weight_grad(other, param, target, gemm_input) for param, other in grads_of_adapter(job)]
        x_grad = x_grad if pending_grad is None else pending_grad()
        return x_grad, weight_grad, bias_grad, None, *others[: ctx.num_adapter_params]


class _FusedFunctionGemm(AutogradOp):
    """A recomputable function and the GEMM of its output in one node: the gradient of the one goes straight to the other."""

    @staticmethod
    def forward(ctx: Any, call: _FusedCall, *inputs: Tensor) -> Tensors:
        function, weight, bias, gemm = call[:4]
        (*others, value), saved = function.forward(*inputs)
        y, _, gemm_saved, ctx.batch_first = LOCAL_GEMM.forward(value, weight, bias, gemm)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved, *gemm_saved)
        ctx.call, ctx.num_saved, ctx.num_inputs = call, len(saved), len(inputs)
        return *others, y

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if grads[-1] is None and all(grad is None for grad in grads):  # what comes after has no gradient either
            return (None,) * (1 + ctx.num_inputs)
        function, weight, bias, gemm, target, adapter_params = ctx.call
        *other_grads, grad = grads
        saved, count, batch_first = ctx.saved_tensors, ctx.num_saved, ctx.batch_first
        weight_grads, output = (), None
        if grad is not None:
            grad_rows = grad.contiguous() if grad.dim() == 2 else to_rows(grad, batch_first=batch_first)
            if bias is not None:
                _submit_bias_grad(bias, grad_rows, target, batch_first=batch_first)
            x_grad, job = gemm.backward(grad_rows, weight, saved[count:])
            grad = x_grad if grad.dim() == 2 else from_rows(x_grad, grad, batch_first=batch_first)
            weight_grads = ((weight, job),) if weight.requires_grad else ()
            if adapter_params:
                weight_grads += grads_of_adapter(job)
        recompute = False
        for _, job in weight_grads:
            recompute = recompute or job.needs_input
        input_grads, output = function.backward(saved[:count], (*other_grads, grad), recompute_output=recompute)
        if weight_grads:
            rows = output if output is None or output.dim() == 2 else to_rows(output, batch_first=batch_first)
            for param, job in weight_grads:
                _submit(job, param, target, rows)
        return None, *input_grads[: ctx.num_inputs]


class _AddBias(AutogradOp):
    """y + b, by itself."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, node_bias: Tensor | None, bias: Tensor, target: WeightGradTarget | None) -> Tensor:
        ctx.bias, ctx.target = bias, target
        return y + bias

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        return grad, _submit_bias_grad(ctx.bias, grad, ctx.target, batch_first=is_batch_first(grad)), None, None


class _InputGather:
    """An all-gather of a GEMM's input, started or not."""

    __slots__ = ("_batch_first", "_input_comm", "_pending", "_value")

    def __init__(self, value: Tensor, input_comm: InputComm, *, batch_first: bool) -> None:
        self._value: Tensor | None = value
        self._input_comm, self._batch_first = input_comm, batch_first
        self._pending: PendingTensor | None = None

    def start(self) -> None:
        """Starts the all-gather; a second call does nothing."""
        if self._value is not None:
            self._pending, self._value = self._input_comm.start_gather_input(self._value), None

    def rows(self) -> Tensor:
        self.start()
        assert self._pending is not None
        return to_rows(self._pending(), batch_first=self._batch_first)


@dataclass(slots=True)
class _GemmInput:
    """The rows of a GEMM's input: saved, being gathered, or to be recomputed."""

    saved: Tensor | None
    handle: RecomputeHandle | None
    input_comm: InputComm | None
    batch_first: bool
    gather: _InputGather | None = None

    def start_gather(self, target: WeightGradTarget | None) -> None:
        """Recomputes and starts to gather the input, if it is used in this backward pass."""
        if self.saved is None and self.input_comm is not None and not (target is not None and target.defers):
            assert self.handle is not None
            self.gather = _InputGather(self.handle.recompute(), self.input_comm, batch_first=self.batch_first)
            self.gather.start()

    def of_value(self, value: Tensor) -> Tensor | _InputGather:
        """Returns the rows of a recomputed input, or the gather of them, which has not started."""
        if self.input_comm is None:
            return to_rows(value, batch_first=self.batch_first)
        return _InputGather(value, self.input_comm, batch_first=self.batch_first)

    def rows(self) -> Tensor:
        if self.saved is not None:
            return self.saved
        if self.gather is not None:
            return self.gather.rows()
        assert self.handle is not None
        return to_rows(self.handle.recompute(), batch_first=self.batch_first)


def _submit_weight_grad(
    weight_grad: WeightGrad, weight: Tensor, target: WeightGradTarget | None, gemm_input: _GemmInput
) -> Tensor | None:
    """Submits a weight's gradient to its target, once the input is available; without a target, returns it to autograd."""
    if target is None:
        out = torch.empty_like(weight)
        weight_grad.write(gemm_input.rows() if weight_grad.needs_input else None, out, False)
        return out
    submit = partial(_submit, weight_grad, weight, target)
    if gemm_input.gather is not None:
        submit(gemm_input.gather)
    elif weight_grad.needs_input and gemm_input.saved is None:
        assert gemm_input.handle is not None
        gemm_input.handle.on_recomputed(lambda value: submit(gemm_input.of_value(value)))
    else:
        submit(gemm_input.saved)
    return None


def _submit(
    weight_grad: WeightGrad, weight: Tensor, target: WeightGradTarget, rows: Tensor | _InputGather | None
) -> None:
    if not isinstance(rows, _InputGather):
        target.submit(weight, partial(weight_grad.write, rows))
        return

    def write(out: Tensor, accumulate: bool) -> None:
        weight_grad.write(rows.rows(), out, accumulate)

    target.submit(weight, write, start_comm=rows.start)


def _submit_bias_grad(
    bias: Tensor, grad: Tensor, target: WeightGradTarget | None, *, batch_first: bool
) -> Tensor | None:
    """Submits a bias's gradient to its target, from that of the output; without a target, returns it to autograd."""
    if not bias.requires_grad:
        return None
    rows = grad if grad.dim() == 2 else to_rows(grad, batch_first=batch_first)
    if target is None:
        out = torch.empty_like(bias)
        fastest_sum_rows(rows.device, rows.dtype)(rows, out, False)
        return out
    target.submit(bias, partial(fastest_sum_rows(rows.device, rows.dtype), rows), now=True)
    return None


def local_linear(x: Tensor | RecomputableOutput, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b on one device: the default of `linear_op` slots."""
    return DEFAULT_GEMM_OP(as_recomputable(x), weight, bias)


DEFAULT_GEMM_OP = GemmOp()
"""Runs in the precision of its operands, with weight gradients for autograd."""
