"""JSON lines, or plain text, to token files.

One process reads blocks of raw lines and writes results; workers parse and tokenize. A worker receives one bytes object
and returns a few flat arrays, so communication costs little compared with tokenizing. Results are consumed in the order
of the blocks, and only a few blocks per worker are in flight at a time: the output does not depend on the number of
workers, nor memory on the size of the input.

A line must be a JSON object with every requested key, each a string (one sequence, or with `split_sentences` one per sentence) or a
list of strings (sentences, one sequence each). Anything else is malformed: reported with file and line number, and fatal unless
skipped. Blank lines are not documents. A text without tokens is omitted and counted; a line with no other text is not a document
either.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from petatron.base.errors import DataError
from petatron.base.terminal_escape import printable
from petatron.config.schema.training import TokenizerConfig
from petatron.data.indexed_dataset import bin_path, idx_path, optimal_dtype
from petatron.data.indexed_writer import IndexedWriter
from petatron.data.jsonl_reader import (
    BLOCK_BYTES,
    MAX_LINE_BYTES,
    InputFormat,
    LineBlock,
    read_line_blocks,
    read_text_blocks,
)
from petatron.data.sentences.language_rules import DEFAULT_LANGUAGE
from petatron.data.sentences.sentence_splitter import SentenceSplitter
from petatron.data.tokenizer import Tokenizer, build_tokenizer

BLOCKS_PER_WORKER = 4
MAX_SHOWN_PROBLEMS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessOptions:
    """What to tokenize, how, and where to."""

    inputs: tuple[str, ...]
    output_prefix: str
    tokenizer: TokenizerConfig
    vocab_size: int | None = None
    """For the NullTokenizer."""
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    split_sentences: bool = False
    """Make a sequence of each sentence of a text; texts of a list are sentences already."""
    keep_newlines: bool = False
    """Keep the white space after a sentence, lines' ends included, in its text."""
    lang: str = DEFAULT_LANGUAGE
    """Language of the sentences."""
    workers: int = 1
    on_error: Literal["fail", "skip"] = "fail"
    max_documents: int | None = None
    """Read at most this many lines in all."""
    max_line_bytes: int = MAX_LINE_BYTES
    """A longer line is refused, so that a few kilobytes of compressed data cannot fill the memory."""
    block_bytes: int = BLOCK_BYTES
    """Bytes of text per block sent to a worker."""
    input_format: InputFormat = "jsonl"
    overwrite: bool = False
    """Replace an output that exists."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """The prefixes that are written, one per key."""
        level = "sentence" if self.split_sentences else "document"
        return tuple(f"{self.output_prefix}_{key}_{level}" for key in self.json_keys)


@dataclass(frozen=True, slots=True)
class PreprocessProgress:
    """The progress of a running job, in bytes of the input files on disk."""

    documents: int
    tokens: int
    bytes_read: int
    bytes_total: int
    seconds: float


@dataclass(slots=True)
class PreprocessReport:
    """The result of a job. Documents are lines with a text that was written; the next three count over all keys."""

    outputs: tuple[str, ...]
    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    empty: int = 0
    malformed: int = 0
    problems: list[str] = field(default_factory=list)
    bytes_read: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _EncodedKey:
    """One key of a block: concatenated tokens, tokens per sequence, sequences per line (0: the text was omitted)."""

    tokens: NDArray
    lengths: NDArray[np.int32]
    sequences: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _EncodedBlock:
    keys: tuple[_EncodedKey, ...]
    documents: int
    malformed: tuple[tuple[int, str], ...]


def preprocess(
    options: PreprocessOptions, on_progress: Callable[[PreprocessProgress], None] | None = None
) -> PreprocessReport:
    """Tokenizes the inputs into `<output_prefix>_<key>_document.{bin,idx}` (`_sentence` where they are split), one pair per key."""
    started = time.monotonic()
    tokenizer = _check_options(options)
    bytes_total = sum(Path(path).stat().st_size for path in options.inputs)
    report = PreprocessReport(options.outputs)
    with ExitStack() as stack:
        dtype = optimal_dtype(tokenizer.vocab_size)
        writers = [stack.enter_context(IndexedWriter(output, dtype)) for output in report.outputs]
        for block, encoded, bytes_read in stack.enter_context(closing(_encoded_blocks(options))):
            report.bytes_read = bytes_read
            _record_problems(block, encoded, options, report)
            report.documents += encoded.documents
            for writer, key in zip(writers, encoded.keys):
                kept = key.sequences[key.sequences > 0]
                writer.add_sequences(key.tokens, key.lengths, sequences_per_document=kept)
                report.tokens += key.tokens.size
                report.empty += key.sequences.size - kept.size
            if on_progress is not None:
                seconds = time.monotonic() - started
                on_progress(PreprocessProgress(report.documents, report.tokens, bytes_read, bytes_total, seconds))
        _check_not_empty(options, writers, report)
        report.sequences = sum(writer.num_sequences for writer in writers)
    report.seconds = time.monotonic() - started
    return report


def _check_options(options: PreprocessOptions) -> Tokenizer:
    """Raises every problem before any work is done."""
    problems = [_missing_input(path) for path in options.inputs if not Path(path).is_file()]
    if not options.inputs:
        problems.append("no input is given (--input)")
    if options.workers < 1:
        problems.append(f"--workers {options.workers} must be at least 1")
    if len(set(options.json_keys)) != len(options.json_keys) or not options.json_keys:
        problems.append(f"--json-keys {' '.join(options.json_keys)} must name each key once")
    if options.max_documents is not None and options.max_documents < 1:
        problems.append(f"--max-documents {options.max_documents} must be at least 1")
    if options.max_line_bytes < 1:
        problems.append(f"--max-line-bytes {options.max_line_bytes} must be at least 1")
    if options.input_format != "jsonl" and len(options.json_keys) > 1:
        problems.append(
            f"--input-format {options.input_format} has one text per document, and --json-keys names several"
        )
    if not options.overwrite:
        existing = [
            path for output in options.outputs for path in (bin_path(output), idx_path(output)) if path.exists()
        ]
        if existing:
            names = " and ".join(str(path) for path in existing)
            problems.append(f"{names} exist already; give another --output-prefix, or replace with --overwrite")
    if problems:
        raise DataError(f"Cannot preprocess: {'; '.join(problems)}.")
    _sentence_splitter(options)
    tokenizer = build_tokenizer(options.tokenizer, vocab_size=options.vocab_size)
    if options.append_eod and tokenizer.eod is None:
        raise DataError(
            f"--append-eod: the tokenizer {tokenizer.name} has no end-of-document token. Put a tokenizer_config.json with an "
            "eos_token beside it, or leave --append-eod out."
        )
    return tokenizer


def _missing_input(path: str) -> str:
    if Path(path).is_dir():
        files = f"{Path(path) / '*.jsonl'} (text files: --input-format text-file)"
        return f"input {path} is a folder; name the files in it, for instance {files}"
    return f"input {path} is not a file" if Path(path).exists() else f"input {path} does not exist"


def _check_not_empty(options: PreprocessOptions, writers: Sequence[IndexedWriter], report: PreprocessReport) -> None:
    for writer, key in zip(writers, options.json_keys):
        if writer.num_tokens == 0:
            first = f" (the first: {report.problems[0]})" if report.problems else ""
            raise DataError(
                f"No tokens for key {key!r} in {', '.join(options.inputs)}: {report.documents:,} documents, "
                f"{report.malformed:,} malformed lines{first}, {report.empty:,} empty texts. Check the input and --json-keys."
            )


def _record_problems(
    block: LineBlock, encoded: _EncodedBlock, options: PreprocessOptions, report: PreprocessReport
) -> None:
    for line, reason in encoded.malformed:
        problem = f"{block.path}:{line}: {reason}"
        if options.on_error == "fail":
            raise DataError(f"{problem}. Correct the line, or skip and count such lines with --on-error skip.")
        report.malformed += 1
        if len(report.problems) < MAX_SHOWN_PROBLEMS:
            report.problems.append(problem)


def _blocks(options: PreprocessOptions) -> Iterator[tuple[LineBlock, int]]:
    """Yields blocks of all inputs, with the bytes read so far."""
    before, left = 0, options.max_documents
    for path in options.inputs:
        lines = 0
        limits = {"block_bytes": options.block_bytes, "max_line_bytes": options.max_line_bytes}
        if options.input_format == "jsonl":
            blocks = read_line_blocks(path, max_lines=left, **limits)
        else:
            whole_file = options.input_format == "text-file"
            blocks = read_text_blocks(path, key=options.json_keys[0], whole_file=whole_file, max_lines=left, **limits)
        for block in blocks:
            lines = block.first_line - 1 + block.data.count(b"\n") + (not block.data.endswith(b"\n"))
            yield block, before + block.file_position
        before += Path(path).stat().st_size
        left = None if left is None else left - lines
        if left == 0:
            return


def _encoded_blocks(options: PreprocessOptions) -> Generator[tuple[LineBlock, _EncodedBlock, int], None, None]:
    """Yields blocks and their encodings in input order, from this process (one worker) or from several."""
    if options.workers == 1:
        for block, bytes_read in _blocks(options):
            yield block, _encode_block(options, block), bytes_read
        return
    # spawn: the tokenizer library has threads, and a forked copy of a process with threads may hang.
    pool = ProcessPoolExecutor(options.workers, get_context("spawn"), init_worker)
    waiting: deque[tuple[LineBlock, Future[_EncodedBlock], int]] = deque()
    try:
        for block, bytes_read in _blocks(options):
            waiting.append((block, pool.submit(_encode_block, options, block), bytes_read))
            if len(waiting) >= BLOCKS_PER_WORKER * options.workers:
                first, future, position = waiting.popleft()
                yield first, future.result(), position
        while waiting:
            first, future, position = waiting.popleft()
            yield first, future.result(), position
    except BrokenProcessPool as error:
        raise DataError(
            "A worker process died while tokenizing; the system may have run out of memory. Try fewer --workers."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def init_worker() -> None:
    """Makes a fresh process a worker that uses one core and leaves Ctrl-C to its parent."""
    # One worker, one thread: the tokenizer library would otherwise start a thread per core in each worker. It takes
    # this setting from the environment only, so we write it, in the worker alone.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _encode_block(options: PreprocessOptions, block: LineBlock) -> _EncodedBlock:
    return _cached_encoder(options).encode(block)


TextValue = str | list[str]


class _Encoder:
    """Parses and tokenizes blocks."""

    def __init__(self, options: PreprocessOptions) -> None:
        self._keys = options.json_keys
        self._tokenizer = build_tokenizer(options.tokenizer, vocab_size=options.vocab_size)
        self._dtype = optimal_dtype(self._tokenizer.vocab_size)
        self._eod = self._tokenizer.eod if options.append_eod else None
        self._splitter = _sentence_splitter(options)

    def encode(self, block: LineBlock) -> _EncodedBlock:
        numbers, rows, malformed = self._parse(block)
        try:
            keys = self._encode_rows(rows)
        except Exception:  # whatever the tokenizer raises; the batch does not tell which text it was
            rows = self._without_bad_texts(numbers, rows, malformed)
            keys = self._encode_rows(rows)
        documents = np.count_nonzero(np.any([key.sequences for key in keys], axis=0))
        return _EncodedBlock(keys, int(documents), tuple(sorted(malformed)))

    def _parse(self, block: LineBlock) -> tuple[list[int], list[list[TextValue]], list[tuple[int, str]]]:
        """Returns line numbers and values of the valid lines, number and reason of the others."""
        try:
            # Not splitlines(), which also splits at characters that are legal inside a JSON string.
            lines: Sequence[str | bytes] = block.data.decode().split("\n")
        except UnicodeDecodeError:
            lines = block.data.split(b"\n")
        numbers: list[int] = []
        rows: list[list[TextValue]] = []
        malformed: list[tuple[int, str]] = []
        for number, line in enumerate(lines, block.first_line):
            if not line or line.isspace():
                continue
            try:
                record = json.loads(line)
                rows.append([self._sequences(text_value(record, key)) for key in self._keys])
                numbers.append(number)
            except json.JSONDecodeError as error:
                plain = line.lstrip()[:1] not in ("{", b"{")
                hint = ": is this plain text? Use --input-format text" if plain else ""
                malformed.append((number, f"not JSON ({error.msg}, column {error.colno}){hint}"))
            except (ValueError, RecursionError) as error:
                malformed.append((number, str(error)))
        return numbers, rows, malformed

    def _sequences(self, value: TextValue) -> TextValue:
        """Returns the texts of the sequences of a value: a string that is one, or a list."""
        if self._splitter is None or not isinstance(value, str):
            return value
        return self._splitter.split(value)

    def _encode_rows(self, rows: Sequence[Sequence[TextValue]]) -> tuple[_EncodedKey, ...]:
        return tuple(self._encode_key([row[place] for row in rows]) for place in range(len(self._keys)))

    def _encode_key(self, values: Sequence[TextValue]) -> _EncodedKey:
        texts = chain.from_iterable([value] if isinstance(value, str) else value for value in values)
        encoded = iter(self._tokenizer.encode_batch(list(texts)))
        sequences: list[list[int]] = []
        per_line: list[int] = []
        for value in values:
            count = 1 if isinstance(value, str) else len(value)
            kept = [ids for _ in range(count) if (ids := next(encoded))]
            if kept and self._eod is not None:
                kept[-1].append(self._eod)
            sequences += kept
            per_line.append(len(kept))
        lengths = np.fromiter(map(len, sequences), np.int32, len(sequences))
        tokens = np.fromiter(chain.from_iterable(sequences), self._dtype, int(lengths.sum(dtype=np.int64)))
        return _EncodedKey(tokens, lengths, np.array(per_line, np.int32))

    def _without_bad_texts(
        self, numbers: Sequence[int], rows: Sequence[list[TextValue]], malformed: list[tuple[int, str]]
    ) -> list[list[TextValue]]:
        good: list[list[TextValue]] = []
        for number, row in zip(numbers, rows):
            try:
                self._encode_rows([row])
                good.append(row)
            except Exception as error:  # as above
                malformed.append((number, f"cannot be tokenized: {error}"))
        return good


_cached_encoder = lru_cache(maxsize=1)(_Encoder)
"""A worker builds its tokenizer with its first block."""


def _sentence_splitter(options: PreprocessOptions) -> SentenceSplitter | None:
    if not options.split_sentences:
        return None
    return SentenceSplitter(options.lang, keep_newlines=options.keep_newlines)


def text_value(record: object, key: str) -> TextValue:
    """Returns the text, or the texts, under a key of a line of JSON; `ValueError` if there is none."""
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}, not an object")
    if key not in record:
        present = ", ".join(printable(name, max_chars=40) for name in sorted(record)[:8]) or "none"
        raise ValueError(f"no key {key!r} (keys here: {present})")
    value = record[key]
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(part, str) for part in value)):
        return value
    raise ValueError(f"key {key!r} holds neither a string nor a list of strings")
