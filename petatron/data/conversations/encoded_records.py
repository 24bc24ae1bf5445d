"""Encodes the records of files, in this process or in several, into flat arrays that are cached.

A record has a row of tokens, or several (a preference has two). What does not encode is refused: `on_error=fail` names the first such
records, their lines, and what to do; `skip` counts them, and lists all in a file beside the cached arrays.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context

import numpy as np

from petatron.base.errors import DataError
from petatron.base.log import get_logger
from petatron.config.schema.data import TokenizerConfig
from petatron.data.conversations.conversation_files import RawRecord, parse_raw_record, read_raw_records
from petatron.data.conversations.conversation_settings import ConversationSettings
from petatron.data.conversations.conversation_template import ConversationTemplate
from petatron.data.conversations.encode_conversation import ConversationEncoder, ConversationTokens
from petatron.data.conversations.refused_conversation import RefusedConversation
from petatron.data.index_cache import Arrays
from petatron.data.inputs.input_file import InputFile
from petatron.data.preprocess_parts.encode_blocks import init_worker
from petatron.data.tokenizer import Tokenizer, build_tokenizer

ARRAYS = ("ids", "weights", "bounds", "labels", "files", "lines")
_RECORDS_PER_BLOCK = 256
_BLOCKS_PER_WORKER = 4
_MIN_BYTES_PER_WORKER = 4 << 20
"""A worker takes a second or two to start."""
_MAX_WORKERS = 8
_PROGRESS_S = 10.0
EncodeRecord = Callable[[ConversationEncoder, object], tuple[tuple[ConversationTokens, ...], float]]
"""Returns the rows of a record, and its label; raises `RefusedConversation`."""


@dataclass(frozen=True, slots=True)
class EncodingJob:
    """What a process needs to encode records. encode: a function of a module, which other processes import."""

    tokenizer: TokenizerConfig | None
    vocab_size: int | None
    template: ConversationTemplate
    settings: ConversationSettings
    encode: EncodeRecord

    def encoder(self, tokenizer: Tokenizer) -> ConversationEncoder:
        return ConversationEncoder(tokenizer, self.template, self.settings)


@dataclass(frozen=True, slots=True)
class RefusedRecord:
    """A record that makes no sample: its file and line, the kind of the reason, and the reason."""

    path: str
    line: int
    kind: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.reason}"


@dataclass(frozen=True, slots=True)
class _Block:
    """The records of a block: their lines, rows and labels, and those that are refused."""

    lines: list[int]
    rows: list[tuple[ConversationTokens, ...]]
    labels: list[float]
    refused: list[tuple[int, str, str]]


def encode_files(
    name: str, files: Sequence[InputFile], job: EncodingJob, tokenizer: Tokenizer, *, max_refused: int | None
) -> tuple[Arrays, list[RefusedRecord]]:
    """Returns the rows of all records, and the refused ones; stops after `max_refused` of them."""
    blocks: list[tuple[int, _Block]] = []
    refused: list[RefusedRecord] = []
    progress = _Progress(name, files)
    for number, block in _encoded_blocks(files, job, tokenizer, progress):
        blocks.append((number, block))
        refused += [RefusedRecord(files[number].path, *entry) for entry in block.refused]
        progress.report(len(block.lines))
        if max_refused is not None and len(refused) >= max_refused:
            break
    progress.finish()
    return _arrays(blocks), refused


def _arrays(blocks: list[tuple[int, _Block]]) -> Arrays:
    rows = [row for _, block in blocks for rows in block.rows for row in rows]
    weights = np.concatenate([row.weights for row in rows]) if rows else np.zeros(0, np.float32)
    is_mask = bool(np.isin(weights, (0, 1)).all())
    counts = [len(block.lines) for _, block in blocks]
    return {
        "ids": np.concatenate([row.ids for row in rows]) if rows else np.zeros(0, np.int32),
        "weights": weights.astype(np.uint8) if is_mask else weights,
        "bounds": np.cumsum([0, *(len(row.ids) for row in rows)], dtype=np.int64),
        "labels": np.array([label for _, block in blocks for label in block.labels], np.float32),
        "files": np.repeat(np.array([number for number, _ in blocks], np.int32), counts),
        "lines": np.array([line for _, block in blocks for line in block.lines], np.int64),
    }


class _Progress:
    """Logs how far encoding is, every ten seconds."""

    def __init__(self, name: str, files: Sequence[InputFile]) -> None:
        self._name, self._num_files = name, len(files)
        self._count, self._share, self._last_s, self._logged = 0, 0.0, time.monotonic(), False

    def read(self, number: int, share: float) -> None:
        self._share = (number + share) / self._num_files

    def report(self, count: int) -> None:
        self._count += count
        if time.monotonic() - self._last_s > _PROGRESS_S:
            self._last_s, self._logged = time.monotonic(), True
            get_logger(__name__).info(
                "%s: %s records encoded, %.0f %%", self._name, f"{self._count:,}", 100 * self._share
            )

    def finish(self) -> None:
        if self._logged:
            get_logger(__name__).info("%s: all %s records are encoded", self._name, f"{self._count:,}")


def _encoded_blocks(
    files: Sequence[InputFile], job: EncodingJob, tokenizer: Tokenizer, progress: _Progress
) -> Iterator[tuple[int, _Block]]:
    blocks = _raw_blocks(files, progress)
    workers = num_workers(job, sum(file.size or 0 for file in files))
    if workers == 1:
        encoder = job.encoder(tokenizer)
        for number, records in blocks:
            yield number, _encode_block(job, encoder, records)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), init_worker)
    waiting: deque[tuple[int, Future[_Block]]] = deque()
    try:
        for number, records in blocks:
            waiting.append((number, pool.submit(_encode_in_worker, job, records)))
            if len(waiting) >= _BLOCKS_PER_WORKER * workers:
                number, future = waiting.popleft()
                yield number, future.result()
        for number, future in waiting:
            yield number, future.result()
    except BrokenProcessPool as error:
        raise DataError(
            "A process that encodes conversations died; the system may have run out of memory. Try fewer: --dataset-settings "
            "encode_workers=1."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def num_workers(job: EncodingJob, size_bytes: int) -> int:
    """Returns how many processes encode files of a size: those that are asked for, else as many as pay."""
    if job.tokenizer is None:
        return 1
    if job.settings.encode_workers:
        return job.settings.encode_workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _MAX_WORKERS, size_bytes // _MIN_BYTES_PER_WORKER))


def _raw_blocks(files: Sequence[InputFile], progress: _Progress) -> Iterator[tuple[int, list[RawRecord]]]:
    for number, file in enumerate(files):
        for records in _in_blocks(read_raw_records(file)):
            progress.read(number, records[-1].share)
            yield number, records


def _in_blocks(records: Iterable[RawRecord]) -> Iterator[list[RawRecord]]:
    block: list[RawRecord] = []
    for record in records:
        block.append(record)
        if len(block) == _RECORDS_PER_BLOCK:
            yield block
            block = []
    if block:
        yield block


def _encode_block(job: EncodingJob, encoder: ConversationEncoder, records: Sequence[RawRecord]) -> _Block:
    block = _Block([], [], [], [])
    for raw in records:
        try:
            rows, label = job.encode(encoder, parse_raw_record(raw))
        except RefusedConversation as error:
            block.refused.append((raw.line, error.kind, error.reason))
        else:
            block.lines.append(raw.line)
            block.rows.append(rows)
            block.labels.append(label)
    return block


@lru_cache(maxsize=1)
def _cached_encoder(job: EncodingJob) -> ConversationEncoder:
    assert job.tokenizer is not None, "else there are no workers"
    return job.encoder(build_tokenizer(job.tokenizer, vocab_size=job.vocab_size))


def _encode_in_worker(job: EncodingJob, records: Sequence[RawRecord]) -> _Block:
    return _encode_block(job, _cached_encoder(job), records)
