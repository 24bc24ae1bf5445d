"""Rows of parquet and arrow files: row group by row group or batch by batch, and only the columns that are asked for.

Both come from others: what a file says of its own layout is checked before a row is made, by the library where it does and by
validating each batch of an arrow file, whose offsets the library believes otherwise.

A few hundred bytes may stand for gigabytes: a value that is stored once, in a dictionary, is there in every row. So rows become objects
of Python one at a time, and of parquet as many are read at once as fit into memory if each had the largest value that the dictionary
can have.
"""

from __future__ import annotations

import importlib
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from petatron.base.errors import DataError
from petatron.base.format_text import abbreviate_names
from petatron.base.terminal_escape import printable
from petatron.base.untrusted_files import reading_untrusted
from petatron.data.data_file_error import data_file_error
from petatron.data.inputs.arrow_memory_limit import check_block, check_stream_batch, file_blocks
from petatron.data.inputs.input_file import InputFile, seekable
from petatron.data.inputs.line_blocks import RefusedLine
from petatron.data.inputs.row_blocks import RefusedRow, SourceRow

_ROWS_PER_BATCH = 256
_BATCH_BYTES = 1 << 28
_BUFFER_BYTES = 1 << 20
_DICTIONARY_PAGE, _PAGE_HEADER_BYTES, _THRIFT_INT32 = 2, 32, 5
_STRINGS = ("string", "large_string", "string_view")
_ARROW_FILE_MAGIC = b"ARROW1"
_VALUE_ERRORS = (ValueError, OverflowError)
"""Bytes that are no text, and times that Python has no object for."""


@dataclass(frozen=True, slots=True)
class AskedColumns:
    """texts: columns that must be there, of text or lists of texts. extra: a column that is read where it is there, or `all_columns`."""

    texts: tuple[str, ...]
    extra: str | None = None
    all_columns: bool = False

    def of_schema(self, path: str, schema: Any) -> list[str]:
        """Returns the names to read; DataError if a text is missing or no text."""
        usable = [column.name for column in schema if _is_text(column.type)]
        missing = [name for name in self.texts if name not in usable]
        if missing:
            what = "is not text" if missing[0] in schema.names else "does not exist"
            names = abbreviate_names([printable(name, max_chars=80) for name in usable]) or "none"
            raise DataError(
                f"The column {missing[0]!r} {what} in {path}. Its text columns: {names}. Name them with --json-keys."
            )
        extra = [self.extra] if self.extra is not None and self.extra in schema.names else []
        names = schema.names if self.all_columns else list(dict.fromkeys((*self.texts, *extra)))
        counts = Counter(schema.names)
        if (twice := next((name for name in names if counts[name] > 1), None)) is not None:
            raise DataError(f"The column {printable(twice, max_chars=80)!r} is there twice in {path}. Rename one.")
        return names


def _is_text(column_type: Any) -> bool:
    inner = getattr(column_type, "value_type", column_type)
    return str(inner) in _STRINGS and str(column_type).startswith((*_STRINGS, "list<", "large_list<", "dictionary<"))


def row_groups(file: InputFile) -> list[tuple[int, int]]:
    """Returns the rows and bytes of each row group of a parquet file."""
    with _reading(file), file.open() as opened:
        metadata = _library("pyarrow.parquet", file.path).ParquetFile(seekable(opened, file.size)).metadata
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        return [(group.num_rows, group.total_byte_size) for group in groups]


def parquet_rows(
    file: InputFile, columns: AskedColumns, *, first_group: int = 0, end_group: int | None = None
) -> Iterator[SourceRow | RefusedRow]:
    """Yields the rows of some row groups, numbered from 1 over the whole file."""
    with _reading(file), file.open() as opened:
        parquet = _library("pyarrow.parquet", file.path)
        source = seekable(opened, file.size)
        table = parquet.ParquetFile(source, pre_buffer=False, buffer_size=_BUFFER_BYTES)
        names = columns.of_schema(file.path, table.schema_arrow)
        counts = [table.metadata.row_group(index).num_rows for index in range(table.num_row_groups)]
        row, total = sum(counts[:first_group]), max(sum(counts), 1)
        for group in range(first_group, len(counts) if end_group is None else end_group):
            # A column that is asked for by its name may be a field of another, and all need no names.
            chosen = None if columns.all_columns else names
            read = partial(table.iter_batches, row_groups=[group], columns=chosen, use_threads=False)
            # Metadata that the library would refuse end the process where it is asked for them, so it reads a row first.
            if next(read(1), None) is None:
                continue
            for batch in read(_rows_at_once(source, table, group, names)):
                yield from _batch_rows(batch, row, (file.size or 0) / total)
                row += batch.num_rows


def _rows_at_once(source: Any, table: Any, number: int, names: Sequence[str]) -> int:
    """Returns how many rows of a row group take at most _BATCH_BYTES if all values are as large as the dictionaries of their columns."""
    group, row_bytes = table.metadata.row_group(number), 0
    for index in range(group.num_columns):
        path = table.schema.column(index).path
        if path.partition(".")[0] in names or path in names:
            column = group.column(index)
            values_per_row = -(-column.num_values // max(group.num_rows, 1))
            row_bytes += _dictionary_bytes(source, column) * max(values_per_row, 1)
    return max(min(_ROWS_PER_BATCH, _BATCH_BYTES // max(row_bytes, 1)), 1)


def _dictionary_bytes(source: Any, column: Any) -> int:
    """Returns the size of the dictionary page of a column of a row group; 0 if its first page is none."""
    offsets = (column.dictionary_page_offset, column.data_page_offset)
    source.seek(min(offset for offset in offsets if offset is not None))
    fields = _first_fields(source.read(_PAGE_HEADER_BYTES))
    if fields is None:
        return _BATCH_BYTES
    kind, size = fields
    return size if kind == _DICTIONARY_PAGE else 0


def _first_fields(header: bytes) -> tuple[int, int] | None:
    """Returns type and uncompressed size of a page; None where the header begins with other fields than writers begin it with.

    >>> _first_fields(bytes([0x15, 4, 0x15, 0x90, 3])), _first_fields(bytes([0x25, 4]))
    ((2, 200), None)
    """
    values: list[int] = []
    place = 0
    for _ in range(2):
        if header[place : place + 1] != bytes(
            (1 << 4 | _THRIFT_INT32,)
        ):  # the field after the one before, of this type
            return None
        place, value, shift = place + 1, 0, 0
        while place < len(header):
            byte = header[place]
            value |= (byte & 0x7F) << shift
            place, shift = place + 1, shift + 7
            if not byte & 0x80:
                break
        values.append(value >> 1)  # zigzag
    return values[0], values[1]


def arrow_rows(file: InputFile, columns: AskedColumns) -> Iterator[SourceRow | RefusedRow]:
    """Yields the rows of an arrow file, of either of its two layouts: with an index at its end, or as a stream."""
    with _reading(file), file.open() as opened:
        ipc = _library("pyarrow.ipc", file.path)
        source = seekable(opened, file.size)
        size = source.seek(0, io.SEEK_END) if file.size is None else file.size
        source.seek(0)
        is_file = source.read(len(_ARROW_FILE_MAGIC)) == _ARROW_FILE_MAGIC
        source.seek(0)
        schema = (ipc.open_file(source) if is_file else ipc.open_stream(source)).schema
        names = columns.of_schema(file.path, schema)
        wanted = ipc.IpcReadOptions(included_fields=[schema.get_field_index(name) for name in names], use_threads=False)
        source.seek(0)
        row = 0
        reader = ipc.open_file(source, options=wanted) if is_file else ipc.open_stream(source, options=wanted)
        for batch in _file_batches(reader, source, size) if is_file else _stream_batches(reader, source, size):
            batch.validate(full=True)
            share = source.tell() / batch.num_rows if batch.num_rows and not row else 0.0
            yield from _batch_rows(batch, row, share)
            row += batch.num_rows


def _file_batches(reader: Any, source: Any, size: int) -> Iterator[Any]:
    if not reader.num_record_batches:
        return
    dictionaries, batches = file_blocks(source, size)
    for block in dictionaries:  # which come with the first batch
        check_block(source, block, size)
    for number, block in zip(range(reader.num_record_batches), batches, strict=True):
        check_block(source, block, size)
        yield reader.get_batch(number)


def _stream_batches(reader: Any, source: Any, size: int) -> Iterator[Any]:
    while True:
        check_stream_batch(source, size)
        try:
            yield reader.read_next_batch()
        except StopIteration:
            return


def _batch_rows(batch: Any, before: int, bytes_per_row: float) -> Iterator[SourceRow | RefusedRow]:
    columns = {name: batch.column(name) for name in batch.schema.names}
    for place in range(batch.num_rows):
        row = before + place + 1
        position = int(row * bytes_per_row)
        record = {name: _value_or_error(values[place]) for name, values in columns.items()}
        error = next(((name, value) for name, value in record.items() if isinstance(value, Exception)), None)
        if error is None:
            yield SourceRow(row, record, position)
        else:
            yield RefusedRow(RefusedLine(row, _value_problem(*error)), position)


def _value_or_error(value: Any) -> Any:
    try:
        return value.as_py()
    except _VALUE_ERRORS as error:
        return error


def _value_problem(name: str, error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text ({error.reason})"
    said = printable(str(error).strip().partition("\n")[0], max_chars=120)
    return f"the value of the column {printable(name, max_chars=80)!r} cannot be read ({said})"


@contextmanager
def _reading(file: InputFile) -> Iterator[None]:
    with reading_untrusted(Path(file.path), lambda _, why: data_file_error(file.path, why)):
        yield


def _library(name: str, path: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(
            f"{path} is read with pyarrow, which is not installed: pip install 'petatron[data]'."
        ) from error
