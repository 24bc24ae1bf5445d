"""Documents of plain text: paragraphs, which end at a blank line, or the whole file.

Nothing of the text changes but blank lines between paragraphs, and blank space at the ends of a document.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from petatron.data.inputs.line_blocks import Opener, RefusedLine, read_line_blocks
from petatron.data.inputs.row_blocks import RefusedRow, SourceRow


class TextDocuments:
    """Iterates over the documents of a text file, or of a range of it; `num_lines` is how many lines were read."""

    def __init__(
        self,
        path: str | Path,
        *,
        key: str,
        whole_file: bool,
        max_document_bytes: int,
        start: int = 0,
        end: int | None = None,
        open_file: Opener | None = None,
    ) -> None:
        self._path, self._key, self._whole_file, self._max_bytes = str(path), key, whole_file, max_document_bytes
        self._start, self._end, self._open_file = start, end, open_file
        self.num_lines = 0

    def __iter__(self) -> Iterator[SourceRow | RefusedRow]:
        document = _Document(self._key, self._max_bytes, self._whole_file)
        blocks = read_line_blocks(
            self._path,
            max_line_bytes=self._max_bytes,
            start=self._start,
            end=self._end,
            open_file=self._open_file,
            skip_long=True,
        )
        position = 0
        for block in blocks:
            position = block.file_position
            for refused in block.refused:
                self.num_lines = refused.line
                if row := document.overflow(refused.line, position):
                    yield row
            if not block.data:
                continue
            for number, line in enumerate(block.data.removesuffix(b"\n").split(b"\n"), block.first_line):
                self.num_lines = number
                if line.isspace() or not line:
                    if not self._whole_file and (row := document.take(position)):
                        yield row
                    if not document.lines:
                        continue
                if row := document.add(number, line, position):
                    yield row
        if row := document.take(position):
            yield row


class _Document:
    """Collects the lines of one document. Of one that is too long, only that is said."""

    def __init__(self, key: str, max_bytes: int, whole_file: bool) -> None:
        self._key, self._max_bytes = key, max_bytes
        self._too_long = f"the document is longer than {max_bytes:,} bytes"
        if whole_file:
            self._too_long += " (is every paragraph a document? Then --input-format text)"
        self._dropped = False
        self._first = self._size = 0
        self.lines: list[bytes] = []

    def add(self, number: int, line: bytes, position: int) -> RefusedRow | None:
        if self._dropped:
            return None
        self._first = self._first if self.lines else number
        self.lines.append(line)
        self._size += len(line) + 1
        return self.overflow(self._first, position) if self._size > self._max_bytes else None

    def overflow(self, line: int, position: int) -> RefusedRow | None:
        """Drops the document, and refuses it when it is the first time."""
        first = self._first if self.lines else line
        self.lines, self._size = [], 0
        if self._dropped:
            return None
        self._dropped = True
        return RefusedRow(RefusedLine(first, self._too_long, "too long"), position)

    def take(self, position: int) -> SourceRow | RefusedRow | None:
        """Ends the document and returns it, if there is one."""
        lines, first, self._dropped = self.lines, self._first, False
        self.lines, self._size = [], 0
        if not lines:
            return None
        content = b"\n".join(lines)
        try:
            return SourceRow(first, {self._key: content.decode().strip()}, position)
        except UnicodeDecodeError as error:
            line = first + content[: error.start].count(b"\n")
            return RefusedRow(
                RefusedLine(line, f"not UTF-8 text ({error.reason}): convert the file to UTF-8"), position
            )
