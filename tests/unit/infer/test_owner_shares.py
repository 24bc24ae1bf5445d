"""Slots, pages and tokens of steps among owners: one that is alone has all of them, and nobody waits for the end of another's sequences."""

from __future__ import annotations

import random

import pytest

from petatron.infer.engine_options import EngineOptions
from petatron.infer.engine_outputs import Completion
from petatron.infer.kv_cache_pages import CacheSize
from petatron.infer.sampling_params import SamplingParams
from petatron.infer.scheduler import ScheduledSequence, Scheduler
from petatron.infer.sequence import Sequence
from petatron.infer.text_stream import TextStream
from tests.longform import diagonal

PAGE = 4


class Steps:
    """A scheduler whose steps compute nothing."""

    def __init__(self, *, slots: int = 8, pages: int = 400, step_tokens: int = 64) -> None:
        options = EngineOptions(max_sequences=slots, max_step_tokens=step_tokens, page_size=PAGE)
        self.scheduler = Scheduler(options, CacheSize(pages + 1, slots + 1), prefix_caching=True)
        self.num_requests = self.num_steps = 0

    def add(self, owner: str, *, prompt: int = 4, new: int = 10) -> Sequence:
        self.num_requests += 1
        ids = [self.num_requests] * prompt
        params = SamplingParams(max_new_tokens=new, owner=owner, prefix_group=owner)
        sequence = Sequence(
            self.num_requests, ids, params, prompt + new, TextStream(None, params), Completion(list(ids))
        )
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[ScheduledSequence]:
        self.num_steps += 1
        scheduled = self.scheduler.schedule()
        assert len({id(work.sequence) for work in scheduled}) == len(scheduled)
        assert sum(work.count for work in scheduled) <= self.scheduler._options.max_step_tokens
        for work in scheduled:
            sequence = work.sequence
            assert sequence in self.scheduler.running and work.start == sequence.computed
            self.scheduler.advance(work)
            if work.start + work.count == len(sequence.tokens):
                sequence.tokens.append(7)
                if len(sequence.tokens) == sequence.max_length:
                    self.scheduler.remove(sequence)
                    sequence.completion.finish_reason = "length"
        return scheduled

    def running(self, owner: str) -> int:
        return sum(sequence.owner == owner for sequence in self.scheduler.running)

    def steps_until(self, *sequences: Sequence, new: int | None = None) -> int:
        """Returns the steps until all have ended, or have so many new tokens."""
        begin = self.num_steps
        while not all(
            one.completion.finish_reason is not None or (new is not None and one.num_new >= new) for one in sequences
        ):
            self.step()
            assert self.num_steps - begin < 5000, "it never ends"
        return self.num_steps - begin


def test_an_owner_that_is_alone_has_all_slots_in_order():
    steps = Steps()
    sequences = [steps.add("a") for _ in range(20)]
    steps.step()
    assert steps.scheduler.running == sequences[:8]
    assert steps.steps_until(*sequences) == 29 and steps.scheduler.num_preemptions == 0


def test_an_owner_that_comes_later_gets_its_share_of_slots_at_once():
    steps = Steps()
    for _ in range(50):
        steps.add("a", new=1000)
    steps.step()
    late = [steps.add("b", new=50) for _ in range(6)]
    steps.step()
    steps.steps_until(*late[:4], new=1)
    assert steps.num_steps < 8 and steps.running("a") == steps.running("b") == 4
    preempted = steps.scheduler.num_preemptions
    assert preempted == 4
    steps.steps_until(*late)
    assert steps.scheduler.num_preemptions == preempted, "nothing is exchanged to and fro"
    steps.step()
    assert steps.running("a") == 8, "what nobody else wants is the first owner's again"


def test_a_short_request_does_not_wait_for_pages_of_long_ones():
    steps = Steps(pages=40, slots=8)
    hog = [steps.add("a", prompt=72, new=80) for _ in range(8)]
    steps.steps_until(hog[1], new=2)
    assert steps.scheduler.pool.num_free < 4
    assert steps.steps_until(steps.add("b", prompt=16, new=8)) < 12
    steps.steps_until(*hog)


def test_who_has_most_pages_gives_them_up():
    """The first owner's sequences came first, and grow: those of the other never lose their pages."""
    steps = Steps(pages=30, slots=8)
    hog = [steps.add("a", prompt=4, new=100) for _ in range(6)]
    steps.step()
    other = steps.add("b", prompt=4, new=50)
    assert steps.steps_until(other) <= 53
    assert not other.restarted and steps.scheduler.num_preemptions > 0
    steps.steps_until(*hog)


def test_a_long_prompt_leaves_tokens_of_a_step_to_others():
    steps = Steps(step_tokens=32, pages=4000)
    steps.add("a", prompt=3000)
    steps.step()
    assert steps.steps_until(steps.add("b", prompt=16), new=1) == 1
    alone = Steps(step_tokens=32, pages=4000)
    alone.add("a", prompt=3000)
    assert [work.count for _ in range(3) for work in alone.step()] == [32, 32, 32]


def test_a_sequence_of_more_than_a_share_keeps_nobody_out():
    """It waits for room without a place in front of those who ask for less; and has it when they are done."""
    steps = Steps(pages=40, slots=8)
    long = steps.add("a", prompt=100, new=20)
    steps.steps_until(long, new=2)
    others = [steps.add("b", prompt=30, new=10) for _ in range(4)]
    steps.steps_until(*others)
    assert long.completion.finish_reason is None or steps.num_steps < 200
    steps.steps_until(long)


@diagonal(4)
@pytest.mark.parametrize("seed", range(20))
def test_every_sequence_of_any_mixture_ends(seed: int):
    """And all pages and slots are free then, whatever was preempted."""
    rng = random.Random(seed)
    steps = Steps(slots=rng.choice([1, 2, 5, 8]), pages=rng.choice([30, 60, 200]), step_tokens=rng.choice([8, 32]))
    sequences: list[Sequence] = []
    for _ in range(40):
        owner = rng.choice("aaaabbc")
        sequences.append(steps.add(owner, prompt=rng.randint(1, 60), new=rng.randint(1, 60)))
        for _ in range(rng.randint(0, 6)):
            steps.step()
        if rng.random() < 0.1:
            removed = rng.choice(sequences)
            steps.scheduler.remove(removed)
            removed.completion.finish_reason = "cancelled"
    steps.steps_until(*sequences)
    assert not steps.scheduler.has_work and steps.scheduler.pool.num_used == 0
    assert steps.scheduler.slots.num_free == steps.scheduler.slots.num_slots
