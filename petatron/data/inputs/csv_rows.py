"""Rows of a CSV file, whose first line names the columns. Fields may be quoted, and then have line breaks and quotes ("").

A row is named by the line of the file that it begins on. The delimiter is a comma, or a tab in a file whose name ends in .tsv.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence

from petatron.base.errors import DataError
from petatron.base.format_text import abbreviate_names
from petatron.base.terminal_escape import printable
from petatron.data.inputs.input_file import InputFile
from petatron.data.inputs.input_formats import name_endings
from petatron.data.inputs.line_blocks import RefusedLine, read_line_blocks
from petatron.data.inputs.row_blocks import RefusedRow, SourceRow


class _RowTooLong(Exception):
    """A row has more bytes than a line may have."""


class _Lines:
    """Lines of text for the parser, which counts them and what the current row has taken of them."""

    def __init__(self, file: InputFile, max_line_bytes: int) -> None:
        self._blocks = read_line_blocks(
            file.path, open_file=file.open, end=file.size, max_line_bytes=max_line_bytes, skip_long=True
        )
        self._max_bytes = max_line_bytes
        self._pending: Iterator[bytes] = iter(())
        self.line = self.position = self._row_bytes = 0

    def begin_row(self) -> int:
        """Returns the line that the next row begins on."""
        self._row_bytes = 0
        return self.line + 1

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        while (line := next(self._pending, None)) is None:
            block = next(self._blocks)
            self.position = block.file_position
            self._pending = iter(_split_lines(block.data))
            if block.refused:
                self.line += 1
                raise _RowTooLong
        self.line += 1
        self._row_bytes += len(line)
        if self._row_bytes > self._max_bytes + 1:
            raise _RowTooLong
        # Bytes that are no text stay visible as surrogates, which no text has.
        return line.decode(errors="surrogateescape")


def _split_lines(data: bytes) -> list[bytes]:
    lines = data.split(b"\n")
    return [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def csv_rows(
    file: InputFile, keys: Sequence[str], *, extra: str | None, max_line_bytes: int, all_columns: bool = False
) -> Iterator[SourceRow | RefusedRow]:
    """Yields the rows with the columns `keys`, and `extra` where it is there; with `all_columns`, whatever the first line names."""
    lines = _Lines(file, max_line_bytes)
    # A limit of the whole process, which says less than the one of a row; nothing else of ours parses CSV.
    csv.field_size_limit(max(csv.field_size_limit(), max_line_bytes))
    delimiter = "\t" if name_endings(file.path)[0] == "tsv" else ","
    header = _header(file, lines, delimiter)
    if header is None:
        return
    columns = {name: place for place, name in enumerate(header)}
    if missing := [key for key in keys if key not in columns]:
        names = abbreviate_names([printable(name, max_chars=80) for name in header]) or "none"
        raise DataError(f"{file.path} has no column {missing[0]!r}. Its columns: {names}. Name them with --json-keys.")
    wanted = [*keys, *([extra] if extra in columns and extra not in keys else [])]
    if all_columns:
        wanted = header
        if not all(map(_is_utf8, header)):
            raise DataError(f"{file.path}:1: the names of the columns are not UTF-8 text. Convert the file to UTF-8.")
    while True:
        line = lines.begin_row()
        refusal = None
        try:
            # A new parser for each row: one that has raised an error is in the middle of a field.
            fields = next(csv.reader(lines, delimiter=delimiter, strict=True))
        except StopIteration:
            return
        except _RowTooLong:
            refusal = RefusedLine(
                line, f"the row is longer than {max_line_bytes:,} bytes (a quote without its end?)", "too long"
            )
        except csv.Error as error:
            refusal = RefusedLine(line, f"not CSV ({error})")
        else:
            if not fields:
                continue
            if len(fields) != len(header):
                refusal = RefusedLine(line, f"{len(fields)} fields, and the first line names {len(header)}")
            elif not all(_is_utf8(fields[columns[key]]) for key in wanted):
                refusal = RefusedLine(line, "not UTF-8 text")
            else:
                yield SourceRow(line, {key: fields[columns[key]] for key in wanted}, lines.position)
        if refusal is not None:
            yield RefusedRow(refusal, lines.position)


def _is_utf8(field: str) -> bool:
    try:
        field.encode()
    except UnicodeEncodeError:
        return False
    return True


def _header(file: InputFile, lines: _Lines, delimiter: str) -> list[str] | None:
    try:
        header = next(csv.reader(lines, delimiter=delimiter, strict=True), None)
    except (_RowTooLong, csv.Error) as error:
        raise DataError(
            f"{file.path}:1: the first line does not name columns ({error or 'it is too long'}). Is this a CSV file?"
        ) from error
    if header is not None and len(set(header)) < len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise DataError(f"{file.path}:1: the column {printable(twice, max_chars=80)!r} is there twice. Rename one.")
    return header
