"""The word n-grams of evaluation files, and the place of each.

A file is JSON lines, or rows of another format, of which every string is a text (also those in lists and objects: questions,
choices, answers), or plain text whose paragraphs are texts. A text of fewer words than n has no n-gram, so nothing can be found
of it; such texts are counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from petatron.base.errors import DataError
from petatron.base.safe_files import create_file
from petatron.data.curate.files.document_blocks import block_lines
from petatron.data.curate.word_hashes import Hashes, word_ngrams
from petatron.data.inputs.input_file import InputFile
from petatron.data.inputs.input_slice import InputSlice, ReadOptions
from petatron.data.inputs.line_blocks import read_line_blocks

_TEXTS_AT_ONCE = 1024
_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class EvaluationNgrams:
    """Sorted hashes, and for each the text where it occurs first, as its file and line."""

    files: tuple[str, ...]
    hashes: Hashes
    places: NDArray[np.int64]
    """[n-gram, 2]: index of the file, line."""
    num_texts: int
    num_short: int

    def save(self, folder: Path) -> None:
        """Writes the arrays, from which workers map them."""
        for name, array in (("hashes", self.hashes), ("places", self.places)):
            with create_file(folder / f"{name}.npy") as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


def read_evaluation_ngrams(files: Sequence[InputFile], n: int) -> EvaluationNgrams:
    """Reads evaluation files; `DataError` for one that is missing, malformed or has no text of n words."""
    hashes: list[Hashes] = []
    places: list[NDArray[np.int64]] = []
    num_texts = num_short = 0
    for index, file in enumerate(files):
        before = sum(map(len, hashes))
        for lines, texts in _batches(file):
            grams = word_ngrams(texts, n, keep_short=False)
            hashes.append(grams.hashes)
            in_lines = np.repeat(np.array(lines, np.int64), grams.counts)
            places.append(np.column_stack((np.full(len(in_lines), index), in_lines)))
            num_texts += len(texts)
            num_short += int(np.count_nonzero(grams.counts == 0))
        if sum(map(len, hashes)) == before:
            raise DataError(f"{file.path} has no text of {n} words or more, so nothing can match it. Lower --ngram.")
    distinct, first = np.unique(np.concatenate(hashes), return_index=True)
    paths = tuple(file.path for file in files)
    return EvaluationNgrams(paths, distinct, np.concatenate(places)[first], num_texts, num_short)


def _batches(file: InputFile) -> Iterator[tuple[list[int], list[str]]]:
    lines: list[int] = []
    texts: list[str] = []
    for line, text in _texts_of_lines(file) if file.format == "jsonl" else _texts_of_rows(file):
        lines.append(line)
        texts.append(text)
        if len(texts) == _TEXTS_AT_ONCE:
            yield lines, texts
            lines, texts = [], []
    if texts:
        yield lines, texts


def _texts_of_rows(file: InputFile) -> Iterator[tuple[int, str]]:
    """Yields the texts of a file that is made of rows, with their places."""
    keys = ("text",) if file.format == "webdataset" else ()
    for block in InputSlice(file, ReadOptions(keys, all_keys=True)).blocks():
        for refused in block.refused:
            raise DataError(f"{file.path}:{refused.line}: {refused.reason}. Correct the file.")
        numbers = block.source_lines(np.arange(block.first_line, block.first_line + block.num_lines))
        for number, line in zip(numbers.tolist(), block_lines(block)):
            yield from ((number, text) for text in _strings(json.loads(line)))


def _texts_of_lines(file: InputFile) -> Iterator[tuple[int, str]]:
    """Yields the texts of JSON lines, or of plain text, with their lines."""
    path = file.path
    is_json: bool | None = None
    paragraph: list[str] = []
    first = number = 0
    for block in read_line_blocks(path, open_file=file.open, end=file.size):
        for number, raw in enumerate(block.data.removesuffix(b"\n").split(b"\n"), block.first_line):
            try:
                line = raw.decode().strip()
            except UnicodeDecodeError as error:
                raise DataError(f"{path}:{number}: not UTF-8 text ({error.reason}). Convert the file.") from error
            if is_json is None and line:
                is_json = line.startswith(("{", '["', "[{"))
            if is_json and line:
                yield from ((number, text) for text in _strings(_record(path, number, line)))
            elif line:
                first = first if paragraph else number
                paragraph.append(line)
            elif paragraph:
                yield first, " ".join(paragraph)
                paragraph = []
    if paragraph:
        yield first, " ".join(paragraph)


def _record(path: str, line: int, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}:{line}: not JSON ({error}). An evaluation file is JSON lines, or plain text."
        ) from error


def _strings(value: Any, depth: int = 0) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif depth < _MAX_DEPTH and isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part, depth + 1)
