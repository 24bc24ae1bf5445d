"""Normalisation over the last dimension, fused with the residual addition before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from petatron.kernels import norm as reference
from petatron.layers.ops.linear_op import WeightGradSink
from petatron.layers.ops.recompute_output import MaybeTensors, Recomputable, Tensors, apply_recomputable
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.param_spec import ParamSpec
from petatron.layers.token_layout import from_rows, is_batch_first, to_rows
from petatron.sharding.initial_values import ONES, ZEROS
from petatron.sharding.shard_spec import Shard

NormForward = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""Returns the residual sum, its norm, and statistics for backward."""
NormBackward = Callable[..., tuple[Tensor | None, ...]]
"""Returns the gradients of the residual sum and of the weights, and the norm's output if recomputed."""


@dataclass(frozen=True, slots=True)
class _RecomputableNorm:
    """(x, branch, weights ...) to (x + branch, its norm), with the kernels of RMSNorm or LayerNorm."""

    forward_kernel: NormForward
    backward_kernel: NormBackward
    norm: Norm
    recast_in_fp8: bool = True

    def forward(self, *inputs: Tensor | None) -> tuple[Tensors, Tensors]:
        x, branch, *weights = inputs
        assert x is not None
        batch_first = is_batch_first(x)
        rows = to_rows(x, batch_first=batch_first)
        added = None if branch is None else to_rows(branch, batch_first=batch_first)
        total, normal, statistics = self.forward_kernel(
            rows, *weights, eps=self.norm.eps, zero_centered_gamma=self.norm.zero_centered_gamma, branch=added
        )
        total = x.view_as(x) if branch is None else from_rows(total, x, batch_first=batch_first)
        saved = (total, statistics, *cast("list[Tensor]", weights))
        return (total, from_rows(normal, x, batch_first=batch_first)), saved

    def backward(
        self, saved: Tensors, grads: MaybeTensors, *, recompute_output: bool
    ) -> tuple[MaybeTensors, Tensor | None]:
        total, statistics, *weights = saved
        batch_first = is_batch_first(total)
        grad_total, grad = (None if grad is None else to_rows(grad, batch_first=batch_first) for grad in grads)
        rows = to_rows(total, batch_first=batch_first)
        grad = torch.zeros_like(rows) if grad is None else grad
        x_grad, *weight_grads, normal = self.backward_kernel(
            grad,
            rows,
            statistics,
            *weights,
            zero_centered_gamma=self.norm.zero_centered_gamma,
            grad_total=grad_total,
            recompute_output=recompute_output,
        )
        assert x_grad is not None
        x_grad = from_rows(x_grad, total, batch_first=batch_first)
        out = None if normal is None else from_rows(normal, total, batch_first=batch_first)
        return (x_grad, x_grad, *map(partial(submit_norm_grad, self.norm), self.norm.parameters(), weight_grads)), out

    def recompute(self, saved: Tensors) -> Tensor:
        total, _, *weights = saved
        batch_first = is_batch_first(total)
        rows = to_rows(total, batch_first=batch_first)
        _, normal, _ = self.forward_kernel(
            rows, *weights, eps=self.norm.eps, zero_centered_gamma=self.norm.zero_centered_gamma
        )
        return from_rows(normal, total, batch_first=batch_first)


def submit_norm_grad(norm: Norm, weight: Tensor, grad: Tensor | None) -> Tensor | None:
    """Submits a norm weight's gradient to the norm's sink, in the precision it was computed in; without a sink, returns it to autograd."""
    if grad is None or not weight.requires_grad:
        return None
    if norm.weight_grad_sink is None:
        return grad.to(weight.dtype)
    norm.weight_grad_sink.submit(
        weight, lambda out, accumulate: out.add_(grad) if accumulate else out.copy_(grad), now=True
    )
    return None


class Norm(nn.Module):
    """A norm over the last dimension; with `zero_centered_gamma` the weight is stored as an offset from one.

    operation: its name in the kernel registry, and of its functions in `kernels/norm.py` and the faster implementations.
    """

    operation: ClassVar[str]

    def __init__(self, width: int, *, eps: float, zero_centered_gamma: bool = False) -> None:
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.weight = nn.Parameter(torch.empty(width))
        self.kernels: Any = reference
        self.weight_grad_sink: WeightGradSink | None = None

    def kernel_slots(self) -> Mapping[str, str]:
        return {"kernels": self.operation}

    def weights(self) -> tuple[Tensor, ...]:
        return (self.weight,)

    def forward(self, x: Tensor) -> Tensor:
        return self.add_and_norm(x)[1].value

    def add_and_norm(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Recomputable]:
        """Returns x + branch, and its norm."""
        kernels, operation = self.kernels, self.operation
        function = _RecomputableNorm(getattr(kernels, operation), getattr(kernels, f"{operation}_backward"), self)
        (total, value), handle = apply_recomputable(function, x, branch, *self.weights())
        return total, Recomputable(value, handle)


class RMSNorm(Norm):
    """x / rms(x) * weight, computed in at least float32."""

    operation = "rms_norm"


class LayerNorm(Norm):
    """(x - mean) / standard deviation * weight + bias; the bias may be missing."""

    operation = "layer_norm"

    def __init__(self, width: int, *, eps: float, zero_centered_gamma: bool = False, bias: bool = True) -> None:
        super().__init__(width, eps=eps, zero_centered_gamma=zero_centered_gamma)
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def weights(self) -> tuple[Tensor, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A norm over vectors of `width`. bias: whether a LayerNorm has one; an RMSNorm has none."""

    kind: Literal["RMSNorm", "LayerNorm"]
    width: int
    eps: float
    zero_centered_gamma: bool = False
    bias: bool = True

    def build(self) -> Norm:
        if self.kind == "RMSNorm":
            return RMSNorm(self.width, eps=self.eps, zero_centered_gamma=self.zero_centered_gamma)
        return LayerNorm(self.width, eps=self.eps, zero_centered_gamma=self.zero_centered_gamma, bias=self.bias)

    def params(self, *, partial_grad: Literal["sequence", "always"] = "sequence") -> dict[str, ParamSpec]:
        """Returns weight and bias; their gradients are partial sums under sequence parallelism, or always (of one rank's heads)."""
        shard = Shard(partial_grad=partial_grad)
        weight = ParamSpec(shape=(self.width,), shard=shard, init=ZEROS if self.zero_centered_gamma else ONES)
        bias = {} if self.kind == "RMSNorm" or not self.bias else {"bias": ParamSpec(shape=(self.width,), shard=shard)}
        return {"weight": weight} | bias

    def saved_bytes(self, shape: ActivationShape, rows: int) -> int:
        """Returns the bytes of input and statistics."""
        return shape.activation_bytes(rows, self.width) + self.statistics_bytes(shape, rows)

    def statistics_bytes(self, shape: ActivationShape, rows: int) -> int:
        return (2 if self.kind == "LayerNorm" else 1) * rows * shape.compute_bytes
