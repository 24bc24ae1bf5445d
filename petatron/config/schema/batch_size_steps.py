"""`--step-batch-size-schedule`: global batch sizes, each from a number of tokens on, as in `0:16 2.4B:320`."""

from __future__ import annotations

import re

_STEP = re.compile(r"(\d+(?:\.\d+)?)([KMBT]?):(\d+(?:\.\d+)?)([KMBT]?)", re.IGNORECASE)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


class BatchSizeStepsError(ValueError):
    """A text that is no schedule of batch sizes; the message tells what is wrong with it."""


def parse_batch_size_steps(text: str, seq_length: int) -> tuple[tuple[int, int], ...]:
    """Returns (samples consumed, global batch size) of each step, in order; a partial sample of tokens does not count.

    >>> parse_batch_size_steps("0:16 2.4K:32", 100)
    ((0, 16), (24, 32))
    """
    steps: list[tuple[int, int]] = []
    for word in text.replace(",", " ").split():
        match = _STEP.fullmatch(word)
        if match is None:
            raise BatchSizeStepsError(f"has {word}, which is not TOKENS:SIZE")
        tokens, size = (int(float(match[at]) * _UNITS[match[at + 1].upper()]) for at in (1, 3))
        steps.append((tokens // max(seq_length, 1), size))
    steps.sort()
    if not steps or steps[0][0] != 0:
        raise BatchSizeStepsError("has no size for the beginning, 0:SIZE")
    if len({begin for begin, _ in steps}) < len(steps):
        raise BatchSizeStepsError("has two sizes that begin at the same sample")
    if min(size for _, size in steps) < 1:
        raise BatchSizeStepsError("has a size below 1")
    return tuple(steps)
