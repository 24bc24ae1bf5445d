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


class Maker(Protocol):
    """A function of rows with its derivative. What it keeps for that is enough to compute the value a second time."""

    def forward(self, *inputs: Tensor | None) -> tuple[Tensors, Tensors]:
        """Outputs, the value last, and what to keep."""
        ...

    def backward(self, kept: Tensors, grads: MaybeTensors, *, again: bool) -> tuple[MaybeTensors, Tensor | None]:
        """Gradients of the inputs from those of the outputs, and the value if it is wanted again."""
        ...

    def again(self, kept: Tensors) -> Tensor:
        """The value."""
        ...


class Source:
    """One use of a maker: what waits for its value in the backward pass."""

    __slots__ = ("_expected", "_kept", "_left", "_made", "_node", "_waiting", "maker")

    def __init__(self, maker: Maker) -> None:
        self.maker = maker
        self._node: Callable[[], Any] = _nothing
        self._waiting: list[Callable[[Tensor], None]] = []
        self._kept: Tensors | None = None
        self._made: Tensor | None = None
        self._expected = self._left = 0

    def lives_in(self, node: Any) -> None:
        """Remember where the kept tensors are. Weakly: the node holds this object."""
        self._node = weakref.ref(node)

    def when_made(self, use: Callable[[Tensor], None]) -> None:
        """Have something done with the value in the maker's backward pass."""
        self._waiting.append(use)

    def again(self) -> Tensor:
        """The value now."""
        return self.maker.again(self._take_kept())

    def _take_kept(self) -> Tensors:
        """What the maker kept, asked for once: in a recomputed region asking makes the region run."""
        if self._kept is None:
            node = self._node()
            assert node is not None, "the graph that the value belongs to is gone"
            self._kept = node.saved_tensors
        assert self._kept is not None
        return self._kept

    def expect_output(self) -> None:
        """Someone will fetch the value in the backward pass, instead of keeping it."""
        self._expected += 1

    def fetch_output(self) -> Tensor:
        """The value, let go with the last of the uses that are expected."""
        if self._made is None:
            self._made, self._left = self.again(), self._expected
        self._left -= 1
        made = self._made
        if self._left <= 0:
            self._made = None
        return made

    def finish(self, grads: MaybeTensors) -> MaybeTensors:
        """The maker's backward pass, and with the value at hand, what waited for it."""
        waiting, self._waiting = self._waiting, []
        kept, self._kept = self._take_kept(), None
        inputs, value = self.maker.backward(kept, grads, again=bool(waiting))
        for use in waiting:
            assert value is not None
            use(value)
        return inputs


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Remade:
    """A value, and where it can be had again; `source` None means that whoever needs it must keep it."""

    value: Tensor
    source: Source | None


class _Make(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Source, *inputs: Tensor | None) -> Tensors:
        outputs, kept = source.maker.forward(*inputs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*kept)
        ctx.source, ctx.inputs = source, len(inputs)
        source.lives_in(ctx)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> MaybeTensors:
        if all(grad is None for grad in grads):
            return (None,) * (1 + ctx.inputs)
        found = ctx.source.finish(grads)
        return None, *(grad if wanted else None for grad, wanted in zip(found, ctx.needs_input_grad[1:], strict=True))


def make(maker: Maker, *inputs: Tensor | None) -> tuple[Tensors, Source | None]:
    """The maker's outputs, the value last; no source where nothing of it is differentiated, since then it has no backward."""
    source = Source(maker)
    outputs: Tensors = _Make.apply(source, *inputs)  # pyright: ignore[reportAssignmentType]
    return outputs, source if outputs[-1].requires_grad else None


class _Same:
    """Makes nothing: the value is the input, which is kept."""

    def forward(self, *inputs: Tensor | None) -> tuple[Tensors, Tensors]:
        (x,) = inputs
        assert x is not None
        return (x.view_as(x),), (x,)

    def backward(self, kept: Tensors, grads: MaybeTensors, *, again: bool) -> tuple[MaybeTensors, Tensor | None]:
        return grads, kept[0] if again else None

    def again(self, kept: Tensors) -> Tensor:
        return kept[0]


_SAME = _Same()


def remade(x: Tensor | Remade) -> Remade:
    """A tensor as a value that is kept where it was made, before it is used.

    Autograd keeps the operands of its own products before it multiplies, so that a region which ends with a product need not
    repeat that; this does the same.
    """
    if isinstance(x, Remade):
        return x
    (value,), source = make(_SAME, x)
    return Remade(value, source)
