"""The dtype in which kernels compute: at least float32, rounded once at the end."""

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
    """Converts to the compute dtype; returns x itself if it has it."""
    dtype = compute_dtype(x.dtype)
    return x if x.dtype == dtype else x.to(dtype)  # even a cast to its own dtype is a call of a microsecond
