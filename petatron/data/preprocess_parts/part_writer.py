"""Writes the files of one part: tokens, sources of documents, and the report that accounts for every line."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from petatron.base.errors import DataError
from petatron.data.document_provenance import ProvenanceWriter
from petatron.data.indexed_dataset import bin_path, idx_path
from petatron.data.indexed_writer import IndexedWriter
from petatron.data.inputs.input_slice import InputSlice
from petatron.data.inputs.line_blocks import LineBlock
from petatron.data.preprocess_parts.encoded_block import EncodedBlock
from petatron.data.preprocess_parts.part_blocks import PartBlock
from petatron.data.preprocess_parts.part_report import LineCounts, PartReport
from petatron.data.preprocess_parts.parts_folder import PartsFolder, TokenizingJob
from petatron.data.preprocess_report import OnProgress, PreprocessProgress
from petatron.data.recorded_tokenizer import RecordedTokenizer

_FIXES = {"too long": "If that is meant, allow more with --max-line-bytes", "malformed": "Correct the line"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """outputs: prefixes of the job's datasets. skips: whether malformed and long lines are counted instead of ending the work.

    tokenizer: what is recorded of it beside them; None for nothing.
    """

    outputs: tuple[str, ...]
    dtype: np.dtype
    skips: bool
    max_line_bytes: int
    with_sources: bool
    tokenizer: RecordedTokenizer | None


class PartWriter:
    """Takes the blocks of a part in order. An exception leaves nothing of the part."""

    def __init__(
        self,
        folder: PartsFolder,
        report: PartReport,
        slices: Sequence[InputSlice],
        options: WriteOptions,
    ) -> None:
        self.report = report
        self._folder, self._slices, self._skips = folder, slices, options.skips
        self._lines_before: dict[int, int] = {}
        prefixes = [folder.part_prefix(report.part, output) for output in options.outputs]
        self._writers: list[IndexedWriter] = []
        self._sources: list[ProvenanceWriter] = []
        try:
            self._writers += [IndexedWriter(prefix, options.dtype) for prefix in prefixes]
            if options.with_sources:
                files = [part_slice.file.path for part_slice in slices]
                self._sources += [ProvenanceWriter(prefix, files) for prefix in prefixes]
        except BaseException:
            self.abort()
            raise

    def add(self, place: int, block: LineBlock, encoded: EncodedBlock) -> None:
        """Adds a block of the slice at a place among those of the part."""
        self._record_skipped(place, block, encoded)
        counts = self.report.counts
        blank = block.num_lines - encoded.lines.size - len(encoded.malformed)
        counts.lines += block.num_lines + len(block.refused)
        counts.blank += blank
        counts.documents += encoded.documents
        counts.without_text += encoded.lines.size - encoded.documents
        lines = block.source_lines(encoded.lines)
        for number, key in enumerate(encoded.keys):
            kept = key.sequences > 0
            self._writers[number].add_sequences(key.tokens, key.lengths, sequences_per_document=key.sequences[kept])
            counts.tokens += key.tokens.size
            counts.sequences += key.lengths.size
            counts.empty += kept.size - int(np.count_nonzero(kept))
            if self._sources:
                self._sources[number].add(place, lines[kept], encoded.ids.select(kept))

    def finish(self) -> PartReport:
        """Publishes the files, and the report after them."""
        self.report.key_tokens = [writer.num_tokens for writer in self._writers]
        self.report.first_lines, self.report.last_lines = self._slices[0].num_lines, self._slices[-1].num_lines
        for writer in (*self._writers, *self._sources):
            writer.finish()
        paths: list[Path] = [sources.path for sources in self._sources]
        for writer in self._writers:
            paths += [bin_path(writer.prefix), idx_path(writer.prefix)]
        self._folder.write_report(self.report, paths)
        return self.report

    def abort(self) -> None:
        for writer in (*self._writers, *self._sources):
            writer.abort()

    def _record_skipped(self, place: int, block: LineBlock, encoded: EncodedBlock) -> None:
        skipped = [(int(block.source_lines(np.array([line]))[0]), why, "malformed") for line, why in encoded.malformed]
        skipped += [(refused.line, refused.reason, refused.kind) for refused in block.refused]
        for line, reason, kind in sorted(skipped):
            problem = f"{block.path}:{line + self._count_lines_before(place)}: {reason}"
            if not self._skips:
                raise DataError(f"{problem}. {_FIXES[kind]}, or skip and count such lines with --on-error skip.")
            self.report.counts.malformed += kind == "malformed"
            self.report.counts.too_long += kind == "too long"
            self.report.add_problem(problem)

    def _count_lines_before(self, place: int) -> int:
        """Reads the file up to the slice, which is worth it for the number of a line in an error, and only then."""
        if place not in self._lines_before:
            self._lines_before[place] = self._slices[place].lines_before()
        return self._lines_before[place]


def write_parts(
    job: TokenizingJob,
    parts: Sequence[int],
    folder: PartsFolder,
    encoded_blocks: Generator[tuple[PartBlock, EncodedBlock | None], None, None],
    options: WriteOptions,
    *,
    on_progress: OnProgress | None = None,
) -> Iterator[PartReport]:
    """Writes the encoded blocks of parts, and yields the report of each part that is finished."""
    started = time.monotonic()
    bytes_before = bytes_done = job.num_bytes - sum(map(job.part_bytes, parts))
    done = LineCounts()
    writer: PartWriter | None = None
    try:
        with closing(encoded_blocks):
            for source, encoded in encoded_blocks:
                if writer is None:
                    report = PartReport(source.part, job.fingerprint, options.max_line_bytes)
                    writer = PartWriter(folder, report, source.slices, options)
                if source.block is None or encoded is None:
                    finished, writer = writer.finish(), None
                    done.add(finished.counts)
                    bytes_done += job.part_bytes(source.part)
                    yield finished
                    continue
                writer.add(source.place, source.block, encoded)
                if on_progress is not None:
                    counts = writer.report.counts
                    progress = PreprocessProgress(
                        documents=done.documents + counts.documents,
                        tokens=done.tokens + counts.tokens,
                        bytes_read=bytes_done + source.bytes_read,
                        bytes_total=job.num_bytes,
                        seconds=time.monotonic() - started,
                        bytes_before=bytes_before,
                    )
                    on_progress(progress)
    finally:
        if writer is not None:
            writer.abort()
