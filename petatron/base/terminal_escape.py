"""Foreign text on a terminal: control characters are shown, never obeyed.

A key of a JSON file, the name of a tensor or of a file, and the text of a document are written by others, and a terminal interprets
some characters as commands: to set its title or answer back, to move the cursor and overwrite text, to write from right to left. So
escaping happens at the output and not where each message is made: all that a command prints goes through `EscapedStream`, and all
that is logged through `base/log.py`, which escape every control character but tabs and newlines. Code that draws on the terminal
(colors, a progress bar) uses the underlying stream with `raw_stream`, and escapes foreign text itself.

An escape is written as JSON, YAML and Python write it, so that printed JSON stays the same JSON. It is not escaped twice.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, cast

# C0 and C1 controls and DEL; the marks, embeddings, overrides and isolates of text direction; line and paragraph separators; the
# byte order mark; and surrogates, which encode non-text bytes of a file name and which no stream can encode.
_LINE_BREAKS = "\t\n"
_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff"
_IN_LINES, _IN_WORDS = re.compile(f"[{_CONTROLS}]"), re.compile(f"[{_CONTROLS}{_LINE_BREAKS}]")


def printable(text: str, *, max_chars: int | None = None) -> str:
    r"""Escapes foreign text inside a sentence, also tabs and newlines; at most `max_chars` characters are shown.

    >>> print(printable("a\x1b[2Jb\nc"), printable("\u202egnp.exe"), printable("long story", max_chars=4))
    a\u001b[2Jb\u000ac \u202egnp.exe long...
    """
    shown = text if max_chars is None or len(text) <= max_chars else f"{text[:max_chars]}..."
    return _IN_WORDS.sub(_escape, shown)


def printable_lines(text: str) -> str:
    r"""Escapes text of several lines, keeping newlines.

    >>> print(printable_lines("one\ntwo\x9b1m"))
    one
    two\u009b1m
    """
    return _IN_LINES.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


class EscapedStream:
    """A text stream that escapes control characters; otherwise the underlying stream."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(printable_lines(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def escaped_stream(stream: TextIO) -> TextIO:
    return stream if isinstance(stream, EscapedStream) else cast(TextIO, EscapedStream(stream))


def raw_stream(stream: TextIO) -> TextIO:
    """Returns the stream to draw on; foreign text written to it must be `printable`."""
    return stream.stream if isinstance(stream, EscapedStream) else stream


@contextlib.contextmanager
def escaped_output() -> Iterator[None]:
    """While entered, printed text is escaped."""
    with _replaced_streams(escaped_stream):
        yield


@contextlib.contextmanager
def raw_output() -> Iterator[None]:
    """While entered, printed text is not escaped: for a library that draws on the terminal itself."""
    with _replaced_streams(raw_stream):
        yield


@contextlib.contextmanager
def _replaced_streams(wrap: Any) -> Iterator[None]:
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(wrap, before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
