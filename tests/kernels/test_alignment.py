"""Where a tensor begins in memory, whatever its storage does."""

from __future__ import annotations

import pytest
import torch

from petatron.kernels.strides import is_aligned


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_16_bytes_of_a_buffer(dtype: torch.dtype):
    buffer = torch.zeros(64, dtype=dtype)
    found = [start for start in range(33) if is_aligned(buffer[start:])]
    assert found == list(range(0, 33, 16 // dtype.itemsize))


def test_memory_that_does_not_begin_there_itself():
    """Which its offset into the storage says nothing of."""
    whole = bytearray(128)
    shift = -torch.frombuffer(whole, dtype=torch.uint8).data_ptr() % 16
    for start in (0, 4, 8, 16):
        one = torch.frombuffer(whole, dtype=torch.float32, count=4, offset=shift + start)
        assert is_aligned(one) == (start % 16 == 0)
        assert one.storage_offset() == 0
