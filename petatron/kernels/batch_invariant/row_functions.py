"""Sums, exponentials and their relatives of rows, with bits that depend on the row alone.

PyTorch's sum of one long row is shared out over threads, and that of many rows is not. Its sigmoid, SiLU and GELU (tanh) of the last few
elements of a tensor are scalar functions on CPUs, those of the others vector functions, and the two differ. Exponentials, error functions
and tanh are the same in both.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_GELU_TANH_SCALE, _GELU_CUBE = math.sqrt(2.0 / math.pi), 0.044715


def fixed_order_sum(x: Tensor) -> Tensor:
    """Returns the sum over the last dimension: halves are added until one number is left.

    >>> fixed_order_sum(torch.arange(7.0)), fixed_order_sum(torch.ones(2, 0))
    (tensor(21.), tensor([0., 0.]))
    """
    if not x.shape[-1]:
        return x.new_zeros(x.shape[:-1])
    while (width := x.shape[-1]) > 1:
        half = (width + 1) // 2
        low, high = x[..., :half], x[..., half:]
        x = low + high if 2 * half == width else torch.cat((low[..., : half - 1] + high, low[..., half - 1 :]), dim=-1)
    return x.squeeze(-1)


def fixed_order_mean(x: Tensor) -> Tensor:
    """Returns the mean over the last dimension, which stays, with size 1."""
    return (fixed_order_sum(x) / x.shape[-1]).unsqueeze(-1)


def sigmoid(x: Tensor) -> Tensor:
    """
    >>> sigmoid(torch.tensor([0.0, -200.0, 200.0]))
    tensor([0.5000, 0.0000, 1.0000])
    """
    return 1.0 / (1.0 + (-x).exp())


def silu(x: Tensor) -> Tensor:
    return x / (1.0 + (-x).exp())


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + (x * math.sqrt(0.5)).erf())


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + (_GELU_TANH_SCALE * (x + _GELU_CUBE * x * x * x)).tanh())


def softmax(x: Tensor) -> Tensor:
    """Returns the softmax over the last dimension."""
    weights = (x - x.amax(dim=-1, keepdim=True)).exp()
    return weights / fixed_order_sum(weights).unsqueeze(-1)
