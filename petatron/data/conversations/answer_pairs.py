"""Pairs of answers, which are segments: the chosen and the rejected one, or an answer and one to another prompt.

An answer to another prompt is the answer of the next record, in an order of the seed, after this record's prompt: by tokens, as objectives
that estimate the divergence from a reference take it (`kto`).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from petatron.base.errors import DataError
from petatron.base.format_text import count_with_noun
from petatron.base.log import get_logger
from petatron.data.batch_loader import epoch_permutation
from petatron.data.best_fit_packing import pack_best_fit
from petatron.data.check_token_ids import TokenPlace
from petatron.data.conversations.conversation_settings import SETTINGS_FLAG, LongConversations
from petatron.data.conversations.conversation_source import EncodedSource
from petatron.data.dataset_kinds import DatasetRequest
from petatron.data.document_sample_shuffle_index import legacy_random_state
from petatron.data.documents_of_sample import SampleTrace, TracedDocument
from petatron.data.index_cache import fingerprint
from petatron.data.packed_segments import PackedSegment
from petatron.models.preference_objectives import DESIRABLE

Answer = tuple[NDArray[np.int32], NDArray[np.bool_]]
"""The ids of a prompt with its answer, and which of them are learned."""


@dataclass(frozen=True, slots=True)
class CutRule:
    """How long a pair may be. shares_row: both answers are in one row, else each has one."""

    seq_length: int
    long_samples: LongConversations
    shares_row: bool

    def cut(self, pair: tuple[Answer, Answer]) -> tuple[Answer, Answer] | None:
        """Returns a pair that fits; None where it is left out."""
        sizes = [len(ids) - 1 for ids, _ in pair]
        kept = self._kept(sizes)
        if kept == sizes:
            return pair
        if self.long_samples == "skip":
            return None
        from_end = self.long_samples == "truncate-left"
        cut = [
            (ids[-n - 1 :], mask[-n - 1 :]) if from_end else (ids[: n + 1], mask[: n + 1])
            for (ids, mask), n in zip(pair, kept)
        ]
        return (cut[0], cut[1]) if all(mask[1:].any() for _, mask in cut) else None

    def _kept(self, sizes: list[int]) -> list[int]:
        """Returns how many positions are kept; of a pair in one row, the shorter answer keeps up to half of it."""
        if not self.shares_row:
            return [min(size, self.seq_length) for size in sizes]
        if sum(sizes) <= self.seq_length:
            return sizes
        half = self.seq_length // 2
        if sizes[0] <= sizes[1]:
            first = min(sizes[0], half)
            return [first, min(sizes[1], self.seq_length - first)]
        second = min(sizes[1], half)
        return [min(sizes[0], self.seq_length - second), second]


class AnswerPairs:
    """The pairs of some records: those of preferences, or each answer with the next record's after its own prompt."""

    def __init__(self, source: EncodedSource, units: range, *, has_two_rows: bool, seed: int) -> None:
        self.source, self._has_two_rows = source, has_two_rows
        order = np.arange(units.start, units.stop)
        legacy_random_state(seed).shuffle(order)
        self._next = dict(zip(order.tolist(), np.roll(order, -1).tolist())) if not has_two_rows else {}

    def pair(self, record: int) -> tuple[Answer, Answer]:
        if self._has_two_rows:
            return self._answer(2 * record), self._answer(2 * record + 1)
        answer, other = self._answer(record), self._answer(self._next[record])
        begin, other_begin = (int(mask.argmax()) for _, mask in (answer, other))
        ids = np.concatenate([answer[0][:begin], other[0][other_begin:]])
        return answer, (ids, np.concatenate([answer[1][:begin], other[1][other_begin:]]))

    def _answer(self, row: int) -> Answer:
        ids, weights = self.source.rows.row(row)
        return ids, weights > 0


class PairDataset:
    """Rows of pairs, in another order in every epoch; sample i is a pure function of the files, the seed and i."""

    def __init__(
        self,
        pairs: AnswerPairs,
        units: range,
        rule: CutRule,
        request: DatasetRequest,
        *,
        padding: int,
        key: dict[str, Any],
    ) -> None:
        self._pairs, self._rule, self._request, self._padding = pairs, rule, request, padding
        self.fingerprint = fingerprint(
            {**key, "source": pairs.source.fingerprint, "seed": request.seed, "seq_length": rule.seq_length}
        )
        self._records, self._bounds = _pack(pairs, units, rule, request.seed)
        self.samples_per_epoch = len(self._bounds) - 1
        self._order = lru_cache(maxsize=2)(lambda epoch: epoch_permutation(request.seed, epoch, self.samples_per_epoch))

    def of(self, request: DatasetRequest) -> PairDataset:
        """Returns the same rows for a request of another number of samples."""
        dataset = copy(self)
        dataset._request = request
        return dataset

    def __len__(self) -> int:
        return self._request.num_samples

    def __getitem__(self, index: int) -> dict[str, NDArray[Any]]:
        """Returns the ids of the answers of a row one after the other, which are learned, their lengths and labels."""
        records = self._row(index)
        answers = [answer for record in records for answer in self._fitting(record)]
        labels = [self._pairs.source.labels[record] for record in records for _ in range(2)]
        return {
            "ids": np.concatenate([ids for ids, _ in answers]).astype(np.int64),
            "learned": np.concatenate([mask for _, mask in answers]),
            "lengths": np.array([len(ids) for ids, _ in answers]),
            "labels": np.array(labels, np.float32),
            "row": np.array([self._request.seq_length, self._padding]),
        }

    def trace(self, index: int) -> SampleTrace:
        """Returns the records of a sample, and where they come from; a length is that of both answers."""
        source = self._pairs.source
        documents = tuple(
            TracedDocument(
                TokenPlace(record, None, 0),
                sum(len(ids) for ids, _ in self._fitting(record)),
                source.provenance(record),
            )
            for record in self._row(index)
        )
        return SampleTrace(source.name, index, documents)

    def _fitting(self, record: int) -> tuple[Answer, Answer]:
        pair = self._rule.cut(self._pairs.pair(record))
        assert pair is not None, "only such records are packed"
        return pair

    def _row(self, index: int) -> list[int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        epoch, place = divmod(index, self.samples_per_epoch)
        row = int(self._order(epoch)[place])
        return self._records[self._bounds[row] : self._bounds[row + 1]].tolist()


def segments_of(sample: Mapping[str, NDArray[Any]], *, has_labels: bool) -> list[PackedSegment]:
    """Returns the answers of a sample as segments."""
    ends = np.cumsum(sample["lengths"])
    return [
        PackedSegment(
            sample["ids"][end - length : end],
            sample["learned"][end - length : end],
            of_segment={DESIRABLE: float(label)} if has_labels else {},
        )
        for end, length, label in zip(ends.tolist(), sample["lengths"].tolist(), sample["labels"].tolist())
    ]


def _pack(pairs: AnswerPairs, units: range, rule: CutRule, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the records of rows, and the bounds of the rows; says what is cut or left out."""
    records, sizes, num_cut = list[int](), list[int](), 0
    for record in units:
        pair = pairs.pair(record)
        fitting = rule.cut(pair)
        if fitting is None or any(len(x[0]) < len(y[0]) for x, y in zip(fitting, pair)):
            if rule.long_samples == "fail":
                raise DataError(_too_long(pairs.source, record, pair, rule))
            num_cut += fitting is not None
        if fitting is not None:
            records.append(record)
            sizes.append(sum(len(ids) - 1 for ids, _ in fitting))
    name, left_out = pairs.source.name, len(units) - len(records)
    if num_cut or left_out:
        get_logger(__name__).warning(
            "WARNING: %s: %s longer than a row of %d tokens: %d cut, %d left out",
            name, count_with_noun(num_cut + left_out, "pair"), rule.seq_length, num_cut, left_out,
        )  # fmt: skip
    if not records:
        raise DataError(
            f"{name}: no pair of these fits a row. Give this split a larger share (--split), or use a larger --seq-length."
        )
    if not rule.shares_row:
        return np.array(records), np.arange(len(records) + 1)
    order = np.arange(len(records))
    legacy_random_state(seed).shuffle(order)
    bins, count = pack_best_fit(np.array(sizes, np.int32)[order], rule.seq_length)
    packed = np.array(records)[order[np.argsort(bins, kind="stable")]]
    return packed, np.concatenate([[0], np.cumsum(np.bincount(bins, minlength=count))])


def _too_long(source: EncodedSource, record: int, pair: tuple[Answer, Answer], rule: CutRule) -> str:
    lengths = " and ".join(f"{len(ids):,}" for ids, _ in pair)
    where = "both in one row" if rule.shares_row else "a row each"
    return (
        f"{source.provenance(record)} has answers of {lengths} tokens, {where} of --seq-length {rule.seq_length:,}. Use a longer one, "
        f"or cut or leave out such records with {SETTINGS_FLAG} long_samples=truncate or skip."
    )
