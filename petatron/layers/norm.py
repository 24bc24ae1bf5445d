"""Normalization over the last dimension, fused with the residual addition before it, and RMSNorm over all heads of a projection.

The norm over all heads (OLMo 2) includes the heads on other tensor-parallel ranks. With N channels over all tensor-parallel ranks, s
the sum of their squares and r = (s / N + eps)^(-1/2):

    y = x r w        dx = r w dy - x r^3 / N sum(w dy x)        dw = sum over tokens of x r dy

The two sums over channels are all-reduced, one number per token each. Several ranks that share a kv head all count it, so both
sums are divided by the number of these ranks; its gradient is a partial sum on each, like all gradients of a shared head.

S sequence, B batch, H heads of this rank, E head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from petatron.base.autograd_op import AutogradOp, first_derivative
from petatron.kernels import norm as reference
from petatron.kernels.compute_dtype import compute_dtype
from petatron.kernels.fp8.amax import attach_amax, new_amax
from petatron.layers.ops.linear_op import WeightGradTarget
from petatron.layers.ops.recompute_output import (
    DeferredOutput,
    MaybeTensors,
    RecomputableOutput,
    SavedTensorsHook,
    Tensors,
    apply_recomputable,
)
from petatron.layers.parallel_slots import CommSlot, TensorRank, TensorSlot, identity
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.param_spec import ParamSpec
from petatron.layers.token_rows import from_rows, rows_in_memory_order, to_rows
from petatron.sharding.initial_values import ONES, ZEROS
from petatron.sharding.shard_spec import Shard


class _RecomputableNorm:
    """(x, branch) to (x + branch, its norm), or x to (x, its norm), with the kernels of RMSNorm or LayerNorm.

    Weights are inputs too where autograd is to get their gradients.
    """

    requantized_in_backward = True

    __slots__ = ("_adds", "_norm")

    def __init__(self, norm: Norm, *, adds: bool) -> None:
        self._norm, self._adds = norm, adds

    def forward(self, *inputs: Tensor) -> tuple[Tensors, Tensors]:
        norm, x, branch = self._norm, inputs[0], inputs[1] if self._adds else None
        weights, is_rows, batch_first = norm.weights(), x.dim() == 2, False
        rows = x
        if not is_rows:
            rows, batch_first = rows_in_memory_order(x)
            branch = None if branch is None else to_rows(branch, batch_first=batch_first)
        amax = new_amax(x) if norm.attaches_amax and is_rows else None
        residual, normed, statistics = getattr(norm.kernels, norm.operation)(
            rows,
            *weights,
            eps=norm.eps,
            zero_centered_gamma=norm.zero_centered_gamma,
            branch=branch,
            **({} if amax is None else {"amax": amax}),
        )
        if branch is None:
            residual = x.view_as(x)
        elif not is_rows:
            residual = from_rows(residual, x, batch_first=batch_first)
        normed = normed if is_rows else from_rows(normed, x, batch_first=batch_first)
        if amax is not None:
            attach_amax(normed, amax)
        # Autograd would detach a saved output itself, and once more in backward.
        return (residual, normed), norm.report_saved((residual.detach(), statistics, *weights))

    def backward(
        self, saved: Tensors, grads: MaybeTensors, *, recompute_output: bool
    ) -> tuple[MaybeTensors, Tensor | None]:
        norm, residual, (grad_residual, grad) = self._norm, saved[0], grads
        rows, is_rows, batch_first = residual, residual.dim() == 2, False
        if not is_rows:
            rows, batch_first = rows_in_memory_order(residual)
            grad = None if grad is None else to_rows(grad, batch_first=batch_first)
            grad_residual = None if grad_residual is None else to_rows(grad_residual, batch_first=batch_first)
        amax = new_amax(residual) if norm.attaches_amax and is_rows else None
        x_grad, weight_grads, normed = norm.run_backward(
            torch.zeros_like(rows) if grad is None else grad,
            rows,
            *saved[1:],
            zero_centered_gamma=norm.zero_centered_gamma,
            grad_residual=grad_residual,
            recompute_output=recompute_output,
            **({} if amax is None else {"amax": amax}),
        )
        if amax is not None:
            attach_amax(x_grad, amax)
        if not is_rows:
            x_grad = from_rows(x_grad, residual, batch_first=batch_first)
            normed = None if normed is None else from_rows(normed, residual, batch_first=batch_first)
        return ((x_grad, x_grad, *weight_grads) if self._adds else (x_grad, *weight_grads)), normed

    def recompute(self, saved: Tensors) -> Tensor:
        norm, residual = self._norm, saved[0]
        rows, batch_first = rows_in_memory_order(residual)
        _, normed, _ = getattr(norm.kernels, norm.operation)(
            rows, *saved[2:], eps=norm.eps, zero_centered_gamma=norm.zero_centered_gamma
        )
        return from_rows(normed, residual, batch_first=batch_first)


def submit_norm_grad(norm: NormWeights, weight: Tensor, grad: Tensor | None) -> Tensor | None:
    """Submits a norm weight's gradient to its target, in the precision it was computed in; returns it to autograd where there is none."""
    if grad is None or not weight.requires_grad:
        return None
    if norm.weight_grad_target is None:
        return grad.to(weight.dtype)
    norm.weight_grad_target.submit(
        weight, lambda out, accumulate: out.add_(grad) if accumulate else out.copy_(grad), now=True
    )
    return None


class NormWeights(nn.Module):
    """What every norm has; with `zero_centered_gamma` the weight is stored as an offset from one."""

    tensor_slots: Mapping[str, TensorSlot] = {"weight_grad_target": "weight-gradient target"}

    def __init__(self, width: int, *, eps: float, zero_centered_gamma: bool = False) -> None:
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.weight = nn.Parameter(torch.empty(width))
        self.weight_grad_target: WeightGradTarget | None = None

    def weights(self) -> tuple[nn.Parameter, ...]:
        """Returns the weight, and the bias if there is one."""
        return tuple(self._parameters.values())  # pyright: ignore[reportReturnType]


class Norm(NormWeights, SavedTensorsHook):
    """A norm over the last dimension, whose output a GEMM can recompute.

    operation: its name in the kernel registry, and that of its function in `kernels/norm.py` and the faster implementations;
    `backward_operation` is its derivative there. attaches_amax: whether it attaches amax to its output and to its input's gradient, for
    FP8 casts (`kernels/fp8/amax.py`), which RMSNorm's kernels can.
    """

    operation: ClassVar[str]
    backward_operation: ClassVar[str]

    def __init__(self, width: int, *, eps: float, zero_centered_gamma: bool = False) -> None:
        super().__init__(width, eps=eps, zero_centered_gamma=zero_centered_gamma)
        self.kernels: Any = reference
        self.attaches_amax = False
        self._norm_of_input = _RecomputableNorm(self, adds=False)
        self._norm_of_sum = _RecomputableNorm(self, adds=True)

    def kernel_slots(self) -> Mapping[str, str]:
        return {"kernels": self.operation}

    def run_backward(self, *args: Any, **options: Any) -> tuple[Tensor, MaybeTensors, Tensor | None]:
        """Runs the derivative's kernel; returns the input's gradient, those of weights that autograd gets, and the output if asked for."""
        x_grad, *weight_grads, normed = getattr(self.kernels, self.backward_operation)(*args, **options)
        return x_grad, tuple(map(submit_norm_grad, repeat(self), self.weights(), weight_grads)), normed

    def forward(self, x: Tensor) -> Tensor:
        return self.add_and_norm(x)[1].value

    def add_and_norm(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, RecomputableOutput]:
        """Returns x + branch, and its norm."""
        function, inputs = self._function_and_inputs(x, branch)
        (residual, value), handle = apply_recomputable(function, *inputs)
        return residual, RecomputableOutput(value, handle)

    def deferred_norm(self, x: Tensor, branch: Tensor | None = None) -> DeferredOutput:
        """Returns the norm of x + branch, to be computed with the GEMM that takes it; its other output is the sum."""
        function, inputs = self._function_and_inputs(x, branch)
        return DeferredOutput(function, *inputs)

    def _function_and_inputs(self, x: Tensor, branch: Tensor | None) -> tuple[_RecomputableNorm, Tensors]:
        function, inputs = (self._norm_of_input, (x,)) if branch is None else (self._norm_of_sum, (x, branch))
        if self.weight_grad_target is None or not x.requires_grad:
            inputs += self.weights()
        return function, inputs


class RMSNorm(Norm):
    """x / rms(x) * weight, computed in at least float32."""

    operation, backward_operation = "rms_norm", "rms_norm_backward"

    def run_backward(self, *args: Any, **options: Any) -> tuple[Tensor, MaybeTensors, Tensor | None]:
        (weight,), target = self.weights(), self.weight_grad_target
        if target is None or not weight.requires_grad:
            return super().run_backward(*args, **options)
        submit = partial(target.submit, weight, now=True)
        x_grad, _, normed = self.kernels.rms_norm_backward(*args, **options, submit_weight_grad=submit)
        return x_grad, (None,), normed


class LayerNorm(Norm):
    """(x - mean) / standard deviation * weight + bias; the bias may be missing."""

    operation, backward_operation = "layer_norm", "layer_norm_backward"

    def __init__(self, width: int, *, eps: float, zero_centered_gamma: bool = False, bias: bool = True) -> None:
        super().__init__(width, eps=eps, zero_centered_gamma=zero_centered_gamma)
        self.bias = nn.Parameter(torch.empty(width)) if bias else None


class _ProjectionNorm(AutogradOp):
    @staticmethod
    def forward(ctx: Any, x_SBHE: Tensor, weight: Tensor, norm: ProjectionRMSNorm) -> Tensor:
        wide = x_SBHE.to(compute_dtype(x_SBHE.dtype))
        scale_SB = (norm.sum_over_ranks(wide.square().sum((-2, -1))) / norm.width + norm.eps).rsqrt()
        ctx.save_for_backward(x_SBHE, weight, scale_SB)
        ctx.norm = norm
        return (wide * scale_SB[..., None, None] * norm.effective_weight_HE(weight, wide)).to(x_SBHE.dtype)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_SBHE, weight, scale_SB = ctx.saved_tensors
        norm: ProjectionRMSNorm = ctx.norm
        x = x_SBHE.to(scale_SB.dtype)
        grad, scale = grads[0].to(x.dtype), scale_SB[..., None, None]
        weight_grad = (grad * x * scale).flatten(0, -3).sum(0).flatten()
        grad = grad * norm.effective_weight_HE(weight, x)
        dot = norm.sum_over_ranks((grad * x).sum((-2, -1)))[..., None, None]
        x_grad = scale * grad - x * scale.pow(3) * dot / norm.width
        return x_grad.to(x_SBHE.dtype), submit_norm_grad(norm, norm.weight, weight_grad), None


class ProjectionRMSNorm(NormWeights):
    """x / rms(x) * weight for x [S, B, H, E], the mean square being over all heads of all ranks; `width` counts their channels."""

    tensor_slots: Mapping[str, TensorSlot] = {**NormWeights.tensor_slots, "tensor_rank": "tensor rank"}
    group_sum_slots: Mapping[str, int] = {"all_reduce": 1}

    def __init__(self, width: int, *, eps: float, zero_centered_gamma: bool = False) -> None:
        super().__init__(width, eps=eps, zero_centered_gamma=zero_centered_gamma)
        self.width = width
        self.all_reduce: CommSlot = identity
        self.tensor_rank: TensorRank = (0, 1)

    def forward(self, x: Tensor) -> Tensor:
        return _ProjectionNorm.apply(x, self.weight, self)  # pyright: ignore[reportReturnType]

    def effective_weight_HE(self, weight: Tensor, like_SBHE: Tensor) -> Tensor:
        effective = weight.to(like_SBHE.dtype).view(like_SBHE.shape[-2:])
        return effective + 1.0 if self.zero_centered_gamma else effective

    def sum_over_ranks(self, partial_sum_SB: Tensor) -> Tensor:
        replicas = self.tensor_rank[1] * self.weight.numel() / self.width
        return self.all_reduce(partial_sum_SB.contiguous()) / replicas


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
