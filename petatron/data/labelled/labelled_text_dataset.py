"""The kind `labelled-text`: texts with a label each, or queries with texts to compare, as models with a task head read them.

A sample is a text, with what the tokenizer puts around it, or a pair of texts: `[CLS] A [SEP] B [SEP]` with token types 0 and 1 for
encoders, and texts with a line break between them for decoders. A query, the text that belongs to it and others are rows of one sample.
Rows are padded on the right; encoders do not see padding, and a decoder's tokens see what is before them alone.

Which tokens stand for a text is an array of weights, by which the model sums hidden states: so it need not know where texts end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from petatron.base.errors import ConfigError, DataError, Problem
from petatron.base.format_text import count_with_noun
from petatron.base.log import get_logger
from petatron.config.parse_name_value import NOT_A_SETTING
from petatron.config.schema.objective_and_dataset_names import (
    CLASSIFICATION,
    CONTRASTIVE,
    LABELLED_DATASET,
    REGRESSION,
    TASK_OBJECTIVES,
)
from petatron.config.schema.run import RunConfig
from petatron.config.schema.sections.masked_language import MASKED_LANGUAGE_MODEL
from petatron.config.schema.sections.task_head import PoolingName
from petatron.data.batch_loader import LoaderOptions, SampleDataset
from petatron.data.dataset_kinds import DatasetKind, DatasetRequest, RecordSource, register_dataset
from petatron.data.index_cache import fingerprint
from petatron.data.labelled.encode_texts import TextEncoder, TokenRow
from petatron.data.labelled.labelled_file import Label, LabelRule, read_labelled_file
from petatron.kernels.attention.document_layout import Documents
from petatron.models.batch import Batch
from petatron.models.decoder import POOLING_WEIGHTS
from petatron.models.masked_language_model import TOKEN_TYPES
from petatron.models.task_objectives import LABEL_IDS, LABEL_VALUES

_MOCK_SAMPLES = 64


@dataclass(frozen=True, slots=True)
class LabelledSample:
    """The rows of a sample, and its label."""

    rows: tuple[TokenRow, ...]
    label: Label

    def arrays(self, length: int, padding: int) -> dict[str, NDArray[Any]]:
        """Returns tokens and token types [rows, length], the length of each row, and the label."""
        tokens, types = (np.full((len(self.rows), length), fill, np.int64) for fill in (padding, 0))
        for place, row in enumerate(self.rows):
            tokens[place, : len(row.ids)] = row.ids
            types[place, row.second : len(row.ids)] = 1
        lengths = np.array([len(row.ids) for row in self.rows])
        sample: dict[str, NDArray[Any]] = {"tokens": tokens, "token_types": types, "lengths": lengths}
        if isinstance(self.label, int):
            sample[LABEL_IDS] = np.array(self.label)
        elif self.label is not None:
            sample[LABEL_VALUES] = np.array(self.label)
        return sample


class LabelledSource(RecordSource):
    unit, size_unit = "lines", "lines"

    def __init__(self, name: str, samples: Sequence[LabelledSample], *, padding: int) -> None:
        ids = [[row.ids for row in sample.rows] for sample in samples]
        key = {"kind": LABELLED_DATASET, "ids": ids, "labels": [sample.label for sample in samples]}
        super().__init__(name, num_units=len(samples), fingerprint=fingerprint(key))
        self._samples, self._padding = samples, padding

    def record(self, index: int, request: DatasetRequest) -> Mapping[str, NDArray[Any]]:
        return self._samples[index].arrays(request.seq_length, self._padding)


@dataclass(frozen=True)
class LabelledTextKind(DatasetKind):
    """text_key, label_key: of the lines of a file. negatives: texts beside the positive one that each line must have at least.
    refuse_long: a text longer than `--seq-length` is an error, and not cut.
    """

    reads: ClassVar[str] = "files of lines of JSON"
    text_key: str = "text"
    label_key: str = "label"
    negatives: int = 0
    refuse_long: bool = False
    objective: str = field(default=CLASSIFICATION, metadata=NOT_A_SETTING)
    num_labels: int = field(default=0, metadata=NOT_A_SETTING)
    label_names: tuple[str, ...] = field(default=(), metadata=NOT_A_SETTING)
    pooling: PoolingName = field(default="last", metadata=NOT_A_SETTING)
    is_encoder: bool = field(default=False, metadata=NOT_A_SETTING)

    def of_run(self, run: RunConfig) -> LabelledTextKind:
        model, objective = run.model, run.train.objective
        if objective not in TASK_OBJECTIVES or model.pooling is None:
            rule = "has labels, which the objective does not read"
            fix = f"Add --objective {', '.join(TASK_OBJECTIVES[:2])} or {TASK_OBJECTIVES[2]}."
            raise ConfigError([Problem("--dataset-type", LABELLED_DATASET, rule, fix)])
        return replace(
            self,
            objective=objective,
            num_labels=model.num_labels,
            label_names=model.label_names,
            pooling=model.pooling,
            is_encoder=model.model_type == MASKED_LANGUAGE_MODEL,
        )

    @property
    def label_rule(self) -> LabelRule:
        return LabelRule(
            objective=self.objective,
            num_labels=self.num_labels,
            label_names=self.label_names,
            text_key=self.text_key,
            label_key=self.label_key,
            negatives=self.negatives,
        )

    def open(self, source: str, request: DatasetRequest) -> LabelledSource:
        if request.tokenizer is None:
            raise DataError(f"--dataset-type {LABELLED_DATASET} needs a tokenizer. Give --tokenizer-model.")
        encoder = TextEncoder(request.tokenizer, is_encoder=self.is_encoder)
        samples, num_cut = self.encode_file(Path(source), encoder, request.seq_length)
        if num_cut:
            get_logger(__name__).warning(
                "WARNING: %s: %s longer than the %s of --seq-length, and cut", source, count_with_noun(num_cut, "text"),
                count_with_noun(request.seq_length, "token"),
            )  # fmt: skip
        return LabelledSource(source, samples, padding=encoder.padding_id)

    def encode_file(self, path: Path, encoder: TextEncoder, seq_length: int) -> tuple[list[LabelledSample], int]:
        """Returns the samples of a file, and how many texts were cut."""
        records = read_labelled_file(path, self.label_rule)
        rows = encoder.encode([text for record in records for text in record.texts], seq_length)
        num_cut = sum(row.is_cut for row in rows)
        if num_cut and self.refuse_long:
            raise DataError(
                f"{path}: {count_with_noun(num_cut, 'text')} longer than the {seq_length:,} tokens of --seq-length. Use a longer one, or "
                "cut texts with --dataset-settings refuse_long=false."
            )
        remaining = iter(rows)
        return [
            LabelledSample(tuple(next(remaining) for _ in record.texts), record.label) for record in records
        ], num_cut

    def mock(self, request: DatasetRequest) -> SampleDataset:
        size = request.vocab_size or 64
        random = np.random.default_rng((request.seed, size, request.seq_length))
        samples = []
        for _ in range(_MOCK_SAMPLES):
            rows = []
            for _ in range(2 + self.negatives if self.objective == CONTRASTIVE else 1):
                ids = random.integers(0, size, int(random.integers(2, request.seq_length + 1))).tolist()
                rows.append(TokenRow(ids, int(random.integers(1, len(ids) + 1))))
            label: Label = None
            if self.objective == CLASSIFICATION:
                label = rows[0].ids[0] % max(1, self.num_labels)
            elif self.objective == REGRESSION:
                label = tuple((rows[0].ids[0] + number) / size for number in range(self.num_labels))
            samples.append(LabelledSample(tuple(rows), label))
        source = LabelledSource("made-up texts", samples, padding=0)
        return source.dataset(range(len(samples)), request)

    def collate(self, samples: Sequence[Mapping[str, NDArray[Any]]], options: LoaderOptions) -> Batch:
        tokens, types = (np.concatenate([sample[name] for sample in samples]) for name in ("tokens", "token_types"))
        lengths = np.concatenate([sample["lengths"] for sample in samples])
        named = {name: np.stack([x[name] for x in samples]) for name in (LABEL_IDS, LABEL_VALUES) if name in samples[0]}
        length = tokens.shape[1]
        arrays = {"tokens": tokens, POOLING_WEIGHTS: pooling_weights(lengths, length, self.pooling), **named}
        if self.is_encoder:
            arrays[TOKEN_TYPES] = types
        padded = self.is_encoder and bool((lengths < length).any())
        return Batch(
            arrays={name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in arrays.items()},
            sequence_dims=dict.fromkeys(named),
            rows_per_sample=len(samples[0]["lengths"]),
            documents=Documents.of_lengths(lengths, length) if padded else None,
        )


def pooling_weights(lengths: NDArray[np.int64], length: int, pooling: PoolingName) -> NDArray[np.float32]:
    """Returns the weights [B, length] by which the hidden states of texts are summed.

    >>> pooling_weights(np.array([2, 3]), 3, "mean").round(2).tolist() == [[0.5, 0.5, 0.0], [np.float32(0.33)] * 3]
    True
    """
    at, ends = np.arange(length), lengths[:, None]
    if pooling == "mean":
        return ((at < ends) / ends).astype(np.float32)
    return (at == (0 if pooling == "first" else ends - 1)).astype(np.float32) * np.ones_like(ends, np.float32)


register_dataset(LABELLED_DATASET, LabelledTextKind)
