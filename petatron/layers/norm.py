"""Normalisation over the last dimension, with the residual sum in front of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from petatron.config.schema import ModelConfig
from petatron.kernels import norm as reference
from petatron.layers.remade import MaybeTensors, Remade, Tensors, make
from petatron.layers.rows import batch_first, from_rows, to_rows


class RMSNormKernels(Protocol):
    """`kernels/norm.py` or a faster twin."""

    def rms_norm(
        self, x_RD: Tensor, weight_D: Tensor, *, eps: float, from_one: bool, branch: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def rms_norm_backward(
        self,
        grad_RD: Tensor,
        total_RD: Tensor,
        rstd_R: Tensor,
        weight_D: Tensor,
        *,
        from_one: bool,
        grad_total: Tensor | None = None,
        again: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor | None]: ...


class LayerNormKernels(Protocol):
    """`kernels/norm.py` or a faster twin."""

    def layer_norm(
        self,
        x_RD: Tensor,
        weight_D: Tensor,
        bias_D: Tensor,
        *,
        eps: float,
        from_one: bool,
        branch: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def layer_norm_backward(
        self,
        grad_RD: Tensor,
        total_RD: Tensor,
        statistics: Tensor,
        weight_D: Tensor,
        bias_D: Tensor,
        *,
        from_one: bool,
        grad_total: Tensor | None = None,
        again: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]: ...


@dataclass(frozen=True, slots=True)
class _MakeNorm:
    """(x, branch, weights ...) to (x + branch, its norm); `there` and `back` are the two kernels of a kind of norm."""

    there: Callable[..., tuple[Tensor, Tensor, Tensor]]
    back: Callable[..., tuple[Tensor | None, ...]]
    eps: float
    from_one: bool

    def forward(self, *inputs: Tensor | None) -> tuple[Tensors, Tensors]:
        x, branch, *weights = inputs
        assert x is not None
        by_batch = batch_first(x)
        rows, added = to_rows(x, by_batch=by_batch), None if branch is None else to_rows(branch, by_batch=by_batch)
        total, normal, statistics = self.there(rows, *weights, eps=self.eps, from_one=self.from_one, branch=added)
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
            grad, rows, statistics, *weights, from_one=self.from_one, grad_total=grad_total, again=again
        )
        assert x_grad is not None
        x_grad = from_rows(x_grad, total, by_batch=by_batch)
        made = None if normal is None else from_rows(normal, total, by_batch=by_batch)
        narrow = [
            None if found is None else found.to(weight.dtype)
            for found, weight in zip(weight_grads, weights, strict=True)
        ]
        return (x_grad, x_grad, *narrow), made

    def again(self, kept: Tensors) -> Tensor:
        total, _, *weights = kept
        by_batch = batch_first(total)
        _, normal, _ = self.there(to_rows(total, by_batch=by_batch), *weights, eps=self.eps, from_one=self.from_one)
        return from_rows(normal, total, by_batch=by_batch)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in at least float32; `from_one` says that weights are kept as an offset from one."""

    def __init__(self, width: int, *, eps: float, from_one: bool = False) -> None:
        super().__init__()
        self.eps, self.from_one = eps, from_one
        self.weight = nn.Parameter(torch.empty(width))
        self.kernels: RMSNormKernels = reference

    def forward(self, x: Tensor) -> Tensor:
        return self.join(x)[1].value

    def join(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Remade]:
        """x + branch, and its norm."""
        maker = _MakeNorm(self.kernels.rms_norm, self.kernels.rms_norm_backward, self.eps, self.from_one)
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

    def forward(self, x: Tensor) -> Tensor:
        return self.join(x)[1].value

    def join(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Remade]:
        """x + branch, and its norm."""
        maker = _MakeNorm(self.kernels.layer_norm, self.kernels.layer_norm_backward, self.eps, self.from_one)
        (total, value), source = make(maker, x, branch, self.weight, self.bias)
        return total, Remade(value, source)


def build_norm(config: ModelConfig, width: int) -> RMSNorm | LayerNorm:
    kind = RMSNorm if config.normalization == "RMSNorm" else LayerNorm
    return kind(width, eps=config.norm_epsilon, from_one=config.apply_layernorm_1p)
