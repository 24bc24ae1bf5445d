"""The first pass of deduplication: computes a hash and a MinHash signature of every document."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from petatron.data.curate.dedup.min_hash import MinHashOptions, signatures
from petatron.data.curate.dedup.signature_files import SignatureFiles
from petatron.data.curate.files.document_blocks import parse_block, read_blocks
from petatron.data.curate.files.pass_progress import OnProgress, PassProgress
from petatron.data.curate.files.step_files import StepFiles
from petatron.data.curate.files.step_summary import BLANK, StepSummary
from petatron.data.curate.files.worker_pool import WorkerPool
from petatron.data.curate.normalize_text import same_text_key
from petatron.data.curate.word_hashes import Hashes, word_ngrams
from petatron.data.inputs.input_formats import TEXT_FORMATS
from petatron.data.inputs.line_blocks import LineBlock, RefusedLine

_UNCOUNTED_FORMATS = (*TEXT_FORMATS, "csv")
"""Formats of which a row may have several lines."""


@dataclass(frozen=True, slots=True)
class DocumentLines:
    """Which lines (rows, samples) of each input are documents, a byte for each line, and which documents have words.

    lines: of an input whose rows are not counted by lines, as in CSV, the line that each document begins on; 8 bytes for each.
    """

    is_document: tuple[NDArray[np.bool_], ...]
    has_words: NDArray[np.bool_]
    lines: tuple[NDArray[np.int64] | None, ...]

    @property
    def starts(self) -> NDArray[np.int64]:
        """The number of the first document of each input, then that of all documents."""
        return np.cumsum([0, *(int(lines.sum()) for lines in self.is_document)])

    @property
    def num_documents(self) -> int:
        return len(self.has_words)

    def numbers(self) -> NDArray[np.int64]:
        """Returns the line of every document in its input."""
        counted = (np.flatnonzero(is_document) + 1 for is_document in self.is_document)
        numbers = (places if lines is None else lines for places, lines in zip(counted, self.lines))
        return np.concatenate([np.zeros(0, np.int64), *numbers])


@dataclass(frozen=True, slots=True)
class _BlockSketch:
    is_document: NDArray[np.bool_]
    lines: NDArray[np.int64]
    exact: Hashes
    signatures: NDArray[np.unsignedinteger] | None
    has_words: NDArray[np.bool_]
    num_blank: int
    malformed: tuple[RefusedLine, ...]


def read_sketches(
    files: StepFiles,
    pool: WorkerPool,
    near: MinHashOptions | None,
    sketches: SignatureFiles,
    summary: StepSummary,
    on_progress: OnProgress | None,
) -> DocumentLines:
    """Appends the hashes of all documents to `sketches`, and counts the lines that are none."""
    is_document: list[list[NDArray[np.bool_]]] = [[np.zeros(0, bool)] for _ in files.sources]
    line_numbers: list[list[NDArray[np.int64]]] = [[np.zeros(0, np.int64)] for _ in files.sources]
    has_words: list[NDArray[np.bool_]] = [np.zeros(0, bool)]
    progress = PassProgress(files, "hashed", on_progress)
    sketch = partial(_sketch_block, files.json_key, near)
    for (index, block), result in pool.ordered_results(sketch, read_blocks(files)):
        for refused in result.malformed:
            summary.count_malformed(block.path, refused, files.on_error)
        summary.count_dropped(BLANK, result.num_blank)
        sketches.append(result.exact, result.signatures)
        is_document[index].append(result.is_document)
        if files.sources[index].format in _UNCOUNTED_FORMATS:
            line_numbers[index].append(result.lines)
        has_words.append(result.has_words)
        progress.add_block(index, block, len(result.is_document))
    uncounted = [file.format in _UNCOUNTED_FORMATS for file in files.sources]
    lines = DocumentLines(
        tuple(map(np.concatenate, is_document)),
        np.concatenate(has_words),
        tuple(np.concatenate(numbers) if kept else None for numbers, kept in zip(line_numbers, uncounted)),
    )
    summary.inputs |= {file.path: len(of_file) for file, of_file in zip(files.sources, lines.is_document)}
    return lines


def _sketch_block(json_key: str, near: MinHashOptions | None, indexed: tuple[int, LineBlock]) -> _BlockSketch:
    _, block = indexed
    parsed = parse_block(block, json_key)
    lines = np.array([document.line for document in parsed.documents], np.int64)
    texts = [document.text for document in parsed.documents]
    hashes = b"".join(
        hashlib.blake2b(same_text_key(text).encode("utf-8", "surrogatepass"), digest_size=16).digest() for text in texts
    )
    exact = np.frombuffer(hashes, np.uint64).reshape(-1, 2)
    signature, has_words = None, np.zeros(len(texts), bool)
    if near is not None:
        shingles = word_ngrams(texts, near.ngram, keep_short=True)
        signature, has_words = signatures(shingles, near), shingles.counts > 0
    return _BlockSketch(parsed.is_document, lines, exact, signature, has_words, parsed.num_blank, parsed.malformed)
