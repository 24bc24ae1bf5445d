"""Storage of optimizer state: on the device, in page-locked host memory, or in a file on disk."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from petatron.base.errors import TrainError
from petatron.base.format_text import format_bytes

_ALIGNMENT = 4096  # bytes; a page


AllocateZeros = Callable[..., Tensor]
"""(length, dtype=...): allocates a flat tensor of zeros in a storage, as `torch.zeros` does on a device."""


class DiskStorage:
    """One file of a fixed size, mapped into memory.

    The file has no name that anybody could find, so the disk space is free again when the process ends, however it ends;
    what has to outlive a run is in its checkpoints. The space is claimed at the start: a full disk is an error here rather than
    a crash in the middle of a step.
    """

    def __init__(self, folder: str, num_bytes: int) -> None:
        self._offset = 0
        try:
            self._mapped_file = _map_temporary_file(Path(folder), max(num_bytes, 1))
        except (OSError, RuntimeError) as error:
            raise TrainError(
                f"Cannot keep {format_bytes(num_bytes)} of optimizer state in {folder}: {error}. Give --optimizer-nvme-offload a "
                "writable folder with more space, or use --optimizer-cpu-offload."
            ) from error

    @staticmethod
    def required_bytes(lengths: Sequence[int], dtypes: Sequence[torch.dtype]) -> int:
        """Returns the bytes that tensors of these lengths need in all these dtypes."""
        return sum(_padded_bytes(length * dtype.itemsize) for length in lengths for dtype in dtypes)

    def zeros(self, length: int, dtype: torch.dtype) -> Tensor:
        begin = self._offset
        self._offset += _padded_bytes(length * dtype.itemsize)
        assert self._offset <= self._mapped_file.numel(), "the file was made for less"
        return self._mapped_file[begin : begin + length * dtype.itemsize].view(dtype)


def describe_offload_target(folder: str | None, device: torch.device) -> str:
    """Describes where offloaded state is stored; on a CPU also what that gains.

    >>> describe_offload_target("scratch", torch.device("cuda"))
    'a file in scratch'
    """
    if folder is not None:
        paged = "; on a CPU that gains only what the system pages out of memory" if device.type == "cpu" else ""
        return f"a file in {folder}{paged}"
    return "host memory" + ("; on a CPU that gains nothing" if device.type == "cpu" else "")


def _padded_bytes(num_bytes: int) -> int:
    return math.ceil(num_bytes / _ALIGNMENT) * _ALIGNMENT


def _map_temporary_file(folder: Path, num_bytes: int) -> Tensor:
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        return torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)
