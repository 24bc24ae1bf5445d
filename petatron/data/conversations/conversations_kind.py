"""The kind `conversations`: supervised fine-tuning on chats, prompts with completions, or texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray

from petatron.base.errors import DataError, raise_problems
from petatron.base.log import get_logger
from petatron.config.parse_name_value import NOT_A_SETTING
from petatron.config.schema.data import DataConfig, TokenizerConfig
from petatron.config.schema.objective_and_dataset_names import CONVERSATIONS_DATASET
from petatron.config.schema.run import RunConfig
from petatron.config.schema.sections.chat_template import IDENTITY
from petatron.data.batch_loader import LoaderOptions, SampleDataset
from petatron.data.conversations.conversation_rows import ConversationDataset, PackedRecords, fit_records, report_cuts
from petatron.data.conversations.conversation_settings import ConversationSettings
from petatron.data.conversations.conversation_source import EncodedSource, open_encoded
from petatron.data.conversations.conversation_template import conversation_template
from petatron.data.conversations.encode_conversation import encode_conversation
from petatron.data.conversations.encoded_records import EncodeRecord, EncodingJob
from petatron.data.conversations.held_out_prompts import prompts_of_records
from petatron.data.conversations.mock_conversations import mock_conversations
from petatron.data.dataset_kinds import DatasetKind, DatasetRequest, DataSource, register_dataset
from petatron.data.masked.packed_rows import packed_documents
from petatron.data.sample_index_folder import sample_index_folder
from petatron.data.tokenizer import Tokenizer, build_tokenizer
from petatron.models.batch import Batch

LOSS_WEIGHTS = "loss_weights"
_FORMATS_OF_ALL_TOKENS = ("default", IDENTITY)
"""Those of Megatron's that mask nothing."""


class ConversationSource(DataSource):
    """Conversations; packed rows of them are samples."""

    unit = size_unit = "conversations"

    def __init__(self, encoded: EncodedSource, settings: ConversationSettings, padding: int) -> None:
        super().__init__(encoded.name, num_units=encoded.num_records)
        self._encoded, self._settings, self._padding = encoded, settings, padding
        self._packings: dict[tuple[range, int, int], PackedRecords] = {}

    def prompts(self, units: range, count: int) -> list[str]:
        """Returns lines of `--sample-prompts` of the first units."""
        return prompts_of_records(self._encoded, list(units)[:count], self._settings)

    @property
    def longest(self) -> int:
        """The tokens of the longest conversation."""
        return int(np.diff(self._encoded.rows.bounds).max())

    def samples_per_epoch(self, units: range, request: DatasetRequest) -> int:
        return len(self._packing(units, request))

    def dataset(self, units: range, request: DatasetRequest) -> ConversationDataset:
        key = {"kind": CONVERSATIONS_DATASET, "units": [units.start, units.stop], "packed": self._settings.packed}
        key |= {"long_samples": self._settings.long_samples, "padding": self._padding}
        return ConversationDataset(
            self._encoded, self._packing(units, request), request, padding=self._padding, key=key
        )

    def _packing(self, units: range, request: DatasetRequest) -> PackedRecords:
        name = (units, request.seq_length, request.seed)
        if name not in self._packings:
            fitting = fit_records(self._encoded, units, request.seq_length, self._settings.long_samples)
            report_cuts(self.name, fitting, request.seq_length, self._settings.long_samples)
            packing = PackedRecords(
                self._encoded, fitting, request.seq_length, request.seed, packed=self._settings.packed
            )
            self._packings[name] = packing
            get_logger(__name__).info("%s", packing.describe(self.name, request.seq_length))
        return self._packings[name]


@dataclass(frozen=True)
class ConversationsKind(ConversationSettings, DatasetKind):
    """Its settings are those of `ConversationSettings`."""

    reads: ClassVar[str] = "JSON Lines or parquet files of conversations"
    encode: ClassVar[EncodeRecord] = encode_conversation
    data: DataConfig | None = field(default=None, metadata=NOT_A_SETTING)
    """Where encoded conversations are cached."""
    tokenizer: TokenizerConfig | None = field(default=None, metadata=NOT_A_SETTING)
    """What other processes open the run's tokenizer by."""
    vocab_size: int | None = field(default=None, metadata=NOT_A_SETTING)

    def of_run(self, run: RunConfig) -> Self:
        raise_problems(self.setting_problems())
        learns_all = run.data.sft_tokenizer_prompt_format in _FORMATS_OF_ALL_TOKENS and self.train_on == "answers"
        kind = replace(self, train_on="all") if learns_all else self
        return replace(kind, data=run.data, tokenizer=run.tokenizer, vocab_size=run.model.vocab_size)

    @property
    def settings(self) -> ConversationSettings:
        return ConversationSettings(**{entry.name: getattr(self, entry.name) for entry in fields(ConversationSettings)})

    def open(self, source: str, request: DatasetRequest) -> DataSource:
        encoded, tokenizer = self.open_encoded(source, request)
        return ConversationSource(encoded, self.settings, padding_id(tokenizer))

    def open_encoded(self, source: str, request: DatasetRequest) -> tuple[EncodedSource, Tokenizer]:
        """Encodes the records of a source, or reads what is cached of them."""
        tokenizer = request.tokenizer
        if tokenizer is None:
            raise DataError(
                "Conversations need a tokenizer. Give --tokenizer-model, or start from a model that has one (--from)."
            )
        job = EncodingJob(
            self._for_workers(tokenizer),
            self.vocab_size,
            conversation_template(tokenizer),
            self.settings,
            type(self).encode,
        )
        cache = None if self.data is None else sample_index_folder(self.data, source)
        return open_encoded(source, job, tokenizer, cache=cache, log=request.index_log), tokenizer

    def mock(self, request: DatasetRequest) -> SampleDataset:
        source = ConversationSource(mock_conversations(request), self.settings, padding=0)
        return source.dataset(range(source.num_units), request)

    def _for_workers(self, tokenizer: Tokenizer) -> TokenizerConfig | None:
        """Returns the settings that make the same tokenizer elsewhere; None if they make another."""
        if self.tokenizer is None or self.tokenizer.tokenizer_type is None:
            return None
        try:
            same = build_tokenizer(self.tokenizer, vocab_size=self.vocab_size).fingerprint == tokenizer.fingerprint
        except DataError:
            return None
        return self.tokenizer if same else None

    def collate(self, samples: Sequence[Mapping[str, NDArray[Any]]], options: LoaderOptions) -> Batch:
        return make_conversation_batch(samples)


def make_conversation_batch(samples: Sequence[Mapping[str, NDArray[Any]]]) -> Batch:
    """Makes a batch: a position is in the loss if the next token is of the same conversation, and is learned."""
    ids, begins, weights = (np.stack([sample[name] for sample in samples]) for name in ("ids", "begins", "weights"))
    labels, learned = np.zeros_like(ids), np.zeros(ids.shape, np.float32)
    labels[:, :-1] = ids[:, 1:]
    learned[:, :-1] = np.where((begins[:, 1:] >= 0) & (begins[:, 1:] == begins[:, :-1]), weights[:, 1:], 0)
    documents, positions = packed_documents(begins)
    arrays = {"tokens": ids, "labels": labels, "loss_mask": (learned > 0).astype(np.float32)}
    if weights.dtype != np.uint8:
        arrays[LOSS_WEIGHTS] = learned
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    return Batch(arrays=tensors | {"positions": positions}, documents=documents)


def padding_id(tokenizer: Tokenizer) -> int:
    """Returns the token that fills rows up, which nothing reads."""
    return tokenizer.special_ids.get("pad", tokenizer.eod or 0)


register_dataset(CONVERSATIONS_DATASET, ConversationsKind)
