"""The precision in which kernels compute whatever their tensors hold: at least float32, rounded once at the end."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """
    >>> compute_dtype(torch.bfloat16), compute_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)


def to_compute_dtype(x: Tensor) -> Tensor:
    """The same numbers, to compute with; x itself if it is wide enough."""
    return x.to(compute_dtype(x.dtype))
