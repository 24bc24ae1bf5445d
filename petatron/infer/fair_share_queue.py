"""Shares of owners: sequences that wait, in the order that lets the owner with the fewest running ones go first, and tokens of a step.

An owner is whoever asks, such as the holder of an API key. One that is alone may use everything. While several run or wait, each has an
equal share of slots, of pages, and of the tokens of a step; what an owner does not use, others may.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, KeysView, Mapping

from petatron.infer.sequence import Sequence


class OwnerQueue:
    """Waiting sequences, for each owner in the order in which they came."""

    def __init__(self) -> None:
        self.by_owner: dict[str, deque[Sequence]] = {}

    def __len__(self) -> int:
        return sum(map(len, self.by_owner.values()))

    def __bool__(self) -> bool:
        return bool(self.by_owner)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for queue in self.by_owner.values() for sequence in queue)

    @property
    def owners(self) -> KeysView[str]:
        return self.by_owner.keys()

    def first(self, num_running: Mapping[str, int], *, skipped: Collection[str] = ()) -> Sequence | None:
        """Returns the next sequence of the owner that has fewest running, and among equals the one that came first."""
        heads = (queue[0] for owner, queue in self.by_owner.items() if owner not in skipped)
        return min(heads, key=lambda head: (num_running.get(head.owner, 0), head.request), default=None)

    def append(self, sequence: Sequence) -> None:
        self.by_owner.setdefault(sequence.owner, deque()).append(sequence)

    def append_left(self, sequence: Sequence) -> None:
        """Puts a sequence in front of the others of its owner."""
        self.by_owner.setdefault(sequence.owner, deque()).appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, if it is there."""
        queue = self.by_owner.get(sequence.owner)
        if queue is None or sequence not in queue:
            return
        queue.remove(sequence)
        if not queue:
            del self.by_owner[sequence.owner]


class StepTokens:
    """The tokens that are left of a step: of all, and of each owner's share of prompts while others wait.

    >>> tokens = StepTokens(10, 5)
    >>> tokens.take("a", 4)
    >>> tokens.of_prompt("a"), tokens.of_prompt("b")
    (1, 5)
    """

    def __init__(self, total: int, share: int | None) -> None:
        self.left = total
        self._share = share
        self._taken: dict[str, int] = {}

    def of_prompt(self, owner: str) -> int:
        return self.left if self._share is None else max(0, min(self.left, self._share - self._taken.get(owner, 0)))

    def take(self, owner: str, count: int) -> None:
        self.left -= count
        if self._share is not None:
            self._taken[owner] = self._taken.get(owner, 0) + count
