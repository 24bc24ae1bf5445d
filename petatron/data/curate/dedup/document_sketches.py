"""The first pass of deduplication: a hash of every text, and its signature; which line is a document."""

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
from petatron.data.inputs.line_blocks import LineBlock

_DOCUMENT, _BLANK, _MALFORMED = range(3)


@dataclass(frozen=True, slots=True)
class DocumentLines:
    """Which lines of each input are documents, a byte for each line, and which documents have words."""

    is_document: tuple[NDArray[np.bool_], ...]
    has_words: NDArray[np.bool_]

    @property
    def starts(self) -> NDArray[np.int64]:
        """The number of the first document of each input, then that of all documents."""
        return np.cumsum([0, *(int(lines.sum()) for lines in self.is_document)])

    @property
    def num_documents(self) -> int:
        return len(self.has_words)

    def numbers(self) -> NDArray[np.int64]:
        """Returns the line of every document in its input."""
        return np.concatenate([np.zeros(0, np.int64), *(np.flatnonzero(lines) + 1 for lines in self.is_document)])


@dataclass(frozen=True, slots=True)
class _BlockSketch:
    codes: NDArray[np.uint8]
    exact: Hashes
    signatures: NDArray[np.unsignedinteger] | None
    has_words: NDArray[np.bool_]
    malformed: tuple[tuple[int, str], ...]


def read_sketches(
    files: StepFiles,
    pool: WorkerPool,
    near: MinHashOptions | None,
    sketches: SignatureFiles,
    summary: StepSummary,
    on_progress: OnProgress | None,
) -> DocumentLines:
    """Appends the hashes of all documents to `sketches`, and counts the lines that are none."""
    is_document: list[list[NDArray[np.bool_]]] = [[np.zeros(0, bool)] for _ in files.inputs]
    has_words: list[NDArray[np.bool_]] = [np.zeros(0, bool)]
    progress = PassProgress(files, "hashed", on_progress)
    sketch = partial(_sketch_block, files.json_key, near)
    for (index, block), result in pool.ordered_results(sketch, read_blocks(files)):
        for line, reason in result.malformed:
            summary.count_malformed(block.path, line, reason, files.on_error)
        summary.count_dropped(BLANK, int(np.count_nonzero(result.codes == _BLANK)))
        sketches.append(result.exact, result.signatures)
        is_document[index].append(result.codes == _DOCUMENT)
        has_words.append(result.has_words)
        progress.add_block(index, block, len(result.codes))
    lines = DocumentLines(tuple(map(np.concatenate, is_document)), np.concatenate(has_words))
    summary.inputs |= {path: len(of_file) for path, of_file in zip(files.inputs, lines.is_document)}
    return lines


def _sketch_block(json_key: str, near: MinHashOptions | None, indexed: tuple[int, LineBlock]) -> _BlockSketch:
    _, block = indexed
    parsed = parse_block(block, json_key)
    codes = np.full(parsed.num_lines, _DOCUMENT, np.uint8)
    codes[[line - block.first_line for line in parsed.blank]] = _BLANK
    codes[[line - block.first_line for line, _ in parsed.malformed]] = _MALFORMED
    texts = [document.text for document in parsed.documents]
    hashes = b"".join(
        hashlib.blake2b(same_text_key(text).encode("utf-8", "surrogatepass"), digest_size=16).digest() for text in texts
    )
    exact = np.frombuffer(hashes, np.uint64).reshape(-1, 2)
    if near is None:
        return _BlockSketch(codes, exact, None, np.zeros(len(texts), bool), parsed.malformed)
    shingles = word_ngrams(texts, near.ngram, keep_short=True)
    return _BlockSketch(codes, exact, signatures(shingles, near), shingles.counts > 0, parsed.malformed)
