"""Normalisation over the last dimension, with the residual sum in front of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from petatron.config.schema.model import ModelConfig
from petatron.kernels import norm as reference
from petatron.layers.ops.linear_op import TakesWeightGrads
from petatron.layers.ops.recompute_output import MaybeTensors, Remade, Tensors, make
from petatron.layers.token_layout import batch_first, from_rows, to_rows

There = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""Total, its norm, statistics for the way back."""
Back = Callable[..., tuple[Tensor | None, ...]]
"""Gradients of the total and of the weights, and the norm again if it is wanted."""


class RMSNormKernels(Protocol):
    """`kernels/norm.py`, which has the signatures, or a faster twin."""

    @property
    def rms_norm(self) -> There: ...
    @property
    def rms_norm_backward(self) -> Back: ...


class LayerNormKernels(Protocol):
    """`kernels/norm.py`, which has the signatures, or a faster twin."""

    @property
    def layer_norm(self) -> There: ...
    @property
    def layer_norm_backward(self) -> Back: ...


@dataclass(frozen=True, slots=True)
class _MakeNorm:
    """(x, branch, weights ...) to (x + branch, its norm); `there` and `back` are the two kernels of a kind of norm."""

    there: There
    back: Back
    norm: RMSNorm | LayerNorm

    def forward(self, *inputs: Tensor | None) -> tuple[Tensors, Tensors]:
        x, branch, *weights = inputs
        assert x is not None
        by_batch = batch_first(x)
        rows, added = to_rows(x, by_batch=by_batch), None if branch is None else to_rows(branch, by_batch=by_batch)
        total, normal, statistics = self.there(
            rows, *weights, eps=self.norm.eps, from_one=self.norm.from_one, branch=added
        )
        total = x.view_as(x) if branch is None else from_rows(total, x, by_batch=by_batch)
        kept = (total, statistics, *(weight for weight in weights if weight is not None))
        return (total, from_rows(normal, x, by_batch=by_batch)), kept

    def backward(self, kept: Tensors, grads: MaybeTensors, *, again: bool) -> tuple[MaybeTensors, Tensor | None]:
        total, statistics, *weights = kept
        by_batch = batch_first(total)
        grad_total, grad = (None if grad is None else to_rows(grad, by_batch=by_batch) for grad in grads)
        rows = to_rows(total, by_batch=by_batch)
        grad = torch.zeros_like(rows) if grad is None else grad
        x_grad, *weight_grads, normal = self.back(
            grad, rows, statistics, *weights, from_one=self.norm.from_one, grad_total=grad_total, again=again
        )
        assert x_grad is not None
        x_grad = from_rows(x_grad, total, by_batch=by_batch)
        made = None if normal is None else from_rows(normal, total, by_batch=by_batch)
        return (x_grad, x_grad, *map(partial(give, self.norm), self.norm.parameters(), weight_grads)), made

    def again(self, kept: Tensors) -> Tensor:
        total, _, *weights = kept
        by_batch = batch_first(total)
        rows = to_rows(total, by_batch=by_batch)
        _, normal, _ = self.there(rows, *weights, eps=self.norm.eps, from_one=self.norm.from_one)
        return from_rows(normal, total, by_batch=by_batch)


def give(norm: RMSNorm | LayerNorm, weight: Tensor, grad: Tensor | None) -> Tensor | None:
    """A weight's gradient to the norm's taker, in the precision it was made in; without a taker, to autograd."""
    if grad is None or not weight.requires_grad:
        return None
    if norm.weight_grads is None:
        return grad.to(weight.dtype)
    norm.weight_grads.take(weight, lambda out, accumulate: out.add_(grad) if accumulate else out.copy_(grad), now=True)
    return None


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in at least float32; `from_one` says that weights are kept as an offset from one."""

    def __init__(self, width: int, *, eps: float, from_one: bool = False) -> None:
        super().__init__()
        self.eps, self.from_one = eps, from_one
        self.weight = nn.Parameter(torch.empty(width))
        self.kernels: RMSNormKernels = reference
        self.weight_grads: TakesWeightGrads | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.join(x)[1].value

    def join(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Remade]:
        """x + branch, and its norm."""
        maker = _MakeNorm(self.kernels.rms_norm, self.kernels.rms_norm_backward, self)
        (total, value), source = make(maker, x, branch, self.weight)
        return total, Remade(value, source)


class LayerNorm(nn.Module):
    """(x - mean) / standard deviation * weight + bias; `from_one` as above."""

    def __init__(self, width: int, *, eps: float, from_one: bool = False) -> None:
        super().__init__()
        self.eps, self.from_one = eps, from_one
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))
        self.kernels: LayerNormKernels = reference
        self.weight_grads: TakesWeightGrads | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.join(x)[1].value

    def join(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Remade]:
        """x + branch, and its norm."""
        maker = _MakeNorm(self.kernels.layer_norm, self.kernels.layer_norm_backward, self)
        (total, value), source = make(maker, x, branch, self.weight, self.bias)
        return total, Remade(value, source)


def build_norm(config: ModelConfig, width: int) -> RMSNorm | LayerNorm:
    kind = RMSNorm if config.normalization == "RMSNorm" else LayerNorm
    return kind(width, eps=config.norm_epsilon, from_one=config.apply_layernorm_1p)
