"""Normalisation over the last dimension."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petatron.config.schema import ModelConfig


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in at least float32."""

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normal = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return normal.to(x.dtype) * self.weight


class LayerNorm(nn.Module):
    """(x - mean) / standard deviation * weight + bias."""

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def build_norm(config: ModelConfig, width: int) -> RMSNorm | LayerNorm:
    kind = RMSNorm if config.normalization == "RMSNorm" else LayerNorm
    return kind(width, eps=config.norm_epsilon)
