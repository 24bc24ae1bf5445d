"""Recomputes the outputs of norms and activation functions in backward instead of saving them.

Such an output is a GEMM's input, and backward needs it for one thing only: the weight's gradient. It would be a third of what a
layer saves. Instead the function saves its own inputs (which its backward needs anyway), and the GEMM registers its
weight-gradient computation with it:

    forward     x --function--> output --GEMM--> y                saved: x
    backward    GEMM: gradient of the output from that of y; the weight gradient is deferred to the function's backward
                function: one pass over x gives the gradient of x and the output; then the weight gradient; both are freed

So recompute costs no read and one write. Where that GEMM is the output's only consumer, function and GEMM are one autograd node
(`DeferredOutput`). An output that is needed earlier (by a recomputed region, to be gathered over ranks, by a gradient that autograd
wants at once) is recomputed by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from petatron.base.autograd_op import AutogradOp, first_derivative

Tensors = tuple[Tensor, ...]
MaybeTensors = tuple[Tensor | None, ...]


class SavedTensorsHook:
    """A module whose function may be applied in another module, with the GEMM of its output; `on_saved` receives the tensors it saves."""

    on_saved: Callable[[Tensors], None] | None = None

    def report_saved(self, saved: Tensors) -> Tensors:
        """Calls `on_saved`, if it is set, with the saved tensors, and returns them."""
        if self.on_saved is not None:
            self.on_saved(saved)
        return saved


class RecomputableFunction(Protocol):
    """A function of rows with its derivative. The tensors it saves for backward suffice to recompute its output.

    requantized_in_backward: whether an FP8 GEMM of its output saves none of it, and quantizes the recomputed output again. Else it saves
    its own cast.

    A module has one, and calls it in every forward pass.
    """

    @property
    def requantized_in_backward(self) -> bool: ...

    def forward(self, *inputs: Tensor) -> tuple[Tensors, Tensors]:
        """Returns the outputs, the recomputable one last, and the tensors to save."""
        ...

    def backward(
        self, saved: Tensors, grads: MaybeTensors, *, recompute_output: bool
    ) -> tuple[MaybeTensors, Tensor | None]:
        """Returns the inputs' gradients from those of the outputs, and the recomputed output if asked for.

        Gradients beyond those of the inputs that were given are ignored.
        """
        ...

    def recompute(self, saved: Tensors) -> Tensor:
        """Recomputes the output from the saved tensors."""
        ...


class RecomputeHandle:
    """One call of a `RecomputableFunction`: recomputes its output for the consumers registered in backward."""

    __slots__ = ("_consumers", "_expected", "_node", "_output", "_saved", "_uses_left", "function")

    def __init__(self, function: RecomputableFunction) -> None:
        self.function = function
        self._node: Callable[[], Any] = lambda: None
        self._consumers: list[Callable[[Tensor], None]] = []
        self._saved: Tensors | None = None
        self._output: Tensor | None = None
        self._expected = self._uses_left = 0

    def attach_node(self, node: Any) -> None:
        """Refers to the node with the saved tensors. Weakly: the node holds this object."""
        self._node = weakref.ref(node)

    def on_recomputed(self, consumer: Callable[[Tensor], None]) -> None:
        """Registers a consumer, called with the output during the function's backward."""
        self._consumers.append(consumer)

    def recompute(self) -> Tensor:
        """Recomputes the output now."""
        if self._saved is None:  # unpacked once: in a recomputed region unpacking runs the region
            node = self._node()
            assert node is not None, "the graph that the value belongs to is gone"
            self._saved = node.saved_tensors
        return self.function.recompute(self._saved)  # pyright: ignore[reportArgumentType]

    def retain_output(self) -> None:
        """Announces one `take_output` in backward, in place of saving the output."""
        self._expected += 1

    def take_output(self) -> Tensor:
        """Returns the output, recomputed once and freed with the last announced use."""
        if self._output is None:
            self._output, self._uses_left = self.recompute(), self._expected
        self._uses_left -= 1
        output = self._output
        if self._uses_left <= 0:
            self._output = None
        return output

    def run_backward(self, node: Any, grads: MaybeTensors) -> MaybeTensors:
        """Runs the function's backward, then the registered consumers with the recomputed output."""
        consumers, self._consumers = self._consumers, []
        saved, self._saved = node.saved_tensors if self._saved is None else self._saved, None
        inputs, output = self.function.backward(saved, grads, recompute_output=bool(consumers))
        for consumer in consumers:
            assert output is not None
            consumer(output)
        return inputs


class RecomputableOutput:
    """An output with the handle that recomputes it; `handle` None means that a consumer must save it."""

    __slots__ = ("handle", "value")

    def __init__(self, value: Tensor, handle: RecomputeHandle | None) -> None:
        self.value, self.handle = value, handle

    def apply(self) -> RecomputableOutput:
        """Returns the output of a function that has been applied: this one."""
        return self


class _RecomputableOp(AutogradOp):
    @staticmethod
    def forward(ctx: Any, handle: RecomputeHandle, *inputs: Tensor) -> Tensors:
        outputs, saved = handle.function.forward(*inputs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        ctx.handle, ctx.inputs = handle, len(inputs)
        handle.attach_node(ctx)
        return outputs

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor | None) -> MaybeTensors:
        for grad in grads:
            if grad is not None:  # autograd drops the gradients of inputs that need none
                return None, *ctx.handle.run_backward(ctx, grads)[: ctx.inputs]
        return (None,) * (1 + ctx.inputs)


def apply_recomputable(function: RecomputableFunction, *inputs: Tensor) -> tuple[Tensors, RecomputeHandle | None]:
    """Applies the function; returns its outputs, the recomputable one last. Handle None: nothing requires grad, so no backward."""
    if not torch.is_grad_enabled():
        return function.forward(*inputs)[0], None
    handle = RecomputeHandle(function)
    outputs: Tensors = _RecomputableOp.apply(handle, *inputs)
    return outputs, handle if outputs[-1].requires_grad else None


class DeferredOutput(RecomputableOutput):
    """The output of a function that is not applied yet, so that the one GEMM which takes it can apply both in one autograd node.

    Whoever asks for the value or the handle has the function applied by itself. `others`: its outputs before the recomputable one.
    """

    __slots__ = ("_applied", "function", "inputs", "others")

    def __init__(self, function: RecomputableFunction, *inputs: Tensor) -> None:
        self.function = function
        self.inputs: Tensors = inputs
        self.others: Tensors | None = None
        self._applied: RecomputableOutput | None = None

    @property
    def value(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.apply().value

    @property
    def handle(self) -> RecomputeHandle | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.apply().handle

    def apply(self) -> RecomputableOutput:
        """Applies the function by itself, once."""
        if self._applied is None:
            assert self.others is None, "a GEMM has applied the function, and its output is gone"
            (*others, value), handle = apply_recomputable(self.function, *self.inputs)
            self._applied = RecomputableOutput(value, handle)
            self.mark_applied(tuple(others))
        return self._applied

    def mark_applied(self, others: Tensors) -> None:
        """Marks the function as applied, with its outputs before the recomputable one."""
        self.others, self.inputs = others, ()


class SavedViewFunction:
    """A function whose output is a view of its input, and is saved; by itself the identity."""

    requantized_in_backward = True

    __slots__ = ()

    def forward(self, *inputs: Tensor) -> tuple[Tensors, Tensors]:
        (x,) = inputs
        return (x.view_as(x),), (x,)

    def backward(
        self, saved: Tensors, grads: MaybeTensors, *, recompute_output: bool
    ) -> tuple[MaybeTensors, Tensor | None]:
        return grads, saved[0] if recompute_output else None

    def recompute(self, saved: Tensors) -> Tensor:
        return saved[0]


_IDENTITY = SavedViewFunction()


def as_recomputable(x: Tensor | RecomputableOutput) -> RecomputableOutput:
    """Wraps a tensor as an output that is saved before it is used.

    Autograd saves the operands of its own GEMMs before it multiplies, so a recomputed region that ends with a GEMM need not
    repeat it; this does the same.
    """
    if isinstance(x, RecomputableOutput):
        return x
    if not torch.is_grad_enabled():
        return RecomputableOutput(x, None)
    (value,), handle = apply_recomputable(_IDENTITY, x)
    return RecomputableOutput(value, handle)
