"""The blocks of device memory that are alive at the peak of a step, from what the caching allocator records.

The allocator lists the blocks that are allocated now, and, once asked to, every allocation and free with the Python stack that made
it. From the first list and the events in order follows what was allocated at any moment; the peak is the moment with the most bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

_MAX_EVENTS = 1_000_000
_FREED = "free_requested"  # when the tensor died; its memory may be reused later, once other streams are done with it


class StackFrame(NamedTuple):
    """A line of Python that led to an allocation."""

    file: str
    function: str


@dataclass(frozen=True, slots=True)
class MemoryBlock:
    """An allocation: its address, its size as the allocator rounds it, and its stack, innermost first; empty if unknown."""

    address: int
    size: int
    stack: tuple[StackFrame, ...] = ()


def record_step(step: Callable[[], object], device: torch.device) -> tuple[list[MemoryBlock], list[Mapping[str, Any]]]:
    """Returns the blocks that were allocated before a step, and the allocator's events during it."""
    torch.cuda.synchronize(device)
    state, index = torch.cuda.memory._snapshot(device), device.index or 0
    earlier = len(state["device_traces"][index])  # of a recording before this one
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=_MAX_EVENTS)
    try:
        step()
        torch.cuda.synchronize(device)
        events = torch.cuda.memory._snapshot(device)["device_traces"][index][earlier:]
    finally:
        torch.cuda.memory._record_memory_history(None)
    blocks = (block for segment in state["segments"] for block in segment["blocks"])
    allocated = [block for block in blocks if block["state"] == "active_allocated"]
    return [MemoryBlock(block["address"], block["size"]) for block in allocated], events


def blocks_at_peak(before: Sequence[MemoryBlock], events: Sequence[Mapping[str, Any]]) -> list[MemoryBlock]:
    """Returns the blocks that are allocated when most bytes are.

    >>> events = [{"action": "alloc", "addr": 8, "size": 5}, {"action": "free_requested", "addr": 1, "size": 2}]
    >>> [block.address for block in blocks_at_peak([MemoryBlock(1, 2)], events)]
    [1, 8]
    """
    size = largest = sum(block.size for block in before)
    peak = 0
    for number, event in enumerate(events, start=1):
        size += {"alloc": 1, _FREED: -1}.get(event["action"], 0) * event["size"]
        if size > largest:
            largest, peak = size, number
    alive = {block.address: block for block in before}
    for event in events[:peak]:
        if event["action"] == "alloc":
            stack = tuple(StackFrame(frame["filename"], frame["name"]) for frame in event.get("frames", ()))
            alive[event["addr"]] = MemoryBlock(event["addr"], event["size"], stack)
        elif event["action"] == _FREED:
            alive.pop(event["addr"], None)
    return list(alive.values())
