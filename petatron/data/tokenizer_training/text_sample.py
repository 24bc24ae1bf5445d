"""A sample of the texts of files: from the beginning of each, in proportion to its size, with some documents held out.

The sample is a pure function of the files: a document is held out by a digest of its text, so that copies of it are on the same side.
Texts are streamed; only held-out ones, of which there are a few megabytes, stay in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from petatron.base.errors import DataError
from petatron.data.inputs.expand_inputs import expand_inputs
from petatron.data.inputs.input_file import InputFile
from petatron.data.inputs.input_formats import InputFormat
from petatron.data.inputs.input_slice import InputSlice, ReadOptions
from petatron.data.inputs.json_record import parse_record, text_value
from petatron.data.inputs.line_blocks import MAX_LINE_BYTES

HELD_OUT_EVERY = 50
MAX_HELD_OUT_BYTES = 1 << 23


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOptions:
    """Which files, which texts of them, and how many bytes of text at most."""

    inputs: tuple[str, ...]
    input_format: InputFormat = "auto"
    json_keys: tuple[str, ...] = ("text",)
    sample_bytes: int
    on_error: Literal["fail", "skip"] = "fail"
    max_line_bytes: int = MAX_LINE_BYTES


@dataclass(slots=True)
class TextSample:
    """The texts of a sample: iterate to train, then read what was held out. Bytes are those of the text in UTF-8."""

    options: SampleOptions
    held_out: list[str] = field(default_factory=list)
    documents: int = 0
    num_bytes: int = 0
    malformed: int = 0
    from_training: bool = False
    """Whether there were so few texts that none was held out, so that `held_out` has the first ones of training."""

    def __iter__(self) -> Iterator[str]:
        named = expand_inputs(self.options.inputs, self.options.input_format)
        files = list({file.path: file for file in named}.values())  # each once
        total = sum(file.size or 0 for file in files)
        first: list[str] = []
        first_bytes = held_bytes = 0
        for file in files:
            # A server may not say how large a file is; then each has an equal share.
            share = 1 / len(files) if any(other.size is None for other in files) else (file.size or 0) / max(total, 1)
            budget = int(self.options.sample_bytes * share)
            for text in self._texts(file):
                num_bytes = len(text.encode())
                self.documents, self.num_bytes = self.documents + 1, self.num_bytes + num_bytes
                if _is_held_out(text) and held_bytes < MAX_HELD_OUT_BYTES:
                    held_bytes += num_bytes
                    self.held_out.append(text)
                else:
                    if first_bytes < MAX_HELD_OUT_BYTES // 8:
                        first_bytes += num_bytes
                        first.append(text)
                    yield text
                budget -= num_bytes
                if budget <= 0:
                    break
        if not self.documents:
            raise DataError(f"No text in {', '.join(file.path for file in files)}. Check the input and --json-keys.")
        if not self.held_out:
            self.held_out, self.from_training = first, True

    def _texts(self, file: InputFile) -> Iterator[str]:
        """Yields the texts of a file that are not blank."""
        read_options = ReadOptions(self.options.json_keys, max_line_bytes=self.options.max_line_bytes)
        for block in InputSlice(file, read_options).blocks():
            for refused in block.refused:
                self._leave_out(file.path, refused.line, refused.reason)
            for number, line in enumerate(block.data.split(b"\n"), block.first_line):
                if not line or line.isspace():
                    continue
                try:
                    texts = _texts_of_line(line, self.options.json_keys)
                except (ValueError, RecursionError) as error:
                    (source_line,) = block.source_lines(np.array([number]))
                    self._leave_out(file.path, int(source_line), str(error))
                    continue
                yield from filter(str.strip, texts)

    def _leave_out(self, file: str, line: int, reason: str) -> None:
        if self.options.on_error == "fail":
            fix = "Correct the line, or skip and count such lines with --on-error skip."
            raise DataError(f"{file}:{line}: {reason}. {fix}")
        self.malformed += 1


def _texts_of_line(line: bytes, keys: tuple[str, ...]) -> list[str]:
    """Returns the texts of a line of JSON; ValueError if it has none, or one with half a surrogate."""
    record = parse_record(line)
    values = [text_value(record, key) for key in keys]
    texts = [text for value in values for text in ([value] if isinstance(value, str) else value)]
    "".join(texts).encode()
    return texts


def _is_held_out(text: str) -> bool:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_EVERY == 0
