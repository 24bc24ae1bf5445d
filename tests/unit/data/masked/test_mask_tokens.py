"""Which tokens are masked, and what becomes of them: shares, whole words, n-grams, budgets."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from petatron.data.masked.mask_tokens import (
    MaskableWords,
    MaskingRandom,
    NgramLengths,
    NgramRule,
    choose_ngrams,
    mask_in_place,
    masked_budget,
)
from petatron.data.masked.masking_vocabulary import MaskingVocabulary

SIZE, CLS, SEP, MASK = 1000, 1, 2, 3
CONTINUES = np.zeros(SIZE, np.bool_)
CONTINUES[900:] = True
VOCABULARY = MaskingVocabulary(SIZE, {"pad": 0, "cls": CLS, "sep": SEP, "mask": MASK}, (), CONTINUES)
SINGLE = NgramRule(1, "short")


def test_eighty_ten_ten():
    """Of masked tokens 80 % become [MASK], 10 % a random token, 10 % stay; all are predicted."""
    random, counts = np.random.RandomState(1), Counter()
    for _ in range(300):
        tokens = random.randint(10, 900, size=200)
        original = tokens.copy()
        maskable = MaskableWords.of(tokens, VOCABULARY, whole_words=True)
        positions = mask_in_place(tokens, maskable, 30.0, SINGLE, random, VOCABULARY)
        assert len(positions) == len(set(positions)) == 30
        untouched = np.setdiff1d(np.arange(200), positions)
        assert np.array_equal(tokens[untouched], original[untouched])
        for position in positions:
            token = tokens[position]
            counts["mask" if token == MASK else "same" if token == original[position] else "random"] += 1
    total = sum(counts.values())
    for name, share in (("mask", 0.8), ("same", 0.1), ("random", 0.1)):
        assert abs(counts[name] / total - share) < 4 * np.sqrt(share * (1 - share) / total), counts


@pytest.mark.parametrize("whole_words", [True, False])
def test_a_word_is_masked_with_all_its_pieces(whole_words: bool):
    tokens = np.array([CLS, 10, 901, 902, 11, SEP, 12, 903, SEP])
    maskable = MaskableWords.of(tokens, VOCABULARY, whole_words=whole_words)
    assert maskable.positions == [1, 2, 3, 4, 6, 7], "special tokens are no words"
    assert maskable.starts == ([0, 3, 4, 6] if whole_words else [0, 1, 2, 3, 4, 5, 6])
    seen = set()
    for seed in range(50):
        chosen = choose_ngrams(maskable, 3.0, SINGLE, np.random.RandomState(seed))
        seen |= {tuple(positions) for positions in chosen}
        assert 1 <= sum(map(len, chosen)) <= 3
    assert seen == ({(1, 2, 3), (4,), (6, 7)} if whole_words else {(place,) for place in maskable.positions})


def test_a_text_may_begin_within_a_word():
    maskable = MaskableWords.of(np.array([901, 902, 10]), VOCABULARY, whole_words=True)
    assert maskable.starts == [0, 2, 3] and len(maskable) == 2
    assert len(MaskableWords.of(np.array([CLS, SEP]), VOCABULARY, whole_words=True)) == 0


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ("short", {1: 6 / 11, 2: 3 / 11, 3: 2 / 11}),
        ("long", {1: 2 / 11, 2: 3 / 11, 3: 6 / 11}),
        ("geometric", {1: 0.2, 2: 0.16, 3: 0.64}),
    ],
)
def test_lengths_of_n_grams(lengths: NgramLengths, expected: dict[int, float]):
    """Megatron's 1/n, the same turned around, and SpanBERT's geometric lengths, of which long ones are cut."""
    rule, total = NgramRule(3, lengths), 20_000
    draw = rule.drawing(np.random.RandomState(5))
    counts = Counter(draw() for _ in range(total))
    assert counts.keys() == expected.keys()
    for length, share in expected.items():
        assert abs(counts[length] / total - share) < 4 * np.sqrt(share * (1 - share) / total)
    assert rule.mean_length == pytest.approx(sum(length * share for length, share in expected.items()))


def test_n_grams_are_neighbors_that_do_not_overlap_and_keep_the_budget():
    tokens = np.arange(10, 210)
    maskable = MaskableWords.of(tokens, VOCABULARY, whole_words=True)
    for seed in range(30):
        chosen = choose_ngrams(maskable, 37.5, NgramRule(5, "long"), np.random.RandomState(seed))
        flat = [position for positions in chosen for position in positions]
        assert len(flat) == len(set(flat)) <= 37 and len(flat) > 30
        assert all(positions == list(range(positions[0], positions[-1] + 1)) for positions in chosen)
        assert max(map(len, chosen)) > 1


def test_an_n_gram_is_shortened_to_what_is_left():
    maskable = MaskableWords.of(np.arange(10, 20), VOCABULARY, whole_words=True)
    for seed in range(30):
        assert sum(map(len, choose_ngrams(maskable, 2.0, NgramRule(4, "long"), np.random.RandomState(seed)))) == 2


def test_the_budget_is_a_share_and_one_at_least():
    assert [masked_budget(count, 0.15, 100) for count in (1, 20, 100)] == [1, 3, 15]
    assert masked_budget(103, 0.15, 100) == 15.0, "no more than of the target"
    assert masked_budget(5, 0.15, 4) == pytest.approx(0.6), "of a very short target nothing"
    assert (
        choose_ngrams(
            MaskableWords.of(np.arange(10, 15), VOCABULARY, whole_words=True), 0.6, SINGLE, np.random.RandomState(1)
        )
        == []
    )


def test_a_sample_s_draws_depend_on_its_number_alone():
    random = MaskingRandom(7)
    first = random.of_sample(3).random_sample(5).tolist()
    random.of_sample(4).random_sample(9)
    assert (
        random.of_sample(3).random_sample(5).tolist()
        == first
        == MaskingRandom(8).of_sample(2).random_sample(5).tolist()
    )
