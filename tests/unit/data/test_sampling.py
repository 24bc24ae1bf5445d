from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.data import document_sample_shuffle_index as sample_index
from petatron.data.document_sample_shuffle_index import (
    SampleIndices,
    build_sample_indices,
    legacy_random_state,
    plan_epochs,
)

LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=15).filter(lambda lengths: sum(lengths) > 0)


def tokens_of(index: SampleIndices, lengths: list[int], sample: int) -> list[tuple[int, int, int]]:
    """Sample as (position in the stream, document, token number), read token by token."""
    position, offset = index.sample_index[sample].tolist()
    last, end = index.sample_index[sample + 1].tolist()
    tokens = []
    while (position, offset) <= (last, end):
        document = int(index.document_index[position])
        if offset < lengths[document]:
            tokens.append((position, document, offset))
            offset += 1
        else:
            position, offset = position + 1, 0
    return tokens


@settings(max_examples=150, deadline=None)
@given(lengths=LENGTHS, seq_length=st.integers(1, 9), num_samples=st.integers(1, 60), seed=st.integers(0, 2**32 - 1))
def test_windows_are_the_definition(lengths: list[int], seq_length: int, num_samples: int, seed: int) -> None:
    plan = plan_epochs(sum(lengths), seq_length, num_samples)
    index = build_sample_indices(np.arange(len(lengths)), np.array(lengths, np.int32), plan, seed)
    stream = [
        (position, int(document), offset)
        for position, document in enumerate(index.document_index)
        for offset in range(lengths[document])
    ]
    assert plan.num_samples >= num_samples
    assert index.sample_index.shape == (plan.num_samples + 1, 2)
    for sample in range(plan.num_samples):
        first = sample * seq_length
        assert tokens_of(index, lengths, sample) == stream[first : first + seq_length + 1]
    # Fewer than seq_length tokens are left over, and the order uses each sample once.
    assert len(stream) - 1 - plan.num_samples * seq_length < seq_length
    assert sorted(index.shuffle_index.tolist()) == list(range(plan.num_samples))


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, seq_length=st.integers(1, 9), num_samples=st.integers(1, 60))
def test_epochs(lengths: list[int], seq_length: int, num_samples: int) -> None:
    total = sum(lengths)
    plan = plan_epochs(total, seq_length, num_samples)
    enough = next(epochs for epochs in range(1, 10**6) if (epochs * total - 1) // seq_length >= num_samples)
    assert plan.num_epochs == enough
    index = build_sample_indices(np.arange(len(lengths)), np.array(lengths, np.int32), plan, 7)
    once = Counter(range(len(lengths)))
    assert Counter(index.document_index.tolist()) == Counter(dict.fromkeys(once, enough))
    cut = plan.num_samples_shuffled_first
    assert sorted(index.shuffle_index[:cut].tolist()) == list(range(cut))
    if enough > 1:
        before = ((enough - 1) * total - 1) // seq_length
        assert plan.separate_final_epoch == (num_samples - before < int(0.8 * ((total - 1) // seq_length)))
    if plan.separate_final_epoch:
        assert Counter(index.document_index[-len(lengths) :].tolist()) == once
        assert cut == ((enough - 1) * total - 1) // seq_length


def test_threshold_of_the_final_epoch() -> None:
    # 101 tokens, windows of 10: 10 samples per epoch; 2 epochs give 20.
    assert not plan_epochs(101, 10, 10).separate_final_epoch
    assert plan_epochs(101, 10, 17).separate_final_epoch
    assert not plan_epochs(101, 10, 18).separate_final_epoch
    assert plan_epochs(101, 10, None).num_epochs == 1
    with pytest.raises(ValueError, match="must be positive"):
        plan_epochs(0, 10, 5)


def test_blocks_give_the_same_index(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(0, 50, 300).astype(np.int32)
    lengths[100:200] = 0  # whole blocks without a token, hence without a sample start
    plan = plan_epochs(int(lengths.sum()), 7, 2500)
    whole = build_sample_indices(np.arange(300), lengths, plan, 3)
    monkeypatch.setattr(sample_index, "BLOCK_DOCUMENTS", 13)
    blocked = build_sample_indices(np.arange(300), lengths, plan, 3)
    assert np.array_equal(whole.sample_index, blocked.sample_index)


def test_order_is_frozen() -> None:
    """RandomState(1234) shuffles the 2 x 5 documents, then the 9 samples. Other values would reorder every resumed run."""
    plan = plan_epochs(20, 4, 9)
    index = build_sample_indices(np.arange(10, 15), np.array([0] * 10 + [3, 5, 2, 6, 4], np.int32), plan, 1234)
    assert (plan.num_epochs, plan.separate_final_epoch) == (2, False)
    assert index.document_index.tolist() == [12, 12, 14, 11, 10, 13, 14, 10, 11, 13]
    assert index.shuffle_index.tolist() == [7, 3, 5, 1, 4, 8, 0, 2, 6]
    assert (
        index.document_index.dtype == np.int32
        and index.sample_index.dtype == np.int32
        and index.shuffle_index.dtype == np.uint32
    )


def test_seed_decides() -> None:
    lengths = np.full(100, 10, np.int32)
    plan = plan_epochs(1000, 8, 100)
    first, again, other = (build_sample_indices(np.arange(100), lengths, plan, seed) for seed in (1, 1, 2))
    assert np.array_equal(first.document_index, again.document_index) and np.array_equal(
        first.shuffle_index, again.shuffle_index
    )
    assert not np.array_equal(first.document_index, other.document_index)


def test_seeds_of_any_size() -> None:
    draws = [
        legacy_random_state(*numbers).randint(1 << 30)
        for numbers in ((7,), (7 + (2 << 32),), (7, 0), (7, 1), (7, 1 << 40))
    ]
    assert len(set(draws)) == 5 and draws[0] == np.random.RandomState(7).randint(1 << 30)
