"""The kinds `preferences` and `unpaired-preferences`: answers that objectives compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray

from petatron.config.parse_name_value import NOT_A_SETTING
from petatron.config.schema.objective_and_dataset_names import PREFERENCE_DATASET, REWARD, UNPAIRED_PREFERENCE_DATASET
from petatron.config.schema.run import RunConfig
from petatron.config.schema.sections.task_head import PoolingName
from petatron.data.batch_loader import LoaderOptions, SampleDataset
from petatron.data.conversations.answer_pairs import AnswerPairs, CutRule, PairDataset, segments_of
from petatron.data.conversations.conversation_settings import ConversationSettings
from petatron.data.conversations.conversation_source import EncodedSource
from petatron.data.conversations.conversations_kind import ConversationsKind, padding_id
from petatron.data.conversations.encode_conversation import encode_preference, encode_unpaired
from petatron.data.conversations.encoded_records import EncodeRecord
from petatron.data.conversations.mock_conversations import mock_conversations
from petatron.data.dataset_kinds import DatasetRequest, DataSource, register_dataset
from petatron.data.labelled.labelled_text_dataset import pooling_weights
from petatron.data.packed_segments import PackedSegment, make_segment_batch
from petatron.models.batch import Batch
from petatron.models.decoder import POOLING_WEIGHTS


class PairSource(DataSource):
    """Pairs of answers; rows of them are samples."""

    unit = size_unit = "pairs"

    def __init__(
        self,
        encoded: EncodedSource,
        settings: ConversationSettings,
        padding: int,
        *,
        rows: int,
        shares_row: bool,
        scores_rows: bool,
    ) -> None:
        super().__init__(encoded.name, num_units=encoded.num_records)
        self._encoded, self._settings, self._padding = encoded, settings, padding
        self._rows, self._shares_row, self._scores_rows = rows, shares_row, scores_rows
        self._packed: dict[tuple[range, int, int], PairDataset] = {}

    @property
    def longest(self) -> int:
        """The tokens of the longest pair, if its answers share a row, else of the longest answer."""
        lengths = np.diff(self._encoded.rows.bounds).reshape(-1, self._rows)
        return int((lengths * 2 // self._rows).sum(axis=1).max() if self._shares_row else lengths.max())

    def samples_per_epoch(self, units: range, request: DatasetRequest) -> int:
        return self.dataset(units, request).samples_per_epoch

    def dataset(self, units: range, request: DatasetRequest) -> PairDataset:
        name = (units, request.seq_length, request.seed)
        if name not in self._packed:
            pairs = AnswerPairs(self._encoded, units, has_two_rows=self._rows == 2, seed=request.seed)
            # The last token of an answer predicts nothing, but a head reads it.
            rule = CutRule(request.seq_length - self._scores_rows, self._settings.long_samples, self._shares_row)
            key = {"kind": "answer pairs", "units": [units.start, units.stop], "shares_row": self._shares_row}
            key |= {"long_samples": rule.long_samples, "padding": self._padding}
            self._packed[name] = PairDataset(pairs, units, rule, request, padding=self._padding, key=key)
        return self._packed[name].of(request)


@dataclass(frozen=True)
class PreferencesKind(ConversationsKind):
    """Its settings are those of `ConversationSettings`."""

    reads: ClassVar[str] = "JSON Lines or parquet files of preferences"
    encode: ClassVar[EncodeRecord] = encode_preference
    rows: ClassVar[int] = 2
    scores_rows: bool = field(default=False, metadata=NOT_A_SETTING)
    """Whether a task head reads each answer, in a row of its own."""
    pooling: PoolingName = field(default="last", metadata=NOT_A_SETTING)

    def of_run(self, run: RunConfig) -> Self:
        kind = super().of_run(run)
        return replace(kind, scores_rows=run.train.objective == REWARD, pooling=run.model.pooling or "last")

    @property
    def shares_row(self) -> bool:
        return self.packed and not self.scores_rows

    def open(self, source: str, request: DatasetRequest) -> DataSource:
        encoded, tokenizer = self.open_encoded(source, request)
        return self._source(encoded, padding_id(tokenizer))

    def mock(self, request: DatasetRequest) -> SampleDataset:
        source = self._source(mock_conversations(request, rows_per_record=self.rows), padding=0)
        return source.dataset(range(source.num_units), request)

    def _source(self, encoded: EncodedSource, padding: int) -> PairSource:
        return PairSource(
            encoded, self.settings, padding, rows=self.rows, shares_row=self.shares_row, scores_rows=self.scores_rows
        )

    def collate(self, samples: Sequence[Mapping[str, NDArray[Any]]], options: LoaderOptions) -> Batch:
        seq_length, padding = samples[0]["row"].tolist()
        of_samples = [segments_of(sample, has_labels=self.rows == 1) for sample in samples]
        if self.shares_row:
            return make_segment_batch(of_samples, seq_length, padding_id=padding, pairs=True)
        rows = [[segment] for segments in of_samples for segment in segments]
        if self.scores_rows:
            return _scored_rows([segment for row in rows for segment in row], seq_length, padding, self.pooling)
        return make_segment_batch(rows, seq_length, padding_id=padding, pairs=True, rows_per_sample=2)


@dataclass(frozen=True)
class UnpairedPreferencesKind(PreferencesKind):
    """Its settings are those of `ConversationSettings`."""

    encode: ClassVar[EncodeRecord] = encode_unpaired
    rows: ClassVar[int] = 1


def _scored_rows(segments: Sequence[PackedSegment], seq_length: int, padding: int, pooling: PoolingName) -> Batch:
    """Makes rows of whole texts for a task head, two of each sample: those of the chosen and of the rejected answer."""
    tokens = np.full((len(segments), seq_length), padding, np.int64)
    lengths = np.array([len(segment.ids) for segment in segments])
    for row, segment in enumerate(segments):
        tokens[row, : len(segment.ids)] = segment.ids
    arrays = {"tokens": tokens, POOLING_WEIGHTS: pooling_weights(lengths, seq_length, pooling)}
    return Batch(arrays={name: torch.from_numpy(array) for name, array in arrays.items()}, rows_per_sample=2)


register_dataset(PREFERENCE_DATASET, PreferencesKind)
register_dataset(UNPAIRED_PREFERENCE_DATASET, UnpairedPreferencesKind)
