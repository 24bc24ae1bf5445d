"""Normalisation over the last dimension."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petatron.config.schema import ModelConfig


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in at least float32; `from_one` says that weights are kept as an offset from one."""

    def __init__(self, width: int, *, eps: float, from_one: bool = False) -> None:
        super().__init__()
        self.eps, self.from_one = eps, from_one
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normal = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        if self.from_one:  # in float32 up to here, since one and a small offset need the digits
            return (normal * (1.0 + self.weight.to(normal.dtype))).to(x.dtype)
        return normal.to(x.dtype) * self.weight


class LayerNorm(nn.Module):
    """(x - mean) / standard deviation * weight + bias; `from_one` as above."""

    def __init__(self, width: int, *, eps: float, from_one: bool = False) -> None:
        super().__init__()
        self.eps, self.from_one = eps, from_one
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        weight = 1.0 + self.weight if self.from_one else self.weight
        return F.layer_norm(x, self.weight.shape, weight, self.bias, self.eps)


def build_norm(config: ModelConfig, width: int) -> RMSNorm | LayerNorm:
    kind = RMSNorm if config.normalization == "RMSNorm" else LayerNorm
    return kind(width, eps=config.norm_epsilon, from_one=config.apply_layernorm_1p)
