"""When the device's memory is not enough: what held it, how much was asked for, and the three cheapest changes that fit.

What fits is known by prediction only, and the prediction has just been proved too low or true. Of a run that was predicted to
fit, the real need exceeds the prediction by some unknown amount, so a change must free at least what was asked for in
vain; of one that was not, it must bring the prediction below the device's memory, less a reserve for what is not counted.

    limit = min(capacity - reserve, predicted now - asked for)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from petatron.base.errors import CheckpointError, TrainError
from petatron.config import RunConfig
from petatron.estimate.memory.advice import Change, candidates
from petatron.estimate.memory.forecast import as_gigabytes, heaviest

RESERVE_BYTES = 2_000_000_000
"""For what no forecast counts: the device's own share, libraries, what a kernel needs while it runs."""

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_ASKED = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """A device at the moment of failure, in bytes.

    allocated: in tensors. reserved: taken from the device, with what lies free between tensors. free: not taken by anyone.
    largest: of live blocks (size, how many of it), the largest sum first.
    """

    total: int
    free: int
    reserved: int
    allocated: int
    largest: tuple[tuple[int, int], ...] = ()

    @property
    def capacity(self) -> int:
        """What this process could have at most, beside the others on the device."""
        return self.free + self.reserved

    @property
    def fragmented(self) -> int:
        return self.reserved - self.allocated


def device_facts(device: torch.device) -> MemoryFacts:
    """Of a CUDA device; reads the allocator's tables and touches no memory."""
    free, total = torch.cuda.mem_get_info(device)
    return MemoryFacts(
        total=total,
        free=free,
        reserved=torch.cuda.memory_reserved(device),
        allocated=torch.cuda.memory_allocated(device),
        largest=largest_blocks(torch.cuda.memory_snapshot()),
    )


def largest_blocks(snapshot: list[dict]) -> tuple[tuple[int, int], ...]:
    """The sizes that hold most of the live memory, and how many blocks have each."""
    sizes = Counter(
        block["size"] for segment in snapshot for block in segment["blocks"] if block["state"] == "active_allocated"
    )
    return tuple(sorted(sizes.items(), key=lambda item: -item[0] * item[1])[:_SHOWN])


def asked_bytes(error: BaseException) -> int:
    """What the failing allocation wanted; 0 if the message does not say.

    >>> asked_bytes(RuntimeError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ..."))
    2684354560
    """
    found = _ASKED.search(str(error))
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


@contextmanager
def memory_reported(run: RunConfig, device: torch.device, *, when: Callable[[], str]) -> Iterator[None]:
    """Ends with the report where an allocation inside fails; `when` is asked then what was being done.

    What ranks read together fails on all of them at once, as a checkpoint that could not be read; why it could not is behind that.
    """
    try:
        yield
    except (torch.OutOfMemoryError, CheckpointError) as error:
        reason: BaseException | None = error
        while reason is not None and not isinstance(reason, torch.OutOfMemoryError):
            reason = reason.__cause__
        if reason is None:
            raise
        raise out_of_memory(reason, run, device_facts(device), when=when()) from error


def out_of_memory(error: BaseException, run: RunConfig, facts: MemoryFacts, *, when: str) -> TrainError:
    """The failure in words; `when` is what was being done, as in `iteration 3`."""
    asked = asked_bytes(error)
    now = heaviest(run, device="cuda")
    limit = min(facts.capacity - RESERVE_BYTES, now.total - asked)
    wanted = f"{as_gigabytes(asked)} GB more were asked for" if asked else "an allocation failed"
    lines = [
        f"The device ran out of memory in {when}: {wanted}, with {as_gigabytes(facts.allocated)} of "
        f"{as_gigabytes(facts.total)} GB in tensors.",
        f"  predicted need: {now.describe()}",
        f"  {_held(facts)}",
    ]
    changes = candidates(run, limit)[:_SHOWN]
    advice = _fragments(facts, asked) + [describe(change) for change in changes]
    if advice:
        lines.append("What would fit, the cheapest first (predicted):")
        lines += [f"  {number}. {text}" for number, text in enumerate(advice[:_SHOWN], start=1)]
    else:
        lines.append(
            "No setting of this run is predicted to fit. Use more devices (--tensor-model-parallel-size, "
            "--pipeline-model-parallel-size), a shorter --seq-length or a smaller model."
        )
    return TrainError("\n".join(lines))


def describe(change: Change) -> str:
    """One line for people."""
    slower = f"about {100 * change.cost:.0f}% slower" if change.cost >= 0.005 else "no slower"
    if change.cost <= -0.005:
        slower = f"about {-100 * change.cost:.0f}% less time"
    remark = f"; {change.remark}" if change.remark else ""
    freed, total = as_gigabytes(change.saved_bytes), as_gigabytes(change.total_bytes)
    return f"{change.flags}: frees {freed} GB, needs {total} GB, {slower}{remark}"


def _held(facts: MemoryFacts) -> str:
    parts = [f"free but scattered between tensors: {as_gigabytes(facts.fragmented)} GB"]
    others = facts.total - facts.capacity
    if others > RESERVE_BYTES // 2:
        parts.append(f"held by other processes and the driver: {as_gigabytes(others)} GB")
    if facts.largest:
        blocks = ", ".join(f"{count} x {as_gigabytes(size)} GB" for size, count in facts.largest)
        parts.append(f"most memory is in blocks of {blocks}")
    return "; ".join(parts)


def _fragments(facts: MemoryFacts, asked: int) -> list[str]:
    """If what was asked for lies there in pieces, the allocator can be told to make pieces that grow."""
    if facts.fragmented < max(asked, RESERVE_BYTES // 2):
        return []
    return [
        "the environment variable PYTORCH_ALLOC_CONF=expandable_segments:True: makes use of the "
        f"{as_gigabytes(facts.fragmented)} GB between tensors, no slower"
    ]
