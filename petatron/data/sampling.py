"""Which tokens make up training sample i: pure functions of document lengths, sequence length and seed.

One epoch is every document of a split once. Documents of all epochs are shuffled together and laid end to end as one
stream of tokens; sample k is the S+1 tokens from token k*S on, so consecutive samples share one token (the last label
of one is the first input of the next) and every token but the last few is predicted once. The order in which samples
are used is shuffled once more. If the last epoch is needed for less than 80% of its samples, it is shuffled apart and
comes last; otherwise documents of a barely used epoch would take the place of ones not yet seen in earlier epochs.

These are Megatron's rules, and the draws come from the same frozen numpy generator in the same order, so a run moved
here with its seed sees the same samples in the same order.

Finding the document that holds token k*S is a search in the running sum of document lengths. Doing it for all k in
one vectorised pass needs several int64 arrays as long as the stream has documents; doing it block by block gives the
same result with memory bounded by the result itself.

An index that somebody left on disk is held against the same rules (`index_flaw`). To find where a sample begins is a search; to
check it is a comparison, and that every document and sample is there as often as it must be is a count. So the proof takes a quarter of
the time of building, and leaves open only which of the shuffles it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FINAL_EPOCH_THRESHOLD = 0.80
BLOCK_DOCUMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """How often the documents are repeated, and whether the last time is kept apart."""

    num_epochs: int
    tokens_per_epoch: int
    seq_length: int
    separate_final_epoch: bool

    @property
    def num_samples(self) -> int:
        """Samples in all epochs together; the last tokens that do not fill one are left out."""
        return (self.num_epochs * self.tokens_per_epoch - 1) // self.seq_length

    @property
    def num_samples_shuffled_first(self) -> int:
        """Samples that are shuffled among each other before the rest."""
        if not self.separate_final_epoch:
            return self.num_samples
        return ((self.num_epochs - 1) * self.tokens_per_epoch - 1) // self.seq_length


@dataclass(frozen=True, slots=True)
class SampleIndex:
    """The three arrays that turn a sample number into tokens.

    documents: the stream, as document numbers. starts: [samples + 1, 2], position in `documents` and token offset where
    sample k begins (and sample k - 1 ends, inclusive). order: the k of the i-th sample used.
    """

    documents: NDArray[np.integer]
    starts: NDArray[np.integer]
    order: NDArray[np.integer]


def frozen_random(*numbers: int) -> np.random.RandomState:
    """Numpy's legacy generator, whose stream is frozen for good, seeded by numbers of any size."""
    if len(numbers) == 1 and numbers[0] < 1 << 32:
        return np.random.RandomState(numbers[0])
    words = [number >> shift & 0xFFFFFFFF for number in numbers for shift in (0, 32) if shift == 0 or number >> 32]
    return np.random.RandomState(words)


def plan_epochs(tokens_per_epoch: int, seq_length: int, num_samples: int | None) -> EpochPlan:
    """Fewest epochs that supply `num_samples` samples (one epoch when it is None)."""
    if tokens_per_epoch < 1 or seq_length < 1:
        raise ValueError(f"tokens_per_epoch {tokens_per_epoch} and seq_length {seq_length} must be positive")
    if num_samples is None:
        return EpochPlan(1, tokens_per_epoch, seq_length, separate_final_epoch=False)
    num_epochs = max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))
    plan = EpochPlan(num_epochs, tokens_per_epoch, seq_length, separate_final_epoch=num_epochs > 1)
    if num_epochs == 1:
        return plan
    samples_from_final_epoch = num_samples - plan.num_samples_shuffled_first
    samples_per_epoch = (tokens_per_epoch - 1) // seq_length
    separate = samples_from_final_epoch < int(FINAL_EPOCH_THRESHOLD * samples_per_epoch)
    return EpochPlan(num_epochs, tokens_per_epoch, seq_length, separate_final_epoch=separate)


def build_sample_index(
    documents: NDArray[np.integer], lengths: NDArray[np.integer], plan: EpochPlan, seed: int
) -> SampleIndex:
    """Build the index for a plan. `lengths` is indexed by document number; `documents` are the numbers to use."""
    random = frozen_random(seed)
    stream = _document_stream(documents, plan, random)
    return SampleIndex(stream, _sample_starts(stream, lengths, plan), _sample_order(plan, random))


def _document_stream(
    documents: NDArray[np.integer], plan: EpochPlan, random: np.random.RandomState
) -> NDArray[np.integer]:
    base = documents.astype(_integer(int(documents.max()) if len(documents) else 0))
    stream = np.tile(base, plan.num_epochs)
    cut = len(stream) - len(base) if plan.separate_final_epoch else len(stream)
    random.shuffle(stream[:cut])
    if cut < len(stream):
        random.shuffle(stream[cut:])
    return stream


def _sample_starts(stream: NDArray[np.integer], lengths: NDArray[np.integer], plan: EpochPlan) -> NDArray[np.integer]:
    """For each k in 0..samples: the position and offset in the stream of token k * seq_length."""
    starts = np.empty((plan.num_samples + 1, 2), _integer(max(len(stream), int(lengths.max()))))
    done = 0
    for block in _blocks(stream, lengths, plan):
        # side="right" skips empty documents and puts a token on a boundary into the document it opens.
        position = np.searchsorted(block.ends, block.wanted, side="right")
        done = block.samples.stop
        starts[block.samples, 0] = position + block.first
        starts[block.samples, 1] = block.wanted - block.tokens_before(position)
    assert done == len(starts), "the plan promised more tokens than the documents hold"
    return starts


@dataclass(frozen=True, slots=True)
class _Block:
    """Some documents of the stream, where each ends in it, and the samples that begin inside: which, and at which token."""

    first: int
    tokens_so_far: int
    ends: NDArray[np.int64]
    samples: slice
    wanted: NDArray[np.int64]

    def tokens_before(self, position: NDArray) -> NDArray[np.int64]:
        """Tokens of the stream before the documents at these positions of the block."""
        return np.where(position > 0, self.ends[np.maximum(position - 1, 0)], self.tokens_so_far)


def _blocks(stream: NDArray[np.integer], lengths: NDArray[np.integer], plan: EpochPlan) -> Iterator[_Block]:
    tokens, done = 0, 0
    for first in range(0, len(stream), BLOCK_DOCUMENTS):
        ends = np.cumsum(lengths[stream[first : first + BLOCK_DOCUMENTS]], dtype=np.int64)
        ends += tokens
        # Samples that begin inside this block: all k with k * seq_length < ends[-1].
        until = max(done, min(plan.num_samples + 1, -(-int(ends[-1]) // plan.seq_length)))
        yield _Block(first, tokens, ends, slice(done, until), np.arange(done, until, dtype=np.int64) * plan.seq_length)
        tokens, done = int(ends[-1]), until


def _integer(largest: int) -> np.dtype:
    return np.dtype(np.int32 if largest <= np.iinfo(np.int32).max else np.int64)


def _order_dtype(plan: EpochPlan) -> np.dtype:
    # Megatron keeps the two largest values of uint32 free; the draws themselves do not depend on the type.
    return np.dtype(np.uint32 if plan.num_samples < np.iinfo(np.uint32).max - 1 else np.int64)


def _sample_order(plan: EpochPlan, random: np.random.RandomState) -> NDArray[np.integer]:
    order = np.arange(plan.num_samples, dtype=_order_dtype(plan))
    cut = plan.num_samples_shuffled_first
    random.shuffle(order[:cut])
    if cut < len(order):
        random.shuffle(order[cut:])
    return order


def index_flaw(index: SampleIndex, documents: range, lengths: NDArray[np.integer], plan: EpochPlan) -> str | None:
    """Why this cannot be the index of these documents under this plan, or None if it is one, whatever the shuffle."""
    stream, starts, order = index.documents, index.starts, index.order
    largest = max(len(documents) * plan.num_epochs, int(lengths.max()))
    expected = {
        "documents": (stream, (len(documents) * plan.num_epochs,), _integer(documents.stop - 1)),
        "starts": (starts, (plan.num_samples + 1, 2), _integer(largest)),
        "order": (order, (plan.num_samples,), _order_dtype(plan)),
    }
    for name, (array, shape, dtype) in expected.items():
        if flaw := array_flaw(name, array, shape, dtype):
            return flaw
    last = len(documents) if plan.separate_final_epoch else 0
    early = plan.num_epochs - 1 if plan.separate_final_epoch else plan.num_epochs
    cut, first = len(stream) - last, plan.num_samples_shuffled_first
    if not (_holds_each(stream[:cut], documents, early) and (not last or _holds_each(stream[cut:], documents, 1))):
        return "documents are missing, or are there too often"
    if not all(_begin_as_they_must(starts, block) for block in _blocks(stream, lengths, plan)):
        return "samples do not begin where the document lengths put them"
    if not (_holds_each(order[:first], range(first), 1) and _holds_each(order[first:], range(first, len(order)), 1)):
        return "samples are missing, or are there too often"
    return None


def array_flaw(name: str, array: NDArray, shape: tuple[int, ...], dtype: np.dtype) -> str | None:
    """Whether an array that somebody left on disk is of another form than it must be."""
    if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
        return f"{name} is {array.dtype}{list(array.shape)}, not {dtype}{list(shape)}"
    return None


def _holds_each(values: NDArray[np.integer], allowed: range, times: int) -> bool:
    """Whether each allowed number is there so many times.

    Counts may wrap: one that equals `times` all the same is `times` or more, and as there are len(allowed) * times values, none is more.
    """
    if len(values) != len(allowed) * times:
        return False
    counts = np.zeros(len(allowed), np.min_scalar_type(times))
    for start in range(0, len(values), BLOCK_DOCUMENTS):
        part = values[start : start + BLOCK_DOCUMENTS]
        if int(part.min()) < allowed.start or int(part.max()) >= allowed.stop:
            return False
        np.add.at(counts, part.astype(np.int64) - allowed.start, counts.dtype.type(1))
    return bool((counts == times).all())


def _begin_as_they_must(starts: NDArray[np.integer], block: _Block) -> bool:
    position, offset = starts[block.samples, 0].astype(np.int64) - block.first, starts[block.samples, 1]
    if not len(position):
        return True
    if int(position.min()) < 0 or int(position.max()) >= len(block.ends):
        return False
    before = block.tokens_before(position)
    inside = (before <= block.wanted) & (block.wanted < block.ends[position])
    return bool((inside & (offset == block.wanted - before)).all())
