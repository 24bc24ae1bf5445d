"""Values that nobody keeps: what is cheap to compute is made again in the backward pass.

The output of a norm or an activation function goes into a product, which needs it again for one thing only: the weight's
gradient. It would be a third of everything a layer keeps. Instead its maker keeps what it was made of (which its own backward
pass needs anyway), and the product leaves the rest of its work with the maker:

    forward     x --maker--> value --product--> y              kept: x
    backward    product: gradient of value from that of y; the weight's gradient is left waiting with the maker
                maker: in one pass over x, the gradient of x and the value again; then the weight's gradient, and both are let go

So making it again costs no reading, one writing. A value that is wanted earlier (by a recomputed region, to be gathered over
ranks, by a gradient that autograd wants at once) is made by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Tensors = tuple[Tensor, ...]
MaybeTensors = tuple[Tensor | None, ...]


class RecomputableFunction(Protocol):
    """A function of rows with its derivative. What it keeps for that is enough to compute the value a second time."""

    def forward(self, *inputs: Tensor | None) -> tuple[Tensors, Tensors]:
        """Outputs, the value last, and what to keep."""
        ...

    def backward(
        self, saved: Tensors, grads: MaybeTensors, *, recompute_output: bool
    ) -> tuple[MaybeTensors, Tensor | None]:
        """Gradients of the inputs from those of the outputs, and the value if it is wanted again."""
        ...

    def recompute(self, saved: Tensors) -> Tensor:
        """The value."""
        ...


class RecomputeHandle:
    """One use of a maker: what waits for its value in the backward pass."""

    __slots__ = ("_consumers", "_expected", "_node", "_output", "_saved", "_uses_left", "function")

    def __init__(self, function: RecomputableFunction) -> None:
        self.function = function
        self._node: Callable[[], Any] = _no_node
        self._consumers: list[Callable[[Tensor], None]] = []
        self._saved: Tensors | None = None
        self._output: Tensor | None = None
        self._expected = self._uses_left = 0

    def attach_node(self, node: Any) -> None:
        """Remember where the kept tensors are. Weakly: the node holds this object."""
        self._node = weakref.ref(node)

    def on_recomputed(self, consumer: Callable[[Tensor], None]) -> None:
        """Have something done with the value in the maker's backward pass."""
        self._consumers.append(consumer)

    def recompute(self) -> Tensor:
        """The value now."""
        return self.function.recompute(self._load_saved())

    def _load_saved(self) -> Tensors:
        """What the maker kept, asked for once: in a recomputed region asking makes the region run."""
        if self._saved is None:
            node = self._node()
            assert node is not None, "the graph that the value belongs to is gone"
            self._saved = node.saved_tensors
        assert self._saved is not None
        return self._saved

    def expect_output(self) -> None:
        """Someone will fetch the value in the backward pass, instead of keeping it."""
        self._expected += 1

    def fetch_output(self) -> Tensor:
        """The value, let go with the last of the uses that are expected."""
        if self._output is None:
            self._output, self._uses_left = self.recompute(), self._expected
        self._uses_left -= 1
        made = self._output
        if self._uses_left <= 0:
            self._output = None
        return made

    def run_backward(self, grads: MaybeTensors) -> MaybeTensors:
        """The maker's backward pass, and with the value at hand, what waited for it."""
        waiting, self._consumers = self._consumers, []
        kept, self._saved = self._load_saved(), None
        inputs, value = self.function.backward(kept, grads, recompute_output=bool(waiting))
        for use in waiting:
            assert value is not None
            use(value)
        return inputs


def _no_node() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Recomputable:
    """A value, and where it can be had again; `handle` None means that whoever needs it must keep it."""

    value: Tensor
    handle: RecomputeHandle | None


class _RecomputableOp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: RecomputeHandle, *inputs: Tensor | None) -> Tensors:
        outputs, kept = handle.function.forward(*inputs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*kept)
        ctx.handle, ctx.inputs = handle, len(inputs)
        handle.attach_node(ctx)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> MaybeTensors:
        if all(grad is None for grad in grads):
            return (None,) * (1 + ctx.inputs)
        found = ctx.handle.run_backward(grads)
        return None, *(grad if wanted else None for grad, wanted in zip(found, ctx.needs_input_grad[1:], strict=True))


def apply_recomputable(
    function: RecomputableFunction, *inputs: Tensor | None
) -> tuple[Tensors, RecomputeHandle | None]:
    """The maker's outputs, the value last; no source where nothing of it is differentiated, since then it has no backward."""
    source = RecomputeHandle(function)
    outputs: Tensors = _RecomputableOp.apply(source, *inputs)  # pyright: ignore[reportAssignmentType]
    return outputs, source if outputs[-1].requires_grad else None


class _Identity:
    """Makes nothing: the value is the input, which is kept."""

    def forward(self, *inputs: Tensor | None) -> tuple[Tensors, Tensors]:
        (x,) = inputs
        assert x is not None
        return (x.view_as(x),), (x,)

    def backward(
        self, saved: Tensors, grads: MaybeTensors, *, recompute_output: bool
    ) -> tuple[MaybeTensors, Tensor | None]:
        return grads, saved[0] if recompute_output else None

    def recompute(self, saved: Tensors) -> Tensor:
        return saved[0]


_IDENTITY = _Identity()


def as_recomputable(x: Tensor | Recomputable) -> Recomputable:
    """A tensor as a value that is kept where it was made, before it is used.

    Autograd keeps the operands of its own products before it multiplies, so that a region which ends with a product need not
    repeat that; this does the same.
    """
    if isinstance(x, Recomputable):
        return x
    (value,), source = apply_recomputable(_IDENTITY, x)
    return Recomputable(value, source)
