"""Counts the sequences that a server has accepted and not finished, and decides whose request is accepted when there is no room.

An owner is the holder of an API key. One that is alone may have all of them open. Where several ask, each has an equal share: a request
that stays within its owner's share is accepted in a full server too, and the newest requests of the owner with most sequences that have no
token yet give way to it. Where all of those have begun, it is refused, and for a while others cannot open more than their share, so that
there is room when it comes again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from petatron.serve.generation_handle import Generation, QueueFullError

_REMEMBERED_S = 20.0
"""So long after a refusal an owner counts as one that asks: clients come again within some seconds."""


class OpenSequences:
    """Open sequences by the request that they are of. All methods are called from the event loop."""

    def __init__(self, most: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self._clock = clock
        self._requests: dict[Generation, tuple[Generation, ...]] = {}
        self._counts: Counter[str] = Counter()
        self._refused_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Generation]:
        return iter(tuple(self._requests))

    def __contains__(self, generation: Generation) -> bool:
        return generation in self._requests

    def discard(self, generation: Generation) -> None:
        if self._requests.pop(generation, None) is not None:
            owner = generation.params.owner
            self._counts[owner] -= 1
            if not self._counts[owner]:
                del self._counts[owner]

    def add(self, generations: Sequence[Generation]) -> list[Generation]:
        """Accepts all sequences of a request or none; returns those that give way, which are no longer counted.

        Raises `QueueFullError`.
        """
        if not generations:
            return []
        owner, now_s = generations[0].params.owner, self._clock()
        self._refused_s = {name: at for name, at in self._refused_s.items() if now_s - at < _REMEMBERED_S}
        share = self.share_of(owner)
        within = self._counts[owner] + len(generations) <= share
        missing = len(self._requests) + len(generations) - self.most
        others_wait = any(name != owner for name in self._refused_s)
        giving_way = self._giving_way(owner, missing, share) if within and missing > 0 else []
        if (missing > 0 and not giving_way) or (others_wait and not within):
            if within:
                self._refused_s[owner] = now_s
            raise QueueFullError(
                f"The server has {len(self._requests)} of {self.most} sequences open, {self._counts[owner]} of them of "
                f"this key, whose share is {share} while others ask. Try again later."
            )
        for generation in giving_way:
            self.discard(generation)
        self._refused_s.pop(owner, None)
        self._requests.update(dict.fromkeys(generations, tuple(generations)))
        self._counts[owner] += len(generations)
        return giving_way

    def share_of(self, owner: str) -> int:
        """Returns how many sequences each owner that has some, or asks for some, may have open."""
        return self.most // len({owner, *self._counts, *self._refused_s})

    def _giving_way(self, asking: str, missing: int, share: int) -> list[Generation]:
        """Returns sequences of owners above their share that make room for as many as are missing; none if there are too few."""
        counts, giving_way = Counter(self._counts), list[Generation]()
        waiting = [
            request
            for request in dict.fromkeys(reversed(self._requests.values()))
            if request[0].params.owner != asking and all(generation.first_token_s is None for generation in request)
        ]
        while len(giving_way) < missing:
            owner, count = max(counts.items(), key=lambda item: item[1])
            if count <= share:
                return []
            newest = next((request for request in waiting if request[0].params.owner == owner), None)
            if newest is None:
                del counts[owner]
                if not counts:
                    return []
                continue
            waiting.remove(newest)
            still_open = [generation for generation in newest if generation in self._requests]
            giving_way += still_open
            counts[owner] -= len(still_open)
        return giving_way
