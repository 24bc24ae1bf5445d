"""Maps training sample i to its tokens: pure functions of document lengths, sequence length and seed.

A document here is a sequence of the file; most files have one for each document. One epoch is every document of a split once. Documents of
all epochs are shuffled together and concatenated to one stream of tokens; sample k is the S+1 tokens from token k*S on, so consecutive
samples share one token (the last label of one is the first input of the next) and every token but the last few is predicted once. The
order in which samples are used is shuffled once more. If the last epoch is needed for less than 80% of its samples, it is shuffled
separately and comes last; otherwise documents of a barely used epoch would displace ones not yet seen in earlier epochs.

These are Megatron's rules, and the draws come from the same frozen numpy generator in the same order, so a run ported
here with its seed sees the same samples in the same order.

Why all epochs are built at once, and not each when it is needed: numpy's shuffle (Fisher-Yates) goes from the last element to the first,
and its last draw decides the first sample. So no sample of Megatron's order is known before all draws are made, two for each sample of
the whole run or so. What remains is to say how long it takes, to bound the memory, and to keep the result (`index_cache.py`).

Finding the document that contains token k*S is a search in the prefix sum of document lengths. Doing it for all k in
one vectorized pass needs several int64 arrays as long as the stream has documents; doing it block by block gives the
same result with memory bounded by the result itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FINAL_EPOCH_THRESHOLD = 0.80
BLOCK_DOCUMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """How often the documents are repeated, and whether the last epoch is shuffled separately."""

    num_epochs: int
    tokens_per_epoch: int
    seq_length: int
    separate_final_epoch: bool

    @property
    def num_samples(self) -> int:
        """Samples in all epochs together; the last tokens that do not fill one are dropped."""
        return (self.num_epochs * self.tokens_per_epoch - 1) // self.seq_length

    @property
    def num_samples_shuffled_first(self) -> int:
        """Samples that are shuffled among each other before the last epoch's."""
        if not self.separate_final_epoch:
            return self.num_samples
        return ((self.num_epochs - 1) * self.tokens_per_epoch - 1) // self.seq_length


@dataclass(frozen=True, slots=True)
class SampleIndices:
    """The three arrays that map a sample index to tokens.

    document_index: the stream, as document numbers. sample_index: [samples + 1, 2], position in `document_index` and token offset where
    sample k begins (and sample k - 1 ends, inclusive). shuffle_index: the k of the i-th sample used.
    """

    document_index: NDArray[np.integer]
    sample_index: NDArray[np.integer]
    shuffle_index: NDArray[np.integer]


def legacy_random_state(*numbers: int) -> np.random.RandomState:
    """Returns numpy's legacy generator, whose stream is frozen for good, seeded by numbers of any size."""
    if len(numbers) == 1 and numbers[0] < 1 << 32:
        return np.random.RandomState(numbers[0])
    seeds = [number >> shift & 0xFFFFFFFF for number in numbers for shift in (0, 32) if shift == 0 or number >> 32]
    return np.random.RandomState(seeds)


def plan_epochs(tokens_per_epoch: int, seq_length: int, num_samples: int | None) -> EpochPlan:
    """Returns the fewest epochs that supply `num_samples` samples (one epoch when it is None)."""
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


def index_bytes(plan: EpochPlan, num_documents: int) -> int:
    """Returns the bytes of the three arrays of a plan.

    >>> index_bytes(plan_epochs(tokens_per_epoch=1000, seq_length=10, num_samples=500), 100)
    9596
    """
    stream = num_documents * plan.num_epochs
    entry = _smallest_int_dtype(stream).itemsize
    return (
        stream * _smallest_int_dtype(num_documents).itemsize
        + (plan.num_samples + 1) * 2 * entry
        + plan.num_samples * _shuffle_index_dtype(plan).itemsize
    )


def build_sample_indices(
    documents: NDArray[np.integer],
    lengths: NDArray[np.integer],
    plan: EpochPlan,
    seed: int,
    *,
    on_part: Callable[[str], None] = lambda part: None,
) -> SampleIndices:
    """Builds the index for a plan. `lengths` is indexed by document number; `documents` are the numbers to use.

    `on_part` is told of each of the three arrays before it is built.
    """
    random = legacy_random_state(seed)
    on_part("documents are shuffled")
    stream = _build_document_index(documents, plan, random)
    on_part("samples are cut")
    samples = _build_sample_index(stream, lengths, plan)
    on_part("samples are shuffled")
    return SampleIndices(stream, samples, _build_shuffle_index(plan, random))


def _build_document_index(
    documents: NDArray[np.integer], plan: EpochPlan, random: np.random.RandomState
) -> NDArray[np.integer]:
    base = documents.astype(_smallest_int_dtype(int(documents.max()) if len(documents) else 0))
    stream = np.tile(base, plan.num_epochs)
    cut = len(stream) - len(base) if plan.separate_final_epoch else len(stream)
    random.shuffle(stream[:cut])
    if cut < len(stream):
        random.shuffle(stream[cut:])
    return stream


def _build_sample_index(
    document_index: NDArray[np.integer], lengths: NDArray[np.integer], plan: EpochPlan
) -> NDArray[np.integer]:
    """Returns for each k in 0..samples the position and offset in the stream of token k * seq_length."""
    starts = np.empty((plan.num_samples + 1, 2), _smallest_int_dtype(max(len(document_index), int(lengths.max()))))
    tokens, done = 0, 0
    for first in range(0, len(document_index), BLOCK_DOCUMENTS):
        ends = np.cumsum(lengths[document_index[first : first + BLOCK_DOCUMENTS]], dtype=np.int64)
        ends += tokens
        # Samples that begin inside this block: all k with k * seq_length < ends[-1].
        until = max(done, min(plan.num_samples + 1, -(-int(ends[-1]) // plan.seq_length)))
        wanted = np.arange(done, until, dtype=np.int64) * plan.seq_length
        # side="right" skips empty documents and puts a token on a boundary into the document it opens.
        position = np.searchsorted(ends, wanted, side="right")
        starts[done:until, 0] = position + first
        starts[done:until, 1] = wanted - np.where(position > 0, ends[np.maximum(position - 1, 0)], tokens)
        tokens, done = int(ends[-1]), until
    assert done == len(starts), "the plan promised more tokens than the documents hold"
    return starts


def _smallest_int_dtype(largest: int) -> np.dtype:
    return np.dtype(np.int32 if largest <= np.iinfo(np.int32).max else np.int64)


def _shuffle_index_dtype(plan: EpochPlan) -> np.dtype:
    # Megatron reserves the two largest values of uint32; the draws themselves do not depend on the dtype.
    return np.dtype(np.uint32 if plan.num_samples < np.iinfo(np.uint32).max - 1 else np.int64)


def _build_shuffle_index(plan: EpochPlan, random: np.random.RandomState) -> NDArray[np.integer]:
    order = np.arange(plan.num_samples, dtype=_shuffle_index_dtype(plan))
    cut = plan.num_samples_shuffled_first
    random.shuffle(order[:cut])
    if cut < len(order):
        random.shuffle(order[cut:])
    return order
