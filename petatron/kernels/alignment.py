"""Where a tensor begins in memory, for kernels that copy 16 bytes at a time."""

from __future__ import annotations

from torch import Tensor

_COPY_BYTES = 16


def is_aligned(tensor: Tensor) -> bool:
    """Whether its first element is at an address that such a copy may start from, wherever its memory came from."""
    return tensor.data_ptr() % _COPY_BYTES == 0
