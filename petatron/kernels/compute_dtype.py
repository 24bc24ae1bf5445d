"""The precision in which kernels compute whatever their tensors hold: at least float32, rounded once at the end."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """
    >>> wide_dtype(torch.bfloat16), wide_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)


def widened(x: Tensor) -> Tensor:
    """The same numbers, to compute with; x itself if it is wide enough."""
    return x.to(wide_dtype(x.dtype))
