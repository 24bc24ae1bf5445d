"""The shingles of the documents that may be duplicates, for their true similarity: a pass of its own, and a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from petatron.data.curate.dedup.document_sketches import DocumentLines
from petatron.data.curate.dedup.signature_files import RecordFile
from petatron.data.curate.files.document_blocks import parse_block, read_blocks
from petatron.data.curate.files.pass_progress import OnProgress, PassProgress
from petatron.data.curate.files.step_files import StepFiles
from petatron.data.curate.files.worker_pool import WorkerPool
from petatron.data.curate.word_hashes import NgramHashes, word_ngrams
from petatron.data.inputs.input_file import changed_error
from petatron.data.inputs.line_blocks import LineBlock


class CandidateShingles:
    """Distinct shingles, 8 bytes each, in a file; in memory 16 bytes for each candidate."""

    def __init__(self, file: RecordFile, candidates: NDArray[np.int64]) -> None:
        """`candidates` are the documents that will be appended, in order."""
        self._file, self._candidates = file, candidates
        self._ends = np.zeros(len(candidates) + 1, np.int64)
        self._filled = 0

    def append(self, shingles: NgramHashes) -> None:
        count = len(shingles.counts)
        before = self._ends[self._filled]
        self._ends[self._filled + 1 : self._filled + 1 + count] = before + np.cumsum(shingles.counts)
        self._filled += count
        self._file.append(shingles.hashes)

    def jaccard(self, first: int, second: int) -> float:
        """Returns the share of the shingles of two candidates that both have."""
        places = np.searchsorted(self._candidates, (first, second)).tolist()
        shingles = self._file.records()[:, 0]
        one_side, other_side = (shingles[self._ends[place] : self._ends[place + 1]] for place in places)
        common = len(np.intersect1d(one_side, other_side, assume_unique=True))
        return common / (len(one_side) + len(other_side) - common)


@contextmanager
def candidate_shingles(
    path: Path,
    files: StepFiles,
    pool: WorkerPool,
    lines: DocumentLines,
    is_candidate: NDArray[np.bool_],
    ngram: int,
    on_progress: OnProgress | None,
) -> Iterator[CandidateShingles]:
    """Reads the inputs once more, and yields the shingles of candidates in a file that is removed at the end."""
    file = RecordFile(path, np.uint64, 1)
    try:
        shingles = CandidateShingles(file, np.flatnonzero(is_candidate))
        progress = PassProgress(files, "compared", on_progress)
        shingle = partial(_shingle_block, files.json_key, ngram)
        blocks = _masked_blocks(files, lines, is_candidate)
        for masked, grams in pool.ordered_results(shingle, blocks):
            shingles.append(grams)
            progress.add_block(masked.index, masked.block, masked.block.num_lines)
        yield shingles
    finally:
        file.close()
        path.unlink()


@dataclass(frozen=True, slots=True)
class _MaskedBlock:
    """A block of the input with this index, and which of its documents are candidates."""

    index: int
    block: LineBlock
    mask: NDArray[np.bool_]


def _masked_blocks(files: StepFiles, lines: DocumentLines, is_candidate: NDArray[np.bool_]) -> Iterator[_MaskedBlock]:
    document = 0
    for index, block in read_blocks(files):
        start = block.first_line - 1
        count = int(np.count_nonzero(lines.is_document[index][start : start + block.num_lines]))
        yield _MaskedBlock(index, block, is_candidate[document : document + count])
        document += count


def _shingle_block(json_key: str, ngram: int, masked: _MaskedBlock) -> NgramHashes:
    """Returns the distinct shingles of the candidates of a block, sorted."""
    if not masked.mask.any():
        return NgramHashes(np.zeros(0, np.uint64), np.zeros(0, np.int64))
    documents = parse_block(masked.block, json_key).documents
    if len(documents) != len(masked.mask):
        raise changed_error(masked.block.path)
    texts = [documents[place].text for place in np.flatnonzero(masked.mask)]
    grams = word_ngrams(texts, ngram, keep_short=True)
    distinct = [np.unique(part) for part in np.split(grams.hashes, grams.starts[1:])]
    return NgramHashes(np.concatenate(distinct), np.array([len(part) for part in distinct]))
