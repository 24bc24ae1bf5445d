"""The kind `t5`: text with corrupted spans, for an encoder and a decoder.

A sample is a text of `--seq-length` tokens at most, whose spans are replaced by sentinels (span_corruption.py); the decoder has
`--decoder-seq-length` tokens. With files of sentences, samples are Megatron's, bit for bit, in its order (sentence_samples.py). A mixture
of denoisers (denoisers.py) draws for each sample how its spans are chosen.

With `packed=true` a sample is a row of several texts (packed_rows.py), each with its own part of both sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from petatron.base.errors import DataError, Problem, raise_problems
from petatron.base.log import get_logger
from petatron.config.parse_name_value import NOT_A_SETTING
from petatron.config.schema.objective_and_dataset_names import T5_DATASET
from petatron.config.schema.run import RunConfig
from petatron.data.batch_loader import LoaderOptions, SampleDataset
from petatron.data.dataset_kinds import DatasetKind, DatasetRequest, SourceShare, register_dataset
from petatron.data.documents_of_sample import SampleTrace
from petatron.data.fill_in_middle import token_id
from petatron.data.gpt_dataset import PackedText
from petatron.data.index_cache import fingerprint
from petatron.data.indexed_dataset import IndexedDataset
from petatron.data.masked.denoisers import MODES, parse_denoisers
from petatron.data.masked.mask_tokens import MaskingRandom, NgramLengths, NgramRule
from petatron.data.masked.masked_text_source import MaskedDataset, MaskedTextSource
from petatron.data.masked.masking_settings import SETTINGS_FLAG, masking_problems
from petatron.data.masked.masking_vocabulary import MaskingVocabulary, masking_vocabulary, mock_vocabulary
from petatron.data.masked.mock_text import MockText
from petatron.data.masked.packed_rows import PackedRows, PackingRule
from petatron.data.masked.sentence_samples import GatheringRule
from petatron.data.masked.span_batch import make_span_batch
from petatron.data.masked.span_corruption import CorruptedText, NgramSpans, SpanRule, corrupt_spans
from petatron.data.masked.text_samples import DocumentText, Ids, SentenceText, TextSamples
from petatron.models.batch import Batch

EXTRA_TOKENS = 2
"""Megatron leaves room for two tokens beside the text; a mode and an end take them where there are some."""
MIN_SEQ_LENGTH = EXTRA_TOKENS + 2
ROLES = ("pad", "eos")
_CHANGE = "spans of it are replaced by sentinels, and what exceeds the sample is cut"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanMixture:
    """The rules that spans are chosen by, with their weights, and what the encoder reads besides: tokens of modes, and the end.

    decoder_length: tokens of the decoder's sequences.
    """

    rules: tuple[SpanRule, ...]
    weights: tuple[float, ...]
    mode_ids: Mapping[str, int]
    encoder_eos: bool
    decoder_length: int

    def draw(self, random: np.random.RandomState) -> SpanRule:
        """Draws a rule; of a single one nothing is drawn."""
        if len(self.rules) == 1:
            return self.rules[0]
        bounds = np.cumsum(self.weights)
        return self.rules[int(np.searchsorted(bounds / bounds[-1], random.random_sample(), side="right"))]

    def lengths(self, rule: SpanRule, num_tokens: int) -> tuple[int, int]:
        """Returns how many tokens the encoder and the decoder have of a text."""
        corrupted, spans = rule.counts(num_tokens)
        extras = (rule.mode in self.mode_ids) + self.encoder_eos
        return num_tokens - corrupted + spans + extras, 1 + corrupted + spans


class SpanCorrupter:
    """Makes both sequences of a text."""

    def __init__(self, mixture: SpanMixture, vocabulary: MaskingVocabulary, source: str) -> None:
        """source: what a warning names."""
        self._mixture, self._vocabulary, self._source = mixture, vocabulary, source
        self._start = [vocabulary.special_ids.get("bos", vocabulary["pad"])]
        self._end = [vocabulary["eos"]]
        self._has_warned = False

    def corrupt(
        self, tokens: Ids, target: int, rule: SpanRule, random: np.random.RandomState, *, decoder_length: int
    ) -> tuple[list[int], list[int], list[int]]:
        """Returns what the encoder reads, what the decoder reads, and what it predicts."""
        mixture, vocabulary = self._mixture, self._vocabulary
        spans = rule.choose(tokens, target, vocabulary, random)
        text = corrupt_spans(tokens, spans, vocabulary.sentinel_ids, decoder_room=decoder_length - 1)
        if text.left_out and not self._has_warned:
            self._has_warned = True
            get_logger(__name__).warning("%s", self._left_out(text, decoder_length))
        mode = [number for name, number in mixture.mode_ids.items() if name == rule.mode]
        encoder = [*mode, *text.encoder, *(self._end if mixture.encoder_eos else [])]
        return encoder, self._start + text.decoder, text.decoder + self._end

    def _left_out(self, text: CorruptedText, decoder_length: int) -> str:
        return (
            f"{self._source}: a sample has more spans than the decoder has room or the vocabulary has sentinels for "
            f"({len(self._vocabulary.sentinel_ids)}), and {text.left_out} of them stay as they are. If that is frequent, raise "
            f"--decoder-seq-length above {decoder_length} or --vocab-extra-ids. This is said once."
        )


class SpanCorruptionDataset:
    """One text to a sample; what sample i has is a function of its text, the mixture and a generator that the seed and i have seeded."""

    def __init__(
        self,
        texts: TextSamples,
        vocabulary: MaskingVocabulary,
        mixture: SpanMixture,
        request: DatasetRequest,
        *,
        samples_per_epoch: int,
        name: str,
        description: str = "",
    ) -> None:
        self._texts, self._mixture, self._pad = texts, mixture, vocabulary["pad"]
        self._encoder_length, self._decoder_length = request.seq_length, mixture.decoder_length
        self._corrupter = SpanCorrupter(mixture, vocabulary, name)
        self._random, self._description = MaskingRandom(request.seed), description
        self.samples_per_epoch = samples_per_epoch
        self.fingerprint = _fingerprint("span corruption", texts.fingerprint, vocabulary, mixture, request)

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> dict[str, NDArray[Any]]:
        """Returns encoder_tokens [seq_length]; tokens, labels and loss_mask of the decoder; and the numbers of tokens of both."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        random = self._random.of_sample(index)
        text = self._texts.read(index, random)
        rule = self._mixture.draw(random)
        encoder, tokens, labels = self._corrupter.corrupt(
            text.tokens[: text.target], text.target, rule, random, decoder_length=self._decoder_length
        )
        mask = np.zeros(self._decoder_length, np.float32)
        mask[: len(labels)] = 1.0
        return {
            "encoder_tokens": _padded(encoder, self._encoder_length, self._pad),
            "tokens": _padded(tokens, self._decoder_length, self._pad),
            "labels": _padded(labels, self._decoder_length, self._pad),
            "loss_mask": mask,
            "num_encoder_tokens": np.array(max(1, len(encoder))),  # of no text at all, padding: attention needs a key
            "num_tokens": np.array(len(tokens)),
        }

    def trace(self, index: int) -> SampleTrace:
        """Returns the sentences, or the piece of a document, of a sample."""
        return self._texts.trace(index, _CHANGE)

    def describe(self) -> str:
        return self._description


class PackedSpanDataset:
    """Rows of several texts, in the encoder's sequence and in the decoder's."""

    def __init__(
        self, rows: PackedRows, vocabulary: MaskingVocabulary, mixture: SpanMixture, request: DatasetRequest, name: str
    ) -> None:
        self._rows, self._mixture, self._pad = rows, mixture, vocabulary["pad"]
        self._encoder_length, self._decoder_length = request.seq_length, mixture.decoder_length
        self._corrupter = SpanCorrupter(mixture, vocabulary, name)
        self._random, self.samples_per_epoch = MaskingRandom(request.seed), rows.samples_per_epoch
        self.fingerprint = _fingerprint("packed span corruption", rows.fingerprint, vocabulary, mixture, request)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, NDArray[Any]]:
        """Returns the arrays of `SpanCorruptionDataset`, and where the text of each token begins in both sequences, -1 for padding."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        random = self._random.of_sample(index)
        sequences: tuple[list[int], list[int], list[int]] = ([], [], [])
        encoder_begins = np.full(self._encoder_length, -1, np.int64)
        begins = np.full(self._decoder_length, -1, np.int64)
        for tokens, choice in self._rows.read(index):
            rule = self._mixture.rules[choice]
            room = min(self._mixture.lengths(rule, len(tokens))[1], self._decoder_length)
            corrupted = self._corrupter.corrupt(tokens, len(tokens), rule, random, decoder_length=room)
            first, second = len(sequences[0]), len(sequences[1])
            for sequence, ids in zip(sequences, corrupted):
                sequence += ids
            encoder_begins[first : len(sequences[0])], begins[second : len(sequences[1])] = first, second
        encoder, tokens, labels = sequences
        return {
            "encoder_tokens": _padded(encoder, self._encoder_length, self._pad),
            "tokens": _padded(tokens, self._decoder_length, self._pad),
            "labels": _padded(labels, self._decoder_length, self._pad),
            "loss_mask": (begins >= 0).astype(np.float32),
            "encoder_begins": encoder_begins,
            "begins": begins,
        }

    def trace(self, index: int) -> SampleTrace:
        """Returns the documents of a row."""
        return self._rows.trace(index, _CHANGE)

    def describe(self) -> str:
        return self._rows.describe()


def _fingerprint(
    kind: str, texts: str, vocabulary: MaskingVocabulary, mixture: SpanMixture, request: DatasetRequest
) -> str:
    return fingerprint(
        {
            "kind": kind,
            "texts": texts,
            "vocabulary": vocabulary.fingerprint(),
            "rules": [repr(rule) for rule in mixture.rules],
            "weights": list(mixture.weights),
            "modes": dict(mixture.mode_ids),
            "encoder_eos": mixture.encoder_eos,
            "lengths": [request.seq_length, mixture.decoder_length],
            "seed": request.seed,
        }
    )


def _padded(ids: list[int], length: int, pad: int) -> NDArray[np.int64]:
    padded = np.full(length, pad, np.int64)
    padded[: len(ids)] = ids
    return padded


@dataclass(frozen=True)
class SpanCorruption(DatasetKind):
    """Text whose spans the decoder fills in."""

    reads: ClassVar[str] = PackedText.reads
    max_ngram: int = 10
    ngram_lengths: NgramLengths = "geometric"
    whole_words: bool = True
    longest_sentence: int = 512
    denoisers: str = ""
    mode_tokens: str = ""
    encoder_eos: bool = False
    packed: bool = False
    mask_prob: float = field(default=0.15, metadata=NOT_A_SETTING)
    short_seq_prob: float = field(default=0.1, metadata=NOT_A_SETTING)
    decoder_seq_length: int | None = field(default=None, metadata=NOT_A_SETTING)

    def of_run(self, run: RunConfig) -> SpanCorruption:
        data = run.data
        kind = replace(
            self,
            mask_prob=data.mask_prob,
            short_seq_prob=data.short_seq_prob,
            decoder_seq_length=run.model.decoder_seq_length,
        )
        raise_problems(kind._problems(run.model.seq_length))
        return kind

    def _problems(self, seq_length: int) -> list[Problem]:
        problems = masking_problems(
            max_ngram=self.max_ngram,
            longest_sentence=self.longest_sentence,
            mask_prob=self.mask_prob,
        )
        if seq_length < MIN_SEQ_LENGTH:
            rule = f"leaves no room for two tokens beside two that --dataset-type {T5_DATASET} may add"
            problems.append(Problem("--seq-length", str(seq_length), rule, f"Use {MIN_SEQ_LENGTH} or more."))
        problems += self._mode_problems()
        try:
            rules = self._rules()
        except ValueError as error:
            fix = "Write R:MEAN_SPAN:RATE, X:MEAN_SPAN:RATE or S:RATE, with commas between them, or ul2."
            return [*problems, Problem(SETTINGS_FLAG, f"denoisers={self.denoisers}", str(error), fix)]
        return problems or self._decoder_problems(rules, seq_length)

    def _mode_problems(self) -> list[Problem]:
        names = self._mode_names()
        value = f"mode_tokens={self.mode_tokens}"
        if names and not self.denoisers:
            return [Problem(SETTINGS_FLAG, value, "is for denoisers, and none are given", "Add denoisers=R,S,X.")]
        if names and (len(names) != len(MODES) or "" in names):
            modes = ", ".join(MODES)
            return [Problem(SETTINGS_FLAG, value, f"is not a token for each of {modes}", "Name three tokens, a,b,c.")]
        return []

    def _decoder_problems(self, rules: tuple[SpanRule, ...], seq_length: int) -> list[Problem]:
        flag, given = "--decoder-seq-length", self.decoder_seq_length
        text = seq_length - EXTRA_TOKENS
        counts = [rule.counts(text) for rule in rules]
        enough = max(1 + corrupted + spans for corrupted, spans in counts)
        if given is None:
            rule = f"is not set, and --dataset-type {T5_DATASET} makes sequences for a decoder"
            return [Problem(flag, "", rule, f"{enough} has room for the spans of --seq-length {seq_length}.")]
        # Megatron's n-grams may be few and long; those of a denoiser have one number.
        least = max(1 + count.corrupted + (count.spans if self.denoisers else 1) for count in counts)
        if given < least:
            rule = f"is below {least}: a text of {text} tokens has {least - 1} in its spans and their sentinels"
            return [Problem(flag, str(given), rule, f"Use {enough}, or corrupt a smaller share.")]
        return []

    def _mode_names(self) -> list[str]:
        return [name.strip() for name in self.mode_tokens.split(",")] if self.mode_tokens else []

    def _rules(self) -> tuple[SpanRule, ...]:
        if self.denoisers:
            return tuple(parse_denoisers(self.denoisers))
        ngrams = NgramRule(self.max_ngram, self.ngram_lengths)
        return (NgramSpans(self.mask_prob, ngrams, self.whole_words),)

    def _mixture(self, request: DatasetRequest) -> SpanMixture:
        rules = self._rules()
        weights = [rule.weight for rule in parse_denoisers(self.denoisers)] if self.denoisers else [1.0]
        assert self.decoder_seq_length is not None
        return SpanMixture(
            rules=rules,
            weights=tuple(weights),
            mode_ids=self._mode_ids(request),
            encoder_eos=self.encoder_eos,
            decoder_length=self.decoder_seq_length,
        )

    def _mode_ids(self, request: DatasetRequest) -> dict[str, int]:
        names, tokenizer = self._mode_names(), request.tokenizer
        if not names:
            return {}
        ids = {mode: None if tokenizer is None else token_id(tokenizer, name) for mode, name in zip(MODES, names)}
        missing = [name for name, number in zip(names, ids.values()) if number is None]
        if missing:
            who = "There is no tokenizer, and" if tokenizer is None else f"The tokenizer {tokenizer.name} has not all:"
            raise DataError(
                f"{who} mode_tokens ({SETTINGS_FLAG}) names {', '.join(missing)}. Name tokens of the tokenizer; "
                "--tokenizer-special-tokens adds some to a WordPiece or SentencePiece vocabulary."
            )
        return {mode: number for mode, number in ids.items() if number is not None}

    def open(self, source: str, request: DatasetRequest) -> MaskedTextSource:
        indexed = PackedText().open(source, request).indexed
        vocabulary = masking_vocabulary(request, T5_DATASET, ROLES, sentinels=True)
        mixture = self._mixture(request)

        def build(indexed: IndexedDataset, units: range, request: DatasetRequest) -> MaskedDataset:
            if self.packed:
                rows = PackedRows(indexed, units, self._packing(mixture, request), request)
                return PackedSpanDataset(rows, vocabulary, mixture, request, indexed.prefix)
            return self._dataset(indexed, units, request, vocabulary, mixture)

        return MaskedTextSource(indexed, build)

    def _dataset(
        self,
        indexed: IndexedDataset,
        units: range,
        request: DatasetRequest,
        vocabulary: MaskingVocabulary,
        mixture: SpanMixture,
    ) -> SpanCorruptionDataset:
        gathering = GatheringRule(
            max_length=request.seq_length - EXTRA_TOKENS,
            min_sentences=1,
            short_probability=self.short_seq_prob,
            longest_sentence=self.longest_sentence,
        )
        texts: SentenceText | DocumentText
        if indexed.one_sequence_per_document:
            texts, description = DocumentText(indexed, units, gathering, request), ""
        else:
            texts = SentenceText(indexed, units, gathering, request)
            description = texts.left_out()
        return SpanCorruptionDataset(
            texts,
            vocabulary,
            mixture,
            request,
            samples_per_epoch=texts.samples_per_epoch,
            name=indexed.prefix,
            description=description,
        )

    def _packing(self, mixture: SpanMixture, request: DatasetRequest) -> PackingRule:
        """A piece costs the larger of its shares of the two sequences."""
        encoder, decoder = request.seq_length, mixture.decoder_length

        def cost(rule: SpanRule, length: int) -> int:
            encoder_tokens, decoder_tokens = mixture.lengths(rule, length)
            if not self.denoisers:  # n-grams may be single words
                encoder_tokens = length + self.encoder_eos
            return max(encoder_tokens, -(-min(decoder_tokens, decoder) * encoder // decoder))

        def costs(lengths: NDArray[np.int64], choices: NDArray[np.integer]) -> NDArray[np.int64]:
            result = np.zeros(len(lengths), np.int64)
            for number, rule in enumerate(mixture.rules):
                chosen = choices == number
                values, places = np.unique(lengths[chosen], return_inverse=True)
                result[chosen] = np.array([cost(rule, length) for length in values.tolist()], np.int64)[places]
            return result

        rules = [repr(rule) for rule in mixture.rules]
        key = {"rules": rules, "decoder": decoder, "modes": sorted(mixture.mode_ids), "encoder_eos": self.encoder_eos}
        return PackingRule(
            piece=encoder - EXTRA_TOKENS, capacity=encoder, costs=costs, choices=mixture.weights, key=key
        )

    def mock(self, request: DatasetRequest) -> SampleDataset:
        if self.packed:
            raise DataError("--mock-data has no documents to pack. Leave packed=true out, or give --data-path.")
        vocabulary = mock_vocabulary(request, sentinels=True)
        texts = MockText(vocabulary, request.seq_length - EXTRA_TOKENS, request)
        return SpanCorruptionDataset(
            texts, vocabulary, self._mixture(request), request, samples_per_epoch=len(texts), name="--mock-data"
        )

    def collate(self, samples: Sequence[Mapping[str, NDArray[Any]]], options: LoaderOptions) -> Batch:
        return make_span_batch(samples)

    def size_warnings(self, shares: Sequence[SourceShare], request: DatasetRequest, *, eval_iters: int) -> list[str]:
        return PackedText().size_warnings(shares, request, eval_iters=eval_iters)


register_dataset(T5_DATASET, SpanCorruption)
