"""Chooses what one step computes: one token of every running sequence, and chunks of waiting prompts beside them.

Requests of one owner are served in the order in which they came, those of several in turn (`fair_share_queue.py`). A sequence that runs
has a slot for recurrent states, and pages. When pages run out, the sequence that came last, of the owner that has most pages, gives both
back and waits in front of its owner's queue: what it had is computed again, so its tokens are the same. In the same way an owner that has
more than its share gives way to one that waits and has less. A sequence that grows beyond the original context of LongRoPE is computed
anew, too. A sequence whose beginning a running one is just computing waits until it is there, and those behind it may go first: a prompt
that comes many times at once is computed once. Everything is a function of the requests and their tokens, so every rank decides the same
without asking.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Sequences
from typing import NamedTuple

from petatron.infer.engine_options import EngineOptions
from petatron.infer.fair_share_queue import OwnerQueue, StepTokens
from petatron.infer.kv_cache_pages import CacheSize, PagePool, SlotPool
from petatron.infer.sequence import AwaitedPrefix, Sequence

MAX_STEP_LOGPROBS = 4096
"""Of prompts, in one step: each is an object of Python, and everybody's next token waits for them."""


class ScheduledSequence(NamedTuple):
    """`count` tokens of a sequence, from `start` on, are computed in a step; the last of them are `drafts`, if there are any."""

    sequence: Sequence
    start: int
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]
    drafts: tuple[int, ...] = ()

    @property
    def decodes(self) -> bool:
        """Whether it is one token after others, and perhaps its drafts."""
        return self.count - len(self.drafts) == 1 and self.start > 0

    @property
    def reaches_end(self) -> bool:
        """Whether the step computes the last token known, and so what comes after it."""
        return self.start + self.count - len(self.drafts) == len(self.sequence.tokens)


class Scheduler:
    """The requests of one replica: waiting, then running until they end or are preempted."""

    def __init__(
        self, options: EngineOptions, cache: CacheSize, *, prefix_caching: bool, original_context: int | None = None
    ) -> None:
        self._options, self._original_context = options, original_context
        self.pool = PagePool(cache.num_pages, options.page_size, prefix_caching=prefix_caching)
        self.slots = SlotPool(cache.num_slots)
        self.waiting = OwnerQueue()
        self.running: list[Sequence] = []
        self._num_running: Counter[str] = Counter()  # of each owner that has any
        self.num_preemptions = 0
        self.num_computed_prompt_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Ends a sequence, wherever it is."""
        if sequence in self.running:
            self._stop(sequence)
            sequence.pages = []
        else:
            self.waiting.remove(sequence)

    def schedule(self) -> list[ScheduledSequence]:
        """Returns the next step's work: sequences that decode first, then chunks, those that begin a sequence first."""
        self._restart_long_sequences()
        share, waiting = None, bool(self.waiting.by_owner)
        if waiting:
            self._make_room()
            if (num_owners := self._num_owners) > 1:  # of the tokens, for prompts of each
                share = max(1, self._options.max_step_tokens // num_owners)
        tokens, logprobs = StepTokens(self._options.max_step_tokens, share), MAX_STEP_LOGPROBS
        scheduled: list[ScheduledSequence] = []
        preemptions = self.num_preemptions
        for sequence in list(self.running):
            preempted = self.num_preemptions > preemptions and sequence not in self.running  # for an earlier one
            if preempted or tokens.left == 0:
                continue
            count = sequence.uncomputed
            if count > 1:
                count = min(count, max(1, tokens.of_prompt(sequence.owner)))
            if sequence.params.prompt_logprobs is not None:
                count, logprobs = self._count_reporting(sequence, count, logprobs)
                if count == 0:
                    continue
            if self._reserve(sequence, sequence.computed + count):
                drafts = tuple(sequence.drafts[: tokens.left - count])
                scheduled.append(ScheduledSequence(sequence, sequence.computed, count + len(drafts), drafts))
                if share is None:  # the decode steps of one owner: a call for each sequence would be felt
                    tokens.left -= count + len(drafts)
                else:
                    tokens.take(sequence.owner, count + len(drafts))
        if self.num_preemptions > preemptions:
            scheduled = [work for work in scheduled if work.sequence in self.running]
        if waiting or self.num_preemptions > preemptions:
            scheduled += self._start_waiting(tokens, logprobs)
        return sorted(scheduled, key=lambda work: (not work.decodes, work.start > 0))

    def _start_waiting(self, tokens: StepTokens, logprobs: int) -> list[ScheduledSequence]:
        """Starts those that there is room for, in their order; those that wait for another one's prefix keep their places."""
        started: list[ScheduledSequence] = []
        held: list[Sequence] = []
        skipped: set[str] = set()
        while tokens.left and self.slots.num_free:
            sequence = self.waiting.first(self._num_running, skipped=skipped)
            if sequence is None:
                break
            most = tokens.of_prompt(sequence.owner)
            if most == 0:
                skipped.add(sequence.owner)
                continue
            sequence.is_long = self._is_long(len(sequence.tokens))
            if self._waits_for_prefix(sequence):
                self.waiting.remove(sequence)
                held.append(sequence)
                continue
            if sequence.params.prompt_logprobs is not None:
                most, logprobs = self._count_reporting(sequence, min(most, len(sequence.tokens)), logprobs)
            if most == 0 or not self._admit(sequence, most):
                if self._is_within_share(sequence):
                    break
                skipped.add(sequence.owner)  # others need not wait for what is more than its share
                continue
            self.waiting.remove(sequence)
            self.running.append(sequence)
            self._num_running[sequence.owner] += 1
            sequence.slot = self.slots.allocate()
            count = min(sequence.uncomputed, most)
            started.append(ScheduledSequence(sequence, sequence.computed, count))
            tokens.take(sequence.owner, count)
        for sequence in reversed(held):
            self.waiting.append_left(sequence)
        return started

    @property
    def _num_owners(self) -> int:
        return len(self._num_running.keys() | self.waiting.owners)

    def _make_room(self) -> None:
        """Preempts sequences of owners above their share for the next one of an owner that stays within its own."""
        if self._num_owners == 1:
            return
        sequence = self.waiting.first(self._num_running)
        if sequence is None or not self._is_within_share(sequence) or not self._could_start(sequence):
            return
        needed = self._pages_for(len(sequence.tokens))
        while not self.slots.num_free:
            self._preempt(self._last_of(self._num_running.most_common(1)[0][0]))
        while self.pool.num_free < needed and (owners := self._pages_of_owners()):
            owner, num_pages = owners.most_common(1)[0]
            if num_pages <= self.pool.num_pages // self._num_owners:
                return  # prefixes that it shares count once for each sequence
            self._preempt(self._last_of(owner))

    def _could_start(self, sequence: Sequence) -> bool:
        """Whether nothing but room is missing: not while a prompt of its owner, or a prefix that it awaits, is computed."""
        sequence.is_long = self._is_long(len(sequence.tokens))
        computes = any(running.owner == sequence.owner and running.uncomputed > 1 for running in self.running)
        return not computes and not self._waits_for_prefix(sequence)

    def _is_within_share(self, sequence: Sequence) -> bool:
        """Whether its owner has no more than its share when this sequence runs too; always, where there is one owner."""
        num_owners, owner = self._num_owners, sequence.owner
        num_pages = self._pages_of_owners()[owner] + self._pages_for(len(sequence.tokens))
        return num_owners == 1 or (
            self._num_running[owner] < self.slots.num_slots // num_owners
            and num_pages <= self.pool.num_pages // num_owners
        )

    def _pages_of_owners(self) -> Counter[str]:
        pages: Counter[str] = Counter()
        for sequence in self.running:
            pages[sequence.owner] += len(sequence.pages)
        return pages

    def _last_of(self, owner: str) -> Sequence:
        return next(sequence for sequence in reversed(self.running) if sequence.owner == owner)

    def _count_reporting(self, sequence: Sequence, count: int, logprobs: int) -> tuple[int, int]:
        """Returns how many tokens of a prompt that is reported on a step may have, and the log-probabilities that are left for others."""
        per_token = 1 + (sequence.params.prompt_logprobs or 0)
        reported = min(count, max(0, sequence.num_prompt - 1 - sequence.computed))
        if reported * per_token <= logprobs:
            return count, logprobs - reported * per_token
        count = logprobs // per_token
        return count, logprobs - count * per_token

    def schedule_ahead(self, step: Sequences[ScheduledSequence]) -> tuple[list[ScheduledSequence], list[int]] | None:
        """Returns the step after one of which no token is known yet, with each one's row there; None if the tokens decide what it is.

        A sequence that turns out to end is in it for nothing. It has room for one more token in its pages, as others may have
        them only in later steps.
        """
        if self.waiting:
            return None
        ahead: list[ScheduledSequence] = []
        rows: list[int] = []
        without_room: list[Sequence] = []
        num_running, page_size = 0, self.pool.page_size
        for row, work in enumerate(step):
            sequence, start = work.sequence, work.start + 1
            if sequence.completion.finish_reason is not None:
                continue
            if not work.decodes or (not sequence.is_long and self._is_long(start + 1)):
                return None
            num_running += 1
            if start + 1 < sequence.max_length:
                ahead.append(ScheduledSequence(sequence, start, 1))
                rows.append(row)
                if start >= len(sequence.pages) * page_size:
                    without_room.append(sequence)
        if not ahead or num_running != len(self.running) or len(without_room) > self.pool.num_free:
            return None
        for sequence in without_room:
            self._reserve(sequence, len(sequence.pages) * page_size + 1)
        return ahead, rows

    def advance(self, work: ScheduledSequence, accepted: int = 0) -> None:
        """Notes that the step has run, and that so many of its drafts are the sequence's next tokens."""
        sequence = work.sequence
        if work.start < len(sequence.completion.prompt_ids):
            self.num_computed_prompt_tokens += min(work.count, sequence.num_prompt - work.start)
        sequence.computed = work.start + work.count - len(work.drafts) + accepted
        if sequence.computed // self.pool.page_size > work.start // self.pool.page_size:  # a page is full now
            tokens = [*sequence.tokens, *work.drafts[:accepted]] if accepted else sequence.tokens
            self.pool.add_prefix(sequence.pages, tokens, computed=sequence.computed, root=sequence.prefix_root)

    def reserve_drafts(self, sequence: Sequence, wanted: int) -> int:
        """Makes room for drafts after the tokens of a running sequence; returns for how many.

        They preempt nobody: a page for the next token of every running sequence is left. They end where rotary factors change.
        """
        if self._original_context is not None and not sequence.is_long:
            wanted = max(0, min(wanted, self._original_context - len(sequence.tokens)))
        missing = self._pages_for(len(sequence.tokens) + wanted) - len(sequence.pages)
        if missing > 0 and self.pool.num_free - missing >= len(self.running):
            sequence.pages += self.pool.allocate(missing) or []
        return max(0, min(wanted, len(sequence.pages) * self.pool.page_size - len(sequence.tokens)))

    def _waits_for_prefix(self, sequence: Sequence) -> bool:
        """Whether a running sequence computes tokens now that this one begins with: to wait for them is less than to compute them."""
        if not self.pool.prefix_caching:
            return False
        awaited = sequence.awaited
        if awaited is not None and awaited.sequence in self.running and awaited.sequence.computed < awaited.computed:
            return True
        root = sequence.prefix_root
        known = self.pool.count_prefix(sequence.tokens, at_most=sequence.shareable, root=root)
        leaders = [running for running in self.running if running.uncomputed > 0 and running.prefix_root == root]
        shared = ((self._shared_tokens(sequence, other), other) for other in leaders)
        most, leader = max(shared, key=lambda candidate: candidate[0], default=(0, None))
        sequence.awaited = None if leader is None or most <= known else AwaitedPrefix(leader, most)
        return sequence.awaited is not None

    def _shared_tokens(self, sequence: Sequence, running: Sequence) -> int:
        """Returns how many tokens of full pages both begin with, and the second has still to compute some of; 0 if none."""
        size = self.pool.page_size
        most = min(sequence.shareable, len(running.tokens)) // size * size
        if most <= running.computed or running.tokens[:size] != sequence.tokens[:size]:
            return 0
        pages = range(0, most, size)
        same = next((at for at in pages if running.tokens[at : at + size] != sequence.tokens[at : at + size]), most)
        return same if same > running.computed else 0

    def _admit(self, sequence: Sequence, budget: int) -> bool:
        """Gives a waiting sequence its first pages; another one's prefix if there is one."""
        sequence.awaited = None
        root = sequence.prefix_root
        sequence.pages = self.pool.find_prefix(sequence.tokens, at_most=sequence.shareable, root=root)
        sequence.computed = len(sequence.pages) * self.pool.page_size
        # One that was preempted waits for room for all of it: else it would be preempted again, for ever for an owner of many pages.
        needed = sequence.computed + (sequence.uncomputed if sequence.restarted else min(sequence.uncomputed, budget))
        pages = self.pool.allocate(self._pages_for(needed) - len(sequence.pages))
        if pages is None:
            self.pool.release(sequence.pages)
            sequence.pages, sequence.computed = [], 0
            return False
        sequence.pages += pages
        if sequence.num_new == 0:
            sequence.completion.cached_tokens = sequence.computed
        return True

    def _reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Makes room for so many tokens; may preempt the last sequence of whoever would have most pages, and so itself."""
        missing = self._pages_for(tokens) - len(sequence.pages)
        while missing > 0:
            pages = self.pool.allocate(missing)
            if pages is not None:
                sequence.pages += pages
                break
            last = self.running[-1]
            if len(self._num_running) > 1:
                owners = self._pages_of_owners()
                owners[sequence.owner] += missing
                last = self._last_of(max(owners, key=lambda owner: (owners[owner], owner == sequence.owner)))
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _is_long(self, length: int) -> bool:
        return self._original_context is not None and length > self._original_context

    def _restart_long_sequences(self) -> None:
        """Computes anew what grew beyond the original context of LongRoPE: all its tokens have other rotary factors now."""
        if self._original_context is None:
            return
        for sequence in reversed(self.running[:]):
            if not sequence.is_long and self._is_long(len(sequence.tokens)):
                self._restart(sequence)

    def _stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._num_running[sequence.owner] -= 1
        if not self._num_running[sequence.owner]:
            del self._num_running[sequence.owner]
        self.pool.release(sequence.pages)
        self.slots.release(sequence.slot)

    def _restart(self, sequence: Sequence) -> None:
        self._stop(sequence)
        sequence.start_again()
        self.waiting.append_left(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self._restart(sequence)
        self.num_preemptions += 1

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.page_size)
