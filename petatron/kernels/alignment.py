"""Alignment of tensors, for kernels that copy 16 bytes at a time."""

from __future__ import annotations

from torch import Tensor

_COPY_BYTES = 16


def is_aligned(tensor: Tensor) -> bool:
    """Whether the first element's address is 16-byte aligned."""
    return tensor.data_ptr() % _COPY_BYTES == 0
