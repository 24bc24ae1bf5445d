"""The pages of the key/value cache of one replica, and the slots of its recurrent states, as numbers: which are free, shared, or
hold a prefix that may come again.

A full page whose tokens are known is a *prefix page*: it is found again by its tokens and the prefix page before it. When its last
sequence ends it stays findable, and is handed out for other tokens only when no other page is free, the longest unused first. Groups of
sequences that may not know of each other's prompts each have prefix pages of their own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

SCRATCH_PAGE = 0
"""Padding is stored here; no sequence has it."""

SCRATCH_SLOT = 0
"""The states of padding are stored here; no sequence has it."""


class PrefixRoot(NamedTuple):
    """What sequences must have in common to share pages, besides their tokens.

    group: of sequences that may know of each other's prompts. is_long: their keys have LongRoPE's long factors. images: tells other images
    of a prompt apart.
    """

    group: str = ""
    is_long: bool = False
    images: str = ""


SHARED_ROOT = PrefixRoot()


class CacheSize(NamedTuple):
    """num_pages: the scratch page included. num_slots: of recurrent states, the scratch slot included."""

    num_pages: int
    num_slots: int


class _PrefixKey(NamedTuple):
    """parent: the number of the prefix page before it, or the root of a first page."""

    parent: int | PrefixRoot
    tokens: tuple[int, ...]


class PagePool:
    """Hands out pages, counts their users, and finds prefixes."""

    def __init__(self, num_pages: int, page_size: int, *, prefix_caching: bool = True) -> None:
        """Page 0 is the scratch page, so one less can be had."""
        assert num_pages >= 2
        self.page_size = page_size
        self.num_pages = num_pages - 1
        self.prefix_caching = prefix_caching
        self._free = list(range(num_pages - 1, SCRATCH_PAGE, -1))
        self._users = [0] * num_pages
        self._unused_prefixes: OrderedDict[int, None] = OrderedDict()
        self._pages_by_prefix: dict[_PrefixKey, int] = {}
        self._prefixes: dict[int, tuple[_PrefixKey, int]] = {}  # of a page: its key, and its own number as a parent
        self._last_number = 0
        self._outdated: set[int] = set()
        """Pages in use that were computed, at least in part, by former weights."""

    @property
    def num_free(self) -> int:
        """Pages that can be had now."""
        return len(self._free) + len(self._unused_prefixes)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def allocate(self, count: int) -> list[int] | None:
        """Returns so many pages, or None, and then changes nothing."""
        if count > self.num_free:
            return None
        pages = [self._free.pop() for _ in range(min(count, len(self._free)))]
        for _ in range(count - len(pages)):
            page, _ = self._unused_prefixes.popitem(last=False)
            del self._pages_by_prefix[self._prefixes.pop(page)[0]]
            pages.append(page)
        for page in pages:
            self._users[page] = 1
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Gives pages back, the last ones of a sequence to be reused first: the beginnings of prompts come again."""
        for page in reversed(pages):
            self._users[page] -= 1
            assert self._users[page] >= 0, f"page {page} is given back twice"
            if self._users[page] == 0:
                self._outdated.discard(page)
                if page in self._prefixes:
                    self._unused_prefixes[page] = None
                else:
                    self._free.append(page)

    def find_prefix(self, tokens: Sequence[int], *, at_most: int, root: PrefixRoot = SHARED_ROOT) -> list[int]:
        """Returns the pages of the longest known prefix, of `at_most` tokens, now used once more."""
        pages = list(self._prefix_pages(tokens, at_most, root))
        for page in pages:
            self._unused_prefixes.pop(page, None)
            self._users[page] += 1
        return pages

    def count_prefix(self, tokens: Sequence[int], *, at_most: int, root: PrefixRoot = SHARED_ROOT) -> int:
        """Returns how many tokens `find_prefix` would find."""
        return sum(1 for _ in self._prefix_pages(tokens, at_most, root)) * self.page_size

    def _prefix_pages(self, tokens: Sequence[int], at_most: int, root: PrefixRoot) -> Iterator[int]:
        parent: int | PrefixRoot = root
        size = self.page_size
        for end in range(size, at_most + 1, size) if self.prefix_caching else ():
            page = self._pages_by_prefix.get(_PrefixKey(parent, tuple(tokens[end - size : end])))
            if page is None:
                return
            yield page
            parent = self._prefixes[page][1]

    def add_prefix(
        self, pages: Sequence[int], tokens: Sequence[int], *, computed: int, root: PrefixRoot = SHARED_ROOT
    ) -> None:
        """Makes the full pages of a sequence, whose first tokens have been computed, findable."""
        if not self.prefix_caching:
            return
        parent: int | PrefixRoot = root
        size = self.page_size
        for number, page in enumerate(pages[: computed // size]):
            if page in self._outdated:
                return
            if page not in self._prefixes:
                key = _PrefixKey(parent, tuple(tokens[number * size : (number + 1) * size]))
                if key in self._pages_by_prefix:  # another sequence computed the same; its page is found
                    parent = self._prefixes[self._pages_by_prefix[key]][1]
                    continue
                self._last_number += 1
                self._pages_by_prefix[key] = page
                self._prefixes[page] = key, self._last_number
            parent = self._prefixes[page][1]

    def forget_prefixes(self) -> None:
        """Makes nothing findable any more: the weights have changed. Sequences that run keep their pages, which nobody else finds."""
        self._outdated.update(page for page, users in enumerate(self._users) if users)
        self._free.extend(self._unused_prefixes)
        self._unused_prefixes.clear()
        self._pages_by_prefix.clear()
        self._prefixes.clear()


class SlotPool:
    """Hands out the slots of recurrent states, one to each sequence that runs, so there are as many as may run at once."""

    def __init__(self, num_slots: int) -> None:
        """Slot 0 is the scratch slot, so one less can be had."""
        self.num_slots = num_slots - 1
        self._free = list(range(num_slots - 1, SCRATCH_SLOT, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        return self._free.pop()

    def release(self, slot: int) -> None:
        assert slot != SCRATCH_SLOT and slot not in self._free, f"slot {slot} is given back twice"
        self._free.append(slot)
