"""Gathers the sentences of documents into samples of a target length: pure functions of lengths and seed.

An epoch goes through the documents in the order of the file. Sentences of a document are gathered until they have the target length, and
at least as many as a sample needs. If no more than one sentence would be left, or the document ends, all that is left belongs to the
sample, so that a sample may be longer than its target: whoever reads it truncates it. A share of the targets is short, drawn from 2 to
the full length, since a model that is finetuned reads short texts too (Devlin et al., 2019, "BERT"). Documents with fewer sentences than
a sample needs are left out, and so are documents of several sentences of which one is very long: mostly these are tables or code.

As many whole epochs are gathered as the run needs, and their samples are shuffled together.

These are Megatron's rules, and its draws: a 32-bit Mersenne twister draws targets, one for each sample and one more for each document,
and a 64-bit one shuffles (mersenne_shuffle.py). So a run that is ported here with its seed sees the same samples in the same order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from petatron.base.errors import DataError
from petatron.data.document_sample_shuffle_index import legacy_random_state
from petatron.data.index_cache import Arrays
from petatron.data.masked.mersenne_shuffle import mersenne_permutation

BLOCK_SENTENCES = 1 << 20
"""Documents are gathered in blocks of about this many sentences, which bounds the memory."""
SAMPLE_ARRAYS = ("first", "stop", "target", "epoch_ends")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheringRule:
    """How sentences become samples. max_length: tokens of a full sample. longest_sentence: above it a document is left out."""

    max_length: int
    min_sentences: int
    short_probability: float
    longest_sentence: int

    @property
    def short_ratio(self) -> int:
        """One target in so many is short; 0 for none."""
        return int(1.0 / self.short_probability + 0.5) if self.short_probability else 0


def gather_sentences(
    lengths: NDArray[np.integer],
    document_starts: NDArray[np.integer],
    rule: GatheringRule,
    *,
    num_samples: int,
    seed: int,
) -> Arrays:
    """Returns samples in the order of their use: the first sentence of each, one after the last, and its target length.

    `lengths` are those of all sentences of a file, `document_starts` the first sentences of the documents to use, and the end of the last.
    epoch_ends: how many samples there are up to the end of each epoch, before they are shuffled.
    """
    usable = usable_documents(lengths, document_starts, rule)
    targets = _Targets(rule, seed)
    parts: list[tuple[NDArray, NDArray, NDArray]] = []
    ends: list[int] = []
    total = 0
    while total < num_samples:
        if not ends or rule.short_ratio:
            epoch = list(_gather_epoch(lengths, document_starts, usable, rule, targets))
        else:
            epoch = parts[: len(parts) // len(ends)]
        size = sum(len(first) for first, _, _ in epoch)
        if not size:
            break
        parts, total = parts + epoch, total + size
        ends.append(total)
    order = mersenne_permutation(total, seed + 1)
    columns = [np.concatenate([part[column] for part in parts] or [np.zeros(0, np.int64)]) for column in range(3)]
    named = {name: column[order] for name, column in zip(SAMPLE_ARRAYS, columns)}
    return {**named, "epoch_ends": np.array(ends, np.int64)}


def usable_documents(
    lengths: NDArray[np.integer], document_starts: NDArray[np.integer], rule: GatheringRule
) -> NDArray[np.bool_]:
    """Returns which documents samples are made of."""
    base = int(document_starts[0])
    is_long = lengths[base : int(document_starts[-1])] > rule.longest_sentence
    longs = np.concatenate([[0], np.cumsum(is_long)])[np.asarray(document_starts) - base]
    sentences = np.diff(document_starts)
    return (sentences >= rule.min_sentences) & ((sentences == 1) | (np.diff(longs) == 0))


class _Targets:
    """Draws the target lengths, one after the other."""

    def __init__(self, rule: GatheringRule, seed: int) -> None:
        self._rule, self._random = rule, legacy_random_state(seed % (1 << 32))
        self._drawn: list[int] = []

    def take(self, count: int) -> list[int]:
        """Returns the next targets; those that are not used are given back."""
        missing = count - len(self._drawn)
        if missing > 0:
            full, ratio = self._rule.max_length, self._rule.short_ratio
            if ratio:
                numbers = self._random.randint(0, 1 << 32, size=missing, dtype=np.uint32)
                drawn = np.where(numbers % ratio == 0, 2 + numbers % (full - 1), full).tolist()
            else:
                drawn = [full] * missing
            self._drawn += drawn
        return self._drawn

    def used(self, count: int) -> None:
        self._drawn = self._drawn[count:]


def _gather_epoch(
    lengths: NDArray[np.integer],
    document_starts: NDArray[np.integer],
    usable: NDArray[np.bool_],
    rule: GatheringRule,
    targets: _Targets,
) -> Iterator[tuple[NDArray, NDArray, NDArray]]:
    """Yields first sentences, stops and targets of the samples of one epoch, in blocks of documents."""
    start = 0
    while start < len(usable):
        base = int(document_starts[start])
        stop = int(np.searchsorted(document_starts, base + BLOCK_SENTENCES, side="right")) - 1
        stop = min(max(stop, start + 1), len(usable))
        starts = document_starts[start : stop + 1] - base
        yield _gather_block(lengths[base : base + int(starts[-1])], starts, usable[start:stop], base, rule, targets)
        start = stop


def _gather_block(
    lengths: NDArray[np.integer],
    starts: NDArray[np.integer],
    usable: NDArray[np.bool_],
    base: int,
    rule: GatheringRule,
    targets: _Targets,
) -> tuple[NDArray, NDArray, NDArray]:
    full, least = rule.max_length, rule.min_sentences
    before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    # Where a sample of full length ends that begins with a sentence. That of a short one is searched when it is drawn.
    ends = np.searchsorted(before, before[:-1] + full, side="left")
    ends = np.maximum(ends, np.arange(len(lengths)) + least)
    document_ends = np.repeat(starts[1:], np.diff(starts))
    full_ends = np.where(ends < document_ends - 1, ends, document_ends).tolist()
    cumulated = before.tolist()
    first_usable, last_usable = starts[:-1][usable].tolist(), starts[1:][usable].tolist()
    drawn = targets.take(len(lengths) + len(first_usable))
    firsts: list[int] = []
    stops: list[int] = []
    used: list[int] = []
    count = 0
    for sentence, document_end in zip(first_usable, last_usable):
        while sentence < document_end:
            target = drawn[count]
            if target == full:
                stop = full_ends[sentence]
            else:
                stop = bisect_left(cumulated, cumulated[sentence] + target, sentence + 1)
                stop = max(stop, sentence + least)
                if stop >= document_end - 1:
                    stop = document_end
            firsts.append(sentence)
            stops.append(stop)
            used.append(target)
            sentence, count = stop, count + 1
        count += 1  # the target that is drawn behind the last sample
    targets.used(count)
    return np.array(firsts, np.int64) + base, np.array(stops, np.int64) + base, np.array(used, np.int32)


def no_samples_error(prefix: str, num_documents: int, rule: GatheringRule) -> DataError:
    """Returns the error for documents that make no sample."""
    return DataError(
        f"{prefix}: none of {num_documents:,} documents makes a sample. A sample needs {rule.min_sentences} sentences, and no sentence of "
        f"its document may have more than {rule.longest_sentence} tokens. Give this split a larger share (--split), preprocess the data "
        "with --split-sentences, or set longest_sentence (--dataset-settings)."
    )
