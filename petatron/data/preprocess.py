"""Tokenizes JSON lines, plain text and other inputs to token files (.bin and .idx).

One process reads blocks of raw lines and writes results; workers parse and tokenize. Results are consumed in the order of the blocks,
and the parts of a job are joined in theirs: the output does not depend on the number of workers, nor on where and how often the work was
interrupted, nor on which machines have done which parts (`parts/`).

A line must be a JSON object with every requested key, each a string (one sequence, or with `split_sentences` one per sentence) or a
list of strings (sentences, one sequence each). Anything else is malformed: reported with file and line number, and fatal unless
skipped. Blank lines are not documents. A text without tokens is omitted and counted; a line with no other text is not a document
either.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from itertools import chain
from typing import Literal

import numpy as np

from petatron.base.errors import DataError
from petatron.config.schema.data import TokenizerConfig
from petatron.data.document_provenance import DocumentIds
from petatron.data.indexed_dataset import bin_path, idx_path, optimal_dtype
from petatron.data.inputs.expand_inputs import expand_inputs
from petatron.data.inputs.input_file import InputFile
from petatron.data.inputs.input_formats import TEXT_FORMATS, InputFormat
from petatron.data.inputs.input_slice import ReadOptions
from petatron.data.inputs.json_record import TextValue, document_id, parse_record, text_value
from petatron.data.inputs.line_blocks import BLOCK_BYTES, MAX_LINE_BYTES, LineBlock
from petatron.data.preprocess_parts.encode_blocks import encode_blocks
from petatron.data.preprocess_parts.encoded_block import EncodedBlock, EncodedKey
from petatron.data.preprocess_parts.input_cuts import PART_BYTES
from petatron.data.preprocess_parts.part_blocks import part_blocks
from petatron.data.preprocess_parts.part_report import LineCounts, PartReport
from petatron.data.preprocess_parts.part_writer import WriteOptions, write_parts
from petatron.data.preprocess_parts.parts_folder import PartsFolder, TokenizingJob
from petatron.data.preprocess_parts.process_pool_engine import tokenize_in_groups
from petatron.data.preprocess_parts.ray_engine import tokenize_on_ray
from petatron.data.preprocess_parts.run_job import (
    Engine,
    JobRequest,
    begin_job,
    check_finished,
    finished_parts,
    open_job,
    run_job,
)
from petatron.data.preprocess_report import OnProgress, PreprocessReport
from petatron.data.recorded_tokenizer import RecordedTokenizer
from petatron.data.sentences.language_rules import DEFAULT_LANGUAGE
from petatron.data.sentences.sentence_splitter import SentenceSplitter
from petatron.data.tokenizer import Tokenizer, build_tokenizer


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
    append_bod: bool = False
    """Begin each document with the tokenizer's begin-of-document token."""
    workers: int = 1
    on_error: Literal["fail", "skip"] = "fail"
    max_documents: int | None = None
    """Read at most this many lines in all."""
    max_line_bytes: int = MAX_LINE_BYTES
    """A longer line is refused, so that a few kilobytes of compressed data cannot fill the memory."""
    block_bytes: int = BLOCK_BYTES
    """Bytes of text per block sent to a worker."""
    input_format: InputFormat = "auto"
    overwrite: bool = False
    """Replace an output that exists."""
    engine: Literal["local", "ray"] = "local"
    """Where parts are tokenized: in this process and its workers, or as tasks of Ray, each with one core."""
    address: str | None = None
    """Address of a Ray cluster; without it, the one of this machine or of Ray's environment variable."""
    partitions: int = 1
    """Parts that are tokenized at the same time, each with its share of the workers and a reader of its own."""
    part_bytes: int = PART_BYTES
    """Bytes of the inputs that are lost at most when the work is interrupted, about."""
    document_sources: bool = True
    """Write where each document comes from."""
    id_key: str = "id"
    """The key whose value is noted there, where a line has it."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """The prefixes that are written, one per key."""
        level = "sentence" if self.split_sentences else "document"
        return tuple(f"{self.output_prefix}_{key}_{level}" for key in self.json_keys)


def preprocess(options: PreprocessOptions, on_progress: OnProgress | None = None) -> PreprocessReport:
    """Tokenizes the inputs into `<output_prefix>_<key>_document.{bin,idx}` (`_sentence` where they are split), one pair per key."""
    return _run(options, _engine(options, on_progress))


def begin_parts(options: PreprocessOptions) -> TokenizingJob:
    """Cuts the inputs into parts, for `preprocess_parts` in any order and on any machine, and then `join_finished_parts`."""
    return begin_job(_job_request(options))


def preprocess_parts(options: PreprocessOptions, parts: Sequence[int]) -> dict[int, PartReport]:
    """Tokenizes those of the parts that are not finished, of a job that has begun, and returns the reports of all."""
    request = _job_request(replace(options, overwrite=False))
    folder, job = open_job(request)
    if unknown := [part for part in parts if not 0 <= part < job.num_parts]:
        raise DataError(f"--part {unknown[0]}: the parts of {folder.path} are 0 to {job.num_parts - 1}.")
    finished = finished_parts(request, folder, job)
    return {part: finished.get(part) or tokenize_part(options, part) for part in parts}


def join_finished_parts(options: PreprocessOptions) -> PreprocessReport:
    """Joins the parts of a job, all of which must be finished."""
    options = replace(options, overwrite=False)
    check_finished(_job_request(options))
    return _run(options, _engine(options, None))


def tokenize_part(options: PreprocessOptions, part: int) -> PartReport:
    """Tokenizes a part of a job that has begun; what an earlier attempt has left is removed."""
    folder = PartsFolder(options.output_prefix)
    folder.clear_part(part)
    (report,) = _tokenize_parts(options, folder.read_job(), [part])
    return report


def _run(options: PreprocessOptions, engine: Engine) -> PreprocessReport:
    started = time.monotonic()
    request = _job_request(options)
    result = run_job(request, engine, partial(_check_not_empty, options))
    return PreprocessReport.of_parts(
        result.reports,
        outputs=options.outputs,
        resumed=result.resumed,
        bytes_read=sum(file.size or 0 for file in request.files),
        seconds=time.monotonic() - started,
    )


def _job_request(options: PreprocessOptions) -> JobRequest:
    tokenizer, files = _check_options(options)
    total = sum(file.size or 0 for file in files)
    return JobRequest(
        output_prefix=options.output_prefix,
        files=tuple(files),
        settings=_output_settings(options, tokenizer),
        part_bytes=min(options.part_bytes, -(-total // options.partitions)) if options.max_documents is None else None,
        write=_write_options(options, tokenizer, RecordedTokenizer.of(tokenizer)),
        overwrite=options.overwrite,
    )


def _engine(options: PreprocessOptions, on_progress: OnProgress | None) -> Engine:
    if options.engine == "ray":
        one_core = replace(options, workers=1)
        return partial(tokenize_on_ray, partial(tokenize_part, one_core), options.address, on_progress)
    if options.partitions > 1:
        share = replace(options, workers=max(options.workers // options.partitions, 1))
        return partial(tokenize_in_groups, partial(tokenize_part, share), options.partitions, on_progress)
    return partial(_tokenize_parts, options, on_progress=on_progress)


def _write_options(
    options: PreprocessOptions, tokenizer: Tokenizer, recorded: RecordedTokenizer | None = None
) -> WriteOptions:
    """`recorded` is written beside the joined dataset, and not beside its parts."""
    return WriteOptions(
        outputs=options.outputs,
        dtype=optimal_dtype(tokenizer.vocab_size),
        skips=options.on_error == "skip",
        max_line_bytes=options.max_line_bytes,
        with_sources=options.document_sources,
        tokenizer=recorded,
    )


_WITHOUT_EFFECT = (
    "inputs",
    "output_prefix",
    "workers",
    "engine",
    "address",
    "partitions",
    "on_error",
    "max_line_bytes",
    "block_bytes",
    "overwrite",
    "part_bytes",
)
"""Options that decide nothing about the output of a part, or of which its report says what it was made with."""


def _output_settings(options: PreprocessOptions, tokenizer: Tokenizer) -> dict[str, object]:
    """Returns what decides about the output besides the inputs, in values of JSON."""
    names = [item.name for item in fields(options) if item.name not in (*_WITHOUT_EFFECT, "tokenizer")]
    settings = {name: getattr(options, name) for name in names}
    settings |= {"tokenizer": f"{tokenizer.fingerprint} ({tokenizer.vocab_size} ids, end of document {tokenizer.eod})"}
    settings |= {"append_bod": tokenizer.bod if options.append_bod else None}
    return json.loads(json.dumps(settings))


def _tokenize_parts(
    options: PreprocessOptions, job: TokenizingJob, parts: Sequence[int], on_progress: OnProgress | None = None
) -> Iterator[PartReport]:
    """Tokenizes parts one after the other, each with all workers, and yields their reports."""
    read_options = ReadOptions(
        options.json_keys,
        options.id_key if options.document_sources else None,
        block_bytes=options.block_bytes,
        max_line_bytes=options.max_line_bytes,
    )
    write_options = _write_options(options, build_tokenizer(options.tokenizer, vocab_size=options.vocab_size))
    blocks = part_blocks(job, parts, read_options, max_documents=options.max_documents)
    folder = PartsFolder(options.output_prefix)
    encoded_blocks = encode_blocks(partial(_encode_block, options), blocks, workers=options.workers)
    yield from write_parts(job, parts, folder, encoded_blocks, write_options, on_progress=on_progress)


def _check_options(options: PreprocessOptions) -> tuple[Tokenizer, list[InputFile]]:
    """Raises every problem before any work is done."""
    problems: list[str] = []
    files: list[InputFile] = []
    try:
        files = expand_inputs(options.inputs, options.input_format)
    except DataError as error:
        problems.append(str(error).removesuffix("."))
    if not options.inputs:
        problems.append("no input is given (--input)")
    if options.workers < 1:
        problems.append(f"--workers {options.workers} must be at least 1")
    if options.part_bytes < 1:
        problems.append(f"--part-bytes {options.part_bytes} must be at least 1")
    if not 1 <= options.partitions <= options.workers:
        problems.append(f"--partitions {options.partitions} must be from 1 to --workers {options.workers}")
    if len(set(options.json_keys)) != len(options.json_keys) or not options.json_keys:
        problems.append(f"--json-keys {' '.join(options.json_keys)} must name each key once")
    if options.max_documents is not None and options.max_documents < 1:
        problems.append(f"--max-documents {options.max_documents} must be at least 1")
    if options.max_line_bytes < 1:
        problems.append(f"--max-line-bytes {options.max_line_bytes} must be at least 1")
    if options.input_format in TEXT_FORMATS and len(options.json_keys) > 1:
        problems.append(
            f"--input-format {options.input_format} has one text per document, and --json-keys names several"
        )
    # Of a job that was interrupted while it published its output, this is its own.
    if not options.overwrite and not PartsFolder(options.output_prefix).has_job:
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
    if options.append_bod and tokenizer.bod is None:
        raise DataError(
            f"--append-bod: the tokenizer {tokenizer.name} has no begin-of-document token. Put a tokenizer_config.json with a "
            "bos_token beside it, or leave --append-bod out."
        )
    return tokenizer, files


def _check_not_empty(options: PreprocessOptions, reports: Sequence[PartReport]) -> None:
    for place, key in enumerate(options.json_keys):
        if not any(report.key_tokens[place] for report in reports):
            counts = LineCounts()
            for report in reports:
                counts.add(report.counts)
            problem = next((problem for report in reports for problem in report.problems), None)
            first = f" (the first: {problem})" if problem else ""
            raise DataError(
                f"No tokens for key {key!r} in {', '.join(options.inputs)}: {counts.documents:,} documents, "
                f"{counts.skipped:,} malformed lines{first}, {counts.empty:,} empty texts. Check the input and --json-keys."
            )


def _encode_block(options: PreprocessOptions, block: LineBlock) -> EncodedBlock:
    return _cached_encoder(options).encode(block)


class _Encoder:
    """Parses and tokenizes blocks."""

    def __init__(self, options: PreprocessOptions) -> None:
        self._keys = options.json_keys
        self._tokenizer = build_tokenizer(options.tokenizer, vocab_size=options.vocab_size)
        self._dtype = optimal_dtype(self._tokenizer.vocab_size)
        self._eod = self._tokenizer.eod if options.append_eod else None
        self._splitter = _sentence_splitter(options)
        self._bod = self._tokenizer.bod if options.append_bod else None
        self._id_key = options.id_key if options.document_sources else None

    def encode(self, block: LineBlock) -> EncodedBlock:
        ids: dict[int, bytes] = {}
        numbers, rows, malformed = self._parse(block, ids)
        try:
            keys = self._encode_rows(rows)
        except Exception:  # whatever the tokenizer raises; the batch does not tell which text it was
            rows = self._without_bad_texts(numbers, rows, malformed)
            keys = self._encode_rows(rows)
            bad_lines = {line for line, _ in malformed}
            numbers = [number for number in numbers if number not in bad_lines]
        documents = np.count_nonzero(np.any([key.sequences for key in keys], axis=0))
        lines = np.array(numbers, np.int64)
        document_ids = DocumentIds.of([ids.get(number, b"") for number in numbers] if ids else None, len(numbers))
        return EncodedBlock(keys, int(documents), tuple(sorted(malformed)), lines, document_ids)

    def _parse(
        self, block: LineBlock, ids: dict[int, bytes]
    ) -> tuple[list[int], list[list[TextValue]], list[tuple[int, str]]]:
        """Returns line numbers and values of the valid lines, number and reason of the others; adds the ids of lines that have one."""
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
                record = parse_record(line)
                rows.append([self._sequences(text_value(record, key)) for key in self._keys])
                numbers.append(number)
                if self._id_key is not None and (text := document_id(record, self._id_key)):
                    ids[number] = text
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

    def _encode_rows(self, rows: Sequence[Sequence[TextValue]]) -> tuple[EncodedKey, ...]:
        return tuple(self._encode_key([row[place] for row in rows]) for place in range(len(self._keys)))

    def _encode_key(self, values: Sequence[TextValue]) -> EncodedKey:
        texts = chain.from_iterable([value] if isinstance(value, str) else value for value in values)
        encoded = iter(self._tokenizer.encode_batch(list(texts)))
        sequences: list[list[int]] = []
        per_line: list[int] = []
        for value in values:
            count = 1 if isinstance(value, str) else len(value)
            kept = [ids for _ in range(count) if (ids := next(encoded))]
            if kept and self._bod is not None:
                kept[0].insert(0, self._bod)
            if kept and self._eod is not None:
                kept[-1].append(self._eod)
            sequences += kept
            per_line.append(len(kept))
        lengths = np.fromiter(map(len, sequences), np.int32, len(sequences))
        tokens = np.fromiter(chain.from_iterable(sequences), self._dtype, int(lengths.sum(dtype=np.int64)))
        return EncodedKey(tokens, lengths, np.array(per_line, np.int32))

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
