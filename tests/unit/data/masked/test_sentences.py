"""Sentences become samples, and samples pairs of segments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from petatron.base.errors import DataError
from petatron.data.masked import sentence_samples
from petatron.data.masked.mersenne_shuffle import mersenne_permutation
from petatron.data.masked.sentence_pairs import split_sentences, truncate_segments
from petatron.data.masked.sentence_samples import (
    GatheringRule,
    gather_sentences,
    no_samples_error,
    usable_documents,
)

LENGTHS = np.random.RandomState(3).randint(1, 30, size=400)
STARTS = np.array([0, 1, 3, 40, 41, 90, 91, 200, 399, 400])
RULE = {"max_length": 61, "min_sentences": 2, "short_probability": 0.1, "longest_sentence": 512}


def gathered(num_samples: int = 1, seed: int = 5, **changes: Any) -> dict[str, np.ndarray]:
    return dict(
        gather_sentences(LENGTHS, STARTS, GatheringRule(**{**RULE, **changes}), num_samples=num_samples, seed=seed)
    )


def test_an_epoch_has_every_sentence_of_usable_documents_once():
    for least in (1, 2):
        samples = gathered(min_sentences=least)
        seen = sorted(number for pair in zip(samples["first"], samples["stop"]) for number in range(*pair))
        usable = usable_documents(LENGTHS, STARTS, GatheringRule(**{**RULE, "min_sentences": least}))
        assert seen == [
            number for first, stop, used in zip(STARTS, STARTS[1:], usable) if used for number in range(first, stop)
        ]
        assert usable.all() == (least == 1)
        assert samples["epoch_ends"].tolist() == [len(samples["first"])]
        assert all(stop - first >= least for first, stop in zip(samples["first"], samples["stop"]))


def test_full_samples_reach_their_length_unless_the_document_ends():
    samples = gathered(short_probability=0.0)
    assert set(samples["target"].tolist()) == {61}
    ends = set(STARTS.tolist())
    for first, stop in zip(samples["first"].tolist(), samples["stop"].tolist()):
        length = LENGTHS[first:stop].sum()
        assert length >= 61 or stop in ends
        assert LENGTHS[first : stop - 1].sum() < 61 or stop - first == 2 or stop in ends, "no sentence more than needed"
        assert all(start <= first or start >= stop for start in STARTS), "of one document"


@pytest.mark.parametrize("probability", [0.1, 0.5, 1.0])
def test_a_share_of_targets_is_short(probability: float):
    targets = gathered(2000, short_probability=probability)["target"]
    short = targets[targets < 61]
    # One number decides and is the target, as in Megatron: of 60 lengths only those come that the ratio leaves.
    ratio = round(1 / probability)
    expected = set(range(2, 62, ratio)) - {61}
    assert set(short.tolist()) == expected
    share = len(expected) * ratio / 60 / ratio
    assert abs(len(short) / len(targets) - share) < 4 * np.sqrt(share * (1 - share) / len(targets)) + 0.01


def test_epochs_are_added_until_there_are_enough_and_shuffled_together():
    once, more = gathered(1), gathered(len(gathered(1)["first"]) + 1)
    assert len(more["epoch_ends"]) == 2 and len(more["first"]) == more["epoch_ends"][-1]
    assert more["first"].tolist() != sorted(more["first"].tolist())
    assert gathered(seed=6)["first"].tolist() != once["first"].tolist()
    without = gathered(2 * len(gathered(short_probability=0.0)["first"]), short_probability=0.0)
    assert np.array_equal(np.sort(without["first"])[::2], np.sort(gathered(short_probability=0.0)["first"]))


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch):
    whole = gathered(500)
    monkeypatch.setattr(sentence_samples, "BLOCK_SENTENCES", 7)
    blocks = gathered(500)
    assert all(np.array_equal(whole[name], blocks[name]) for name in whole)


def test_documents_with_a_very_long_sentence_are_left_out():
    lengths, starts = np.array([600, 3, 4, 5, 700]), np.array([0, 1, 3, 5])
    rule = GatheringRule(**{**RULE, "min_sentences": 1})
    assert usable_documents(lengths, starts, rule).tolist() == [True, True, False], (
        "one that is a single sentence stays"
    )
    assert not len(gather_sentences(lengths[3:], np.array([0, 2]), rule, num_samples=1, seed=1)["first"])
    with pytest.raises(
        DataError, match=r"x: none of 3 documents makes a sample\. A sample needs 1 sentences.*--split-sentences"
    ):
        raise no_samples_error("x", 3, rule)


def test_the_shuffle_is_that_of_one_swap_after_the_other():
    for count in (1, 2, 5, 63, 64, 1000, 5000):
        assert sorted(mersenne_permutation(count, 9).tolist()) == list(range(count))
    assert mersenne_permutation(1000, 9).tolist() == mersenne_permutation(1000, 9).tolist()
    assert mersenne_permutation(1000, 9).tolist() != mersenne_permutation(1000, 10).tolist()
    assert mersenne_permutation(0, 1).tolist() == []


def test_the_first_segment_has_one_sentence_at_least_and_leaves_one():
    tokens, ends = np.arange(20), np.array([4, 9, 12, 20])
    cuts = {len(split_sentences(tokens, ends, np.random.RandomState(seed))[0]) for seed in range(60)}
    assert cuts == {4, 9, 12}
    first, second = split_sentences(tokens[:9], ends[:2], np.random.RandomState(1))
    assert (first.tolist(), second.tolist()) == (list(range(4)), list(range(4, 9)))
    assert not len(split_sentences(tokens[:4], ends[:1], np.random.RandomState(1))[1])


def reference_truncation(
    first: list[int], second: list[int], length: int, random: np.random.RandomState
) -> list[list[int]]:
    """One token after the other."""
    while len(first) + len(second) > length:
        longer = first if len(first) > len(second) else second
        del longer[0 if random.random_sample() < 0.5 else -1]
    return [first, second]


def test_the_longer_segment_is_cut_at_both_ends():
    for seed in range(80):
        sizes = np.random.RandomState(seed).randint(0, 25, size=2)
        first, second = np.arange(sizes[0]), np.arange(100, 100 + sizes[1])
        ours = truncate_segments(first, second, 17, np.random.RandomState(seed))
        theirs = reference_truncation(first.tolist(), second.tolist(), 17, np.random.RandomState(seed))
        assert [segment.tolist() for segment in ours] == theirs
        assert sum(map(len, ours)) == min(17, int(sizes.sum()))
