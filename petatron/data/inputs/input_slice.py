"""A slice of an input file, read as blocks of JSON lines whatever its format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from petatron.base.errors import DataError
from petatron.data.inputs.arrow_rows import AskedColumns, arrow_rows, parquet_rows
from petatron.data.inputs.csv_rows import csv_rows
from petatron.data.inputs.input_file import InputFile
from petatron.data.inputs.input_formats import FORMAT_HEAD_BYTES, TEXT_FORMATS, format_of_head
from petatron.data.inputs.line_blocks import (
    BLOCK_BYTES,
    MAX_LINE_BYTES,
    LineBlock,
    line_start,
    lines_before,
    read_line_blocks,
)
from petatron.data.inputs.row_blocks import RefusedRow, SourceRow, blocks_of_rows
from petatron.data.inputs.text_documents import TextDocuments
from petatron.data.inputs.webdataset_samples import tar_samples


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What is read of each row, and in which amounts."""

    keys: tuple[str, ...]
    id_key: str | None = None
    all_keys: bool = False
    """Also what nobody asks for by name, for whoever writes the rows again."""
    block_bytes: int = BLOCK_BYTES
    max_line_bytes: int = MAX_LINE_BYTES


class InputSlice:
    """The lines of a file from `start` to `end`: offsets in bytes, of parquet the numbers of row groups; None is the end.

    `num_lines` is the number of lines, rows or samples that were read, once all are. Those of a slice of text that begins within its
    file are counted from its own beginning (`counts_from_start`), and `lines_before` says how many come before.
    """

    def __init__(self, file: InputFile, options: ReadOptions, *, start: int = 0, end: int | None = None) -> None:
        self.file, self._options = file, options
        self._start, self._end = start, end
        self.num_lines = 0

    @property
    def counts_from_start(self) -> bool:
        return self._start > 0 and self.file.format != "parquet"

    def lines_before(self) -> int:
        return lines_before(self.file.open, self._byte_range()[0]) if self.counts_from_start else 0

    def blocks(self, max_lines: int | None = None) -> Iterator[LineBlock]:
        """Yields the blocks, with at most `max_lines` lines or rows in all; raises if the file has changed meanwhile."""
        yield from self._lines(max_lines) if self.file.format == "jsonl" else self._rows(max_lines)
        self.file.check_unchanged()

    def _byte_range(self) -> tuple[int, int | None]:
        """Moves the offsets to where a document begins. The end is the size that the file had at first: somebody may append to it."""
        if not self._start and self._end is None:
            return 0, self.file.size
        with self.file.open() as opened:
            ends = [
                None if offset is None else line_start(opened, offset, after_blank_line=self.file.format == "text")
                for offset in (self._start, self._end)
            ]
        return ends[0] or 0, self.file.size if ends[1] is None else ends[1]

    def _lines(self, max_lines: int | None) -> Iterator[LineBlock]:
        start, end = self._byte_range()
        blocks = read_line_blocks(
            self.file.path,
            max_lines=max_lines,
            block_bytes=self._options.block_bytes,
            max_line_bytes=self._options.max_line_bytes,
            start=start,
            end=end,
            open_file=self.file.open,
            skip_long=True,
        )
        for block in blocks:
            if block.first_line == 1 and not start:
                self._check_format(block.data)
            yield block
            self.num_lines = block.first_line - 1 + block.num_lines + len(block.refused)

    def _check_format(self, data: bytes) -> None:
        actual = format_of_head(data[:FORMAT_HEAD_BYTES])
        if actual is not None:
            raise DataError(f"{self.file.path} is not JSON lines: read it with --input-format {actual}.")

    def _rows(self, max_lines: int | None) -> Iterator[LineBlock]:
        documents = self._text_documents() if self.file.format in TEXT_FORMATS else None
        yield from blocks_of_rows(
            self.file.path,
            self._file_rows() if documents is None else documents,
            block_bytes=self._options.block_bytes,
            max_line_bytes=self._options.max_line_bytes,
            max_lines=max_lines,
        )
        self.num_lines = 0 if documents is None else documents.num_lines

    def _text_documents(self) -> TextDocuments:
        start, end = self._byte_range()
        return TextDocuments(
            self.file.path,
            key=self._options.keys[0],
            whole_file=self.file.format == "text-file",
            max_document_bytes=self._options.max_line_bytes,
            start=start,
            end=end,
            open_file=self.file.open,
        )

    def _file_rows(self) -> Iterator[SourceRow | RefusedRow]:
        options = self._options
        match self.file.format:
            case "parquet":
                columns = AskedColumns(options.keys, options.id_key, all_columns=options.all_keys)
                return parquet_rows(self.file, columns, first_group=self._start, end_group=self._end)
            case "arrow":
                columns = AskedColumns(options.keys, options.id_key, all_columns=options.all_keys)
                return arrow_rows(self.file, columns)
            case "csv":
                return csv_rows(
                    self.file,
                    options.keys,
                    extra=options.id_key,
                    all_columns=options.all_keys,
                    max_line_bytes=options.max_line_bytes,
                )
            case _:
                return tar_samples(
                    self.file, options.keys, id_key=options.id_key, max_line_bytes=options.max_line_bytes
                )
