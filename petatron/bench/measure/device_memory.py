"""Device memory of a measurement: allocated, at its peak, of captured CUDA graphs, and cached."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

_DEFAULT_POOL = (0, 0)
"""The memory pool of what no graph has allocated."""


def allocated_bytes(device: torch.device) -> int:
    """Bytes of tensors on the device now, and of what captured graphs hold for their replays."""
    return torch.cuda.memory_allocated(device) + graph_bytes(device) if device.type == "cuda" else 0


def peak_bytes_of_step(device: torch.device, step: Callable[[], object]) -> int:
    """Runs a step; returns the most bytes of tensors on a CUDA device, and of what graphs captured before hold for their replays.

    While a step is captured, the allocator counts its tensors.
    """
    held = graph_bytes(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) + held


def graph_bytes(device: torch.device) -> int:
    """Bytes in the memory pools of captured graphs that no tensor has: a replay writes there, and the allocator does not count it."""
    index = torch.cuda.current_device() if device.index is None else device.index
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == index]
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in segments
        if tuple(segment["segment_pool_id"]) != _DEFAULT_POOL
    )


def free_cached_memory(device: torch.device) -> None:
    """Collects garbage and empties the allocator's cache."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
