"""The kind `bert`: masked text, in pairs of segments as BERT reads it.

A sample is `[CLS] A [SEP] B [SEP]`: two groups of sentences of one document, with token types 0 and 1, and a label that says whether they
are in their order (sentence_pairs.py); with `--bert-no-binary-head`, or of files without sentences, `[CLS] A [SEP]` and no label. A
share of the tokens is masked (mask_tokens.py), and the loss predicts what they were. The samples of files with sentences are
Megatron's, bit for bit, in its order (sentence_samples.py).

With `packed=true` a sample is a row of documents (packed_rows.py), each `[CLS] ... [SEP]`, which do not see one another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from petatron.base.errors import DataError, Problem, raise_problems
from petatron.config.parse_name_value import NOT_A_SETTING
from petatron.config.schema.objective_and_dataset_names import BERT_DATASET
from petatron.config.schema.run import RunConfig
from petatron.data.batch_loader import LoaderOptions, SampleDataset
from petatron.data.dataset_kinds import DatasetKind, DatasetRequest, SourceShare, register_dataset
from petatron.data.documents_of_sample import SampleTrace
from petatron.data.gpt_dataset import PackedText
from petatron.data.index_cache import fingerprint
from petatron.data.indexed_dataset import IndexedDataset
from petatron.data.masked.mask_tokens import (
    MaskableWords,
    MaskingRandom,
    NgramLengths,
    NgramRule,
    mask_in_place,
    masked_budget,
)
from petatron.data.masked.masked_text_source import MaskedDataset, MaskedTextSource
from petatron.data.masked.masking_settings import SETTINGS_FLAG, masking_problems
from petatron.data.masked.masking_vocabulary import MaskingVocabulary, masking_vocabulary, mock_vocabulary
from petatron.data.masked.mock_text import MockText
from petatron.data.masked.packed_rows import PackedRows, PackingRule, packed_documents
from petatron.data.masked.sentence_pairs import PairLabel, Segments, split_sentences, truncate_segments
from petatron.data.masked.sentence_samples import GatheringRule
from petatron.data.masked.text_samples import DocumentText, SampleText, SentenceText, TextSamples
from petatron.kernels.attention.document_layout import Documents
from petatron.models.batch import Batch
from petatron.models.masked_language_model import PREDICTED_POSITIONS

SPECIAL_TOKENS = 3
"""Megatron leaves room for [CLS] and two [SEP], also where there is one segment."""
MIN_SEQ_LENGTH = SPECIAL_TOKENS + 2
ROLES = ("cls", "sep", "mask", "pad")
_POSITIONS_MULTIPLE = 8
_CHANGE = "its tokens are masked, and what exceeds the sample is cut"


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskingRule:
    """What is masked of a sample. pair_label: None for one segment."""

    probability: float
    ngrams: NgramRule
    whole_words: bool
    pair_label: PairLabel | None


class MaskedLanguageDataset:
    """Masked samples of texts; what sample i has is a function of its text, the rule and a generator that the seed and i have seeded."""

    def __init__(
        self,
        texts: TextSamples,
        vocabulary: MaskingVocabulary,
        rule: MaskingRule,
        request: DatasetRequest,
        *,
        samples_per_epoch: int,
        description: str = "",
    ) -> None:
        self._texts, self._vocabulary, self._rule, self._seq_length = texts, vocabulary, rule, request.seq_length
        self._random, self.samples_per_epoch, self._description = (
            MaskingRandom(request.seed),
            samples_per_epoch,
            description,
        )
        key = {"texts": texts.fingerprint, "vocabulary": vocabulary.fingerprint(), **asdict(rule)}
        self.fingerprint = fingerprint({"kind": "masked language", **key, "seed": request.seed})

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> dict[str, NDArray[Any]]:
        """Returns tokens, labels, loss_mask and token_types, [seq_length], and scalars: num_tokens, and sentence_order of a pair."""
        rule, vocabulary = self._rule, self._vocabulary
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        random = self._random.of_sample(index)
        text = self._texts.read(index, random)
        segments = self._segments(index, text, random)
        first, second = truncate_segments(segments.first, segments.second, text.target, random)
        separator = [vocabulary["sep"]]
        parts = [[vocabulary["cls"]], first, separator, *([second, separator] if len(second) else [])]
        tokens = np.concatenate(parts, dtype=np.int64, casting="unsafe")
        maskable = MaskableWords.of(tokens, vocabulary, whole_words=rule.whole_words)
        budget = masked_budget(len(tokens), rule.probability, text.target)
        original = tokens.copy()
        positions = mask_in_place(tokens, maskable, budget, rule.ngrams, random, vocabulary)
        sample = _padded(tokens, original, positions, self._seq_length, vocabulary["pad"])
        types = np.zeros(self._seq_length, np.int64)
        types[len(first) + 2 : len(tokens)] = 1
        sample |= {"token_types": types, "num_tokens": np.array(len(tokens))}
        if rule.pair_label is not None:
            sample["sentence_order"] = np.array(segments.is_random, np.int64)
        return sample

    def _segments(self, index: int, text: SampleText, random: np.random.RandomState) -> Segments:
        if self._rule.pair_label is None:
            return Segments(text.tokens, text.tokens[:0], False)
        first, second = split_sentences(text.tokens, text.ends, random)
        is_random = bool(random.random_sample() < 0.5)
        if not is_random:
            return Segments(first, second, False)
        if self._rule.pair_label == "sentence_order":
            return Segments(second, first, True)
        other = self._texts.read(self._texts.other(index, random), random)
        return Segments(first, split_sentences(other.tokens, other.ends, random)[1], True)

    def trace(self, index: int) -> SampleTrace:
        """Returns the sentences, or the piece of a document, of a sample."""
        return self._texts.trace(index, _CHANGE)

    def describe(self) -> str:
        return self._description


class PackedMaskedDataset:
    """Rows of several documents with masked tokens."""

    def __init__(
        self, rows: PackedRows, vocabulary: MaskingVocabulary, rule: MaskingRule, request: DatasetRequest
    ) -> None:
        self._rows, self._vocabulary, self._rule, self._seq_length = rows, vocabulary, rule, request.seq_length
        self._random, self.samples_per_epoch = MaskingRandom(request.seed), rows.samples_per_epoch
        key = {"rows": rows.fingerprint, "vocabulary": vocabulary.fingerprint(), **asdict(rule)}
        self.fingerprint = fingerprint({"kind": "packed masked language", **key, "seed": request.seed})

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, NDArray[Any]]:
        """Returns tokens, labels, loss_mask, token_types and where the document of each token begins, -1 for padding."""
        rule, vocabulary, length = self._rule, self._vocabulary, self._seq_length
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        random = self._random.of_sample(index)
        parts: list[list[int] | NDArray[np.int64]] = []
        begins, filled = np.full(length, -1, np.int64), 0
        for piece, _ in self._rows.read(index):
            parts += [[vocabulary["cls"]], piece, [vocabulary["sep"]]]
            begins[filled : filled + len(piece) + 2] = filled
            filled += len(piece) + 2
        tokens = np.concatenate(parts, dtype=np.int64, casting="unsafe")
        maskable = MaskableWords.of(tokens, vocabulary, whole_words=rule.whole_words)
        original = tokens.copy()
        budget = masked_budget(filled, rule.probability, filled)
        positions = mask_in_place(tokens, maskable, budget, rule.ngrams, random, vocabulary)
        sample = _padded(tokens, original, positions, length, vocabulary["pad"])
        return {**sample, "token_types": np.zeros(length, np.int64), "begins": begins}

    def trace(self, index: int) -> SampleTrace:
        """Returns the documents of a row."""
        return self._rows.trace(index, _CHANGE)

    def describe(self) -> str:
        return self._rows.describe()


def _padded(
    tokens: NDArray[np.int64], original: NDArray[np.int64], positions: list[int], length: int, pad: int
) -> dict[str, NDArray[Any]]:
    padded, labels = np.full((2, length), pad, np.int64)
    mask = np.zeros(length, np.float32)
    padded[: len(tokens)] = tokens
    labels[positions], mask[positions] = original[positions], 1.0
    return {"tokens": padded, "labels": labels, "loss_mask": mask}


@dataclass(frozen=True)
class MaskedLanguage(DatasetKind):
    """Pairs of segments with masked words, or one segment."""

    reads: ClassVar[str] = PackedText.reads
    max_ngram: int = 3
    ngram_lengths: NgramLengths = "short"
    whole_words: bool = True
    pair_label: PairLabel = "sentence_order"
    longest_sentence: int = 512
    packed: bool = False
    mask_prob: float = field(default=0.15, metadata=NOT_A_SETTING)
    short_seq_prob: float = field(default=0.1, metadata=NOT_A_SETTING)
    has_pairs: bool = field(default=True, metadata=NOT_A_SETTING)

    def of_run(self, run: RunConfig) -> MaskedLanguage:
        kind = replace(
            self,
            mask_prob=run.data.mask_prob,
            short_seq_prob=run.data.short_seq_prob,
            has_pairs=run.model.bert_binary_head,
        )
        raise_problems(kind._problems(run.model.seq_length))
        return kind

    def _problems(self, seq_length: int) -> list[Problem]:
        problems = masking_problems(
            max_ngram=self.max_ngram,
            longest_sentence=self.longest_sentence,
            mask_prob=self.mask_prob,
        )
        if self.packed and self.has_pairs:
            rule = "makes rows of documents, and not pairs of segments"
            problems.append(Problem(SETTINGS_FLAG, "packed=true", rule, "Add --bert-no-binary-head."))
        if seq_length < MIN_SEQ_LENGTH:
            rule = f"leaves no room for two tokens beside [CLS] and two [SEP], which --dataset-type {BERT_DATASET} adds"
            problems.append(Problem("--seq-length", str(seq_length), rule, f"Use {MIN_SEQ_LENGTH} or more."))
        return problems

    def open(self, source: str, request: DatasetRequest) -> MaskedTextSource:
        indexed = PackedText().open(source, request).indexed
        if self.has_pairs and indexed.one_sequence_per_document:
            raise DataError(
                f"{source} has no sentences: each document is one sequence, and --dataset-type {BERT_DATASET} makes pairs of sentences. "
                "Preprocess the data with --split-sentences, or give --bert-no-binary-head for samples of one segment."
            )
        vocabulary = masking_vocabulary(request, BERT_DATASET, ROLES)

        def build(indexed: IndexedDataset, units: range, request: DatasetRequest) -> MaskedDataset:
            if self.packed:
                rows = PackedRows(indexed, units, _packing(request), request)
                return PackedMaskedDataset(rows, vocabulary, self._rule(), request)
            return self._dataset(indexed, units, request, vocabulary)

        return MaskedTextSource(indexed, build)

    def _dataset(
        self, indexed: IndexedDataset, units: range, request: DatasetRequest, vocabulary: MaskingVocabulary
    ) -> MaskedLanguageDataset:
        rule = self._gathering(request)
        texts: SentenceText | DocumentText
        if indexed.one_sequence_per_document:
            texts, description = DocumentText(indexed, units, rule, request), ""
        else:
            texts = SentenceText(indexed, units, rule, request)
            description = texts.left_out()
        return MaskedLanguageDataset(
            texts,
            vocabulary,
            self._rule(),
            request,
            samples_per_epoch=texts.samples_per_epoch,
            description=description,
        )

    def _gathering(self, request: DatasetRequest) -> GatheringRule:
        return GatheringRule(
            max_length=request.seq_length - SPECIAL_TOKENS,
            min_sentences=2 if self.has_pairs else 1,
            short_probability=self.short_seq_prob,
            longest_sentence=self.longest_sentence,
        )

    def _rule(self) -> MaskingRule:
        ngrams = NgramRule(self.max_ngram, self.ngram_lengths)
        label = self.pair_label if self.has_pairs else None
        return MaskingRule(probability=self.mask_prob, ngrams=ngrams, whole_words=self.whole_words, pair_label=label)

    def mock(self, request: DatasetRequest) -> SampleDataset:
        if self.packed:
            raise DataError("--mock-data has no documents to pack. Leave packed=true out, or give --data-path.")
        vocabulary = mock_vocabulary(request)
        texts = MockText(vocabulary, request.seq_length - SPECIAL_TOKENS, request)
        return MaskedLanguageDataset(texts, vocabulary, self._rule(), request, samples_per_epoch=len(texts))

    def collate(self, samples: Sequence[Mapping[str, NDArray[Any]]], options: LoaderOptions) -> Batch:
        return make_masked_batch(samples, mask_prob=self.mask_prob)

    def size_warnings(self, shares: Sequence[SourceShare], request: DatasetRequest, *, eval_iters: int) -> list[str]:
        return PackedText().size_warnings(shares, request, eval_iters=eval_iters)


def _packing(request: DatasetRequest) -> PackingRule:
    """A piece takes its tokens, [CLS] and [SEP]."""
    length = request.seq_length
    return PackingRule(
        piece=length - 2, capacity=length, costs=lambda lengths, choices: lengths + 2, choices=(1.0,), key={}
    )


def make_masked_batch(samples: Sequence[Mapping[str, NDArray[Any]]], *, mask_prob: float) -> Batch:
    """Makes a batch of tokens, labels, loss_mask and token_types [B, S], and sentence_order [B] of pairs.

    No token sees padding. In packed rows none sees another document, and positions restart in each. `predicted_positions` [B, P] has the
    masked ones.
    """
    names = [name for name in samples[0] if name not in ("num_tokens", "begins")]
    arrays = {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in names}
    sequence_dims: dict[str, int | None] = {"sentence_order": None} if "sentence_order" in arrays else {}
    least = math.ceil(mask_prob * len(samples[0]["tokens"]))
    positions = predicted_positions(np.stack([sample["loss_mask"] for sample in samples]), least=least)
    if positions is not None:
        arrays[PREDICTED_POSITIONS] = torch.from_numpy(positions)
        sequence_dims[PREDICTED_POSITIONS] = None
    if "begins" in samples[0]:
        documents, arrays["positions"] = packed_documents(np.stack([sample["begins"] for sample in samples]))
        return Batch(arrays=arrays, documents=documents, sequence_dims=sequence_dims)
    lengths = np.array([sample["num_tokens"] for sample in samples])
    length = len(samples[0]["tokens"])
    documents = Documents.of_lengths(lengths, length) if bool((lengths < length).any()) else None
    return Batch(arrays=arrays, documents=documents, sequence_dims=sequence_dims)


def predicted_positions(loss_mask_BS: NDArray[np.float32], *, least: int) -> NDArray[np.int64] | None:
    """Returns as many positions of each row, [B, P], with all that the loss counts among them; None where that is every one.

    P is `least` or more, rounded up, so that nearly every batch has the same.

    >>> mask = np.zeros((2, 32), np.float32)
    >>> mask[0, 20] = mask[1, 5] = mask[1, 9] = 1.0
    >>> positions = predicted_positions(mask, least=5)
    >>> positions.shape, positions[:, :2].tolist()
    ((2, 8), [[20, 0], [5, 9]])
    """
    counted_BS = loss_mask_BS > 0
    count = max(least, int(counted_BS.sum(axis=1).max()))
    count = -(-count // _POSITIONS_MULTIPLE) * _POSITIONS_MULTIPLE
    if count >= counted_BS.shape[1]:
        return None
    return np.argsort(~counted_BS, axis=1, kind="stable")[:, :count]


register_dataset(BERT_DATASET, MaskedLanguage)
