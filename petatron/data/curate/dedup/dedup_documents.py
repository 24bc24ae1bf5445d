"""Drops documents that are there already: the same text, or nearly.

The first pass over the inputs hashes documents in workers; what it keeps of each is in files (`signature_files.py`). Then documents of
equal hash, and of equal bands, are connected to clusters (`duplicate_links.py`), and the last pass writes the first document of each
cluster. With `exact_jaccard` a pass between hashes the shingles of the candidates, and pairs are compared by these.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from petatron.base.errors import DataError
from petatron.base.safe_files import open_atomic, remove_tree, write_atomic
from petatron.data.curate.dedup.candidate_shingles import CandidateShingles, candidate_shingles
from petatron.data.curate.dedup.document_sketches import DocumentLines, read_sketches
from petatron.data.curate.dedup.duplicate_links import Documents, DuplicateLinks, Similarity, link_equal_keys
from petatron.data.curate.dedup.min_hash import MinHashOptions
from petatron.data.curate.dedup.signature_files import SignatureFiles, signature_files
from petatron.data.curate.files.document_blocks import block_lines, joined_lines, read_blocks
from petatron.data.curate.files.output_folder import OutputFiles, output_folder
from petatron.data.curate.files.pass_progress import OnProgress, PassProgress
from petatron.data.curate.files.step_files import StepFiles, check_step_files
from petatron.data.curate.files.step_summary import StepSummary
from petatron.data.curate.files.worker_pool import WorkerPool
from petatron.data.inputs.curation_output_folder import SUMMARY_FILE

EXACT, NEAR = "exact duplicate", "near duplicate"
MEMORY_BYTES = 1 << 30
_WORK_FOLDER = ".work"
_MAX_NUMBER = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DedupOptions:
    """near: also documents that share most of their shingles. exact_jaccard: compare the shingles, not their signatures."""

    near: MinHashOptions | None = None
    exact_jaccard: bool = False
    report_pairs: str | None = None
    """JSON lines of all pairs that were connected."""
    memory_bytes: int = MEMORY_BYTES
    """For sorting hashes; beside it are 10 bytes for each line."""


def dedup_documents(files: StepFiles, options: DedupOptions, on_progress: OnProgress | None = None) -> StepSummary:
    """Writes the first document of every cluster, its line unchanged, and the summary."""
    files = _check_options(files, options)
    summary = StepSummary("dedup", _settings(options))
    with output_folder(Path(files.output), overwrite=files.overwrite) as folder:
        work = folder / _WORK_FOLDER
        work.mkdir()
        with signature_files(work, options.near) as sketches, WorkerPool(files.workers) as pool:
            lines = read_sketches(files, pool, options.near, sketches, summary, on_progress)
            links = DuplicateLinks.of(lines.num_documents)
            _link_exact(links, sketches, options)
            is_exact = links.duplicates
            if options.near is not None:
                candidates = lines.has_words & ~is_exact
                _Near(files, pool, options, options.near, sketches, lines, work, on_progress).link(links, candidates)
        remove_tree(work)
        if options.report_pairs is not None:
            _write_pairs(Path(options.report_pairs), files, lines, links, is_exact)
        _write_kept(files, folder, lines, ~links.duplicates, on_progress)
        _count(summary, links, is_exact)
        write_atomic(folder / SUMMARY_FILE, summary.file_content())
    return summary


def _check_options(files: StepFiles, options: DedupOptions) -> StepFiles:
    files = check_step_files(files, step="deduplicate")
    problems: list[str] = []
    if near := options.near:
        for flag, number in (("--bands", near.bands), ("--rows", near.rows), ("--ngram", near.ngram)):
            if not 1 <= number <= _MAX_NUMBER:
                problems.append(f"{flag} {number} is not from 1 to {_MAX_NUMBER}")
        if not 0 < near.threshold <= 1:
            problems.append(f"--threshold {near.threshold:g} is not above 0 and at most 1")
    if problems:
        raise DataError(f"Cannot deduplicate: {'; '.join(problems)}.")
    return files


def _settings(options: DedupOptions) -> dict[str, Any]:
    if options.near is None:
        return {"near": False}
    chance = round(options.near.candidate_probability(options.near.threshold), 4)
    compared_by = "shingles" if options.exact_jaccard else "signatures"
    return {"near": True, **asdict(options.near), "compared_by": compared_by, "candidates_at_threshold": chance}


def _link_exact(links: DuplicateLinks, sketches: SignatureFiles, options: DedupOptions) -> None:
    link_equal_keys(
        links,
        sketches.exact_keys,
        sketches.exact_similarity,
        is_candidate=np.ones(len(links.labels), bool),
        memory_bytes=options.memory_bytes,
        keep_pairs=options.report_pairs is not None,
    )


@dataclass(frozen=True, slots=True)
class _Near:
    """Connects documents that share a band and are similar."""

    files: StepFiles
    pool: WorkerPool
    options: DedupOptions
    near: MinHashOptions
    sketches: SignatureFiles
    lines: DocumentLines
    work: Path
    on_progress: OnProgress | None

    def link(self, links: DuplicateLinks, candidates: NDArray[np.bool_]) -> None:
        keep_pairs = self.options.report_pairs is not None
        if not self.options.exact_jaccard:
            self._link_bands(links, candidates, self._by_signature, keep_pairs=keep_pairs)
            return
        similar = np.zeros(len(candidates), bool)
        self._link_bands(DuplicateLinks.of(len(similar)), candidates, partial(self._mark, similar), keep_pairs=False)
        path, ngram = self.work / "shingles", self.near.ngram
        with candidate_shingles(path, self.files, self.pool, self.lines, similar, ngram, self.on_progress) as shingles:
            self._link_bands(links, similar, partial(self._by_shingles, shingles), keep_pairs=keep_pairs)

    def _link_bands(
        self, links: DuplicateLinks, candidates: NDArray[np.bool_], similarity: Similarity, *, keep_pairs: bool
    ) -> None:
        for band in range(self.near.bands):
            link_equal_keys(
                links,
                partial(self.sketches.band_keys, band),
                similarity,
                is_candidate=candidates,
                memory_bytes=self.options.memory_bytes,
                keep_pairs=keep_pairs,
            )

    def _by_signature(self, first: Documents, second: Documents) -> NDArray[np.float64]:
        estimates = self.sketches.estimate(first, second, self.near)
        lowest = self.near.lowest_estimate(lenient=self.options.exact_jaccard)
        return np.where(estimates >= lowest, estimates, -1.0)

    def _mark(self, similar: NDArray[np.bool_], first: Documents, second: Documents) -> NDArray[np.float64]:
        """Marks the documents of pairs with similar signatures; connects none, so that a leader is compared with all."""
        is_similar = self._by_signature(first, second) >= 0
        similar[first[is_similar]] = similar[second[is_similar]] = True
        return np.full(len(first), -1.0)

    def _by_shingles(self, shingles: CandidateShingles, first: Documents, second: Documents) -> NDArray[np.float64]:
        similarities = self._by_signature(first, second)
        for index in np.flatnonzero(similarities >= 0).tolist():
            jaccard = shingles.jaccard(int(first[index]), int(second[index]))
            similarities[index] = jaccard if jaccard >= self.near.threshold else -1.0
        return similarities


def _write_kept(
    files: StepFiles,
    folder: Path,
    lines: DocumentLines,
    is_kept: NDArray[np.bool_],
    on_progress: OnProgress | None,
) -> None:
    """The last pass: copies the lines that stay."""
    progress = PassProgress(files, "written", on_progress)
    starts = lines.starts
    masks = [is_document.copy() for is_document in lines.is_document]
    for index, mask in enumerate(masks):
        mask[mask] = is_kept[starts[index] : starts[index + 1]]
    with OutputFiles(folder, files) as output:
        for index, block in read_blocks(files):
            content = block_lines(block)
            chosen = masks[index][block.first_line - 1 : block.first_line - 1 + len(content)]
            output.write(index, joined_lines([content[place] for place in np.flatnonzero(chosen)]))
            progress.add_block(index, block, len(content) + len(block.refused))


def _write_pairs(
    path: Path, files: StepFiles, lines: DocumentLines, links: DuplicateLinks, is_exact: NDArray[np.bool_]
) -> None:
    """Writes the pairs in the order of their later documents."""
    starts, numbers = lines.starts, lines.numbers()

    def place(document: int) -> dict[str, Any]:
        index = int(np.searchsorted(starts, document, side="right")) - 1
        return {"file": files.sources[index].path, "line": int(numbers[document])}

    first, second, similarity = (np.concatenate(parts) for parts in zip(*links.pairs)) if links.pairs else ([], [], [])
    try:
        with open_atomic(path) as file:
            for index in np.lexsort((first, second)).tolist():
                later = int(second[index])
                row = {
                    **place(later),
                    "duplicate_of": place(int(first[index])),
                    "kept": place(int(links.labels[later])),
                    "kind": "exact" if is_exact[later] else "near",
                    "similarity": round(float(similarity[index]), 4),
                }
                file.write(json.dumps(row).encode() + b"\n")
    except OSError as error:
        raise DataError(f"--report-pairs {path} cannot be written: {error.strerror or error}.") from error


def _count(summary: StepSummary, links: DuplicateLinks, is_exact: NDArray[np.bool_]) -> None:
    duplicates = links.duplicates
    summary.count_kept("", int(np.count_nonzero(~duplicates)))
    summary.count_dropped(EXACT, int(np.count_nonzero(is_exact)))
    summary.count_dropped(NEAR, int(np.count_nonzero(duplicates & ~is_exact)))
    sizes = np.bincount(links.labels)
    summary.details["clusters"] = int(np.count_nonzero(sizes > 1))
    summary.details["largest_cluster"] = int(sizes.max(initial=0))
    summary.details["uncompared"] = links.uncompared
    summary.check()
