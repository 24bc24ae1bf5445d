"""Drops, or marks, documents that share an n-gram of words with evaluation texts.

Words are compared without case and punctuation. The n-grams of the evaluation files are hashed once and mapped by every worker; a
document's are looked up among them. Matches are reported with both places.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from petatron.base.errors import DataError
from petatron.base.safe_files import open_atomic
from petatron.data.curate.contamination.evaluation_ngrams import read_evaluation_ngrams
from petatron.data.curate.files.document_blocks import parse_block, with_key
from petatron.data.curate.files.pass_progress import OnProgress
from petatron.data.curate.files.per_line_step import JudgedBlock, run_line_step
from petatron.data.curate.files.step_files import StepFiles, check_step_files
from petatron.data.curate.files.step_summary import StepSummary
from petatron.data.curate.normalize_text import word_bytes
from petatron.data.curate.word_hashes import Hashes, word_ngrams
from petatron.data.inputs.expand_inputs import expand_inputs
from petatron.data.inputs.input_file import InputFile
from petatron.data.inputs.line_blocks import LineBlock

NGRAM = 13
CONTAMINATED = "contaminated"
MARK_KEY = "contamination"
MAX_REPORTED = 20
"""Evaluation texts named for one document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecontaminateOptions:
    """against: evaluation files. mark: keep such documents, with a key that names the matches."""

    against: tuple[str, ...]
    ngram: int = NGRAM
    mark: bool = False
    report: str | None = None
    """JSON lines of the matches."""


def decontaminate_documents(
    files: StepFiles, options: DecontaminateOptions, on_progress: OnProgress | None = None
) -> StepSummary:
    """Writes documents without matches, or all of them with marks, and the summary."""
    files, against = _check_options(files, options)
    ngrams = read_evaluation_ngrams(against, options.ngram)
    options = replace(options, against=ngrams.files)
    settings: dict[str, Any] = {"against": options.against, "ngram": options.ngram, "mark": options.mark}
    summary = StepSummary("decontaminate", settings)
    summary.details["evaluation"] = {
        "texts": ngrams.num_texts,
        f"texts of fewer than {options.ngram} words": ngrams.num_short,
        "ngrams": len(ngrams.hashes),
    }
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="petatron-ngrams-"))
        ngrams.save(Path(folder))
        on_rows = None if options.report is None else stack.enter_context(_Report(Path(options.report))).write
        judge = partial(_judge_block, folder, options, files.json_key)
        run_line_step(files, summary, judge, on_rows=on_rows, on_progress=on_progress)
    return summary


class _Report:
    """The file of matches, which has its name when the step is done."""

    def __init__(self, path: Path) -> None:
        self._path, self._stack = path, ExitStack()

    def __enter__(self) -> _Report:
        try:
            self._file = self._stack.enter_context(open_atomic(self._path))
        except OSError as error:
            raise DataError(f"--report {self._path} cannot be written: {error.strerror or error}.") from error
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        for row in rows:
            self._file.write(json.dumps(row).encode() + b"\n")


def _check_options(files: StepFiles, options: DecontaminateOptions) -> tuple[StepFiles, list[InputFile]]:
    files = check_step_files(files, step="decontaminate")
    against: list[InputFile] = []
    problems: list[str] = []
    try:
        against = expand_inputs(options.against, "auto")
    except DataError as error:
        problems.append(f"--against: {str(error).removesuffix('.')}")
    if not 1 <= options.ngram <= 1024:
        problems.append(f"--ngram {options.ngram} is not from 1 to 1024")
    if problems:
        raise DataError(f"Cannot decontaminate: {'; '.join(problems)}.")
    return files, against


@lru_cache(maxsize=1)
def _ngrams(folder: str) -> tuple[Hashes, NDArray[np.int64]]:
    """Returns the sorted hashes and their places; a worker maps them with its first block."""
    hashes, places = (np.load(f"{folder}/{name}.npy", "r", allow_pickle=False) for name in ("hashes", "places"))
    return hashes, places


def _judge_block(folder: str, options: DecontaminateOptions, json_key: str, block: LineBlock) -> JudgedBlock:
    known, places = _ngrams(folder)
    parsed = parse_block(block, json_key)
    result = JudgedBlock.of(parsed)
    grams = word_ngrams([document.text for document in parsed.documents], options.ngram, keep_short=False)
    at = np.minimum(np.searchsorted(known, grams.hashes), len(known) - 1)
    matching = np.flatnonzero(known[at] == grams.hashes)
    bounds = np.searchsorted(matching, np.append(grams.starts, len(grams.hashes)))
    for index, document in enumerate(parsed.documents):
        of_document = matching[bounds[index] : bounds[index + 1]]
        if not len(of_document):
            result.keep(document.raw)
            continue
        first = int(of_document[0] - grams.starts[index])
        matches = _matches(options, places[at[of_document]])
        shared = _ngram_text(document.text, first, options.ngram)
        result.rows += [{"line": document.line, **match, "ngram": shared} for match in matches[:1]]
        result.rows += [{"line": document.line, **match} for match in matches[1:]]
        for path in dict.fromkeys(match["against"]["file"] for match in matches):
            result.tally("documents_by_evaluation_file", path)
        if options.mark:
            result.tally("marked", CONTAMINATED)
            result.keep(
                with_key(document, MARK_KEY, [{**match["against"], "ngrams": match["ngrams"]} for match in matches])
            )
        else:
            result.drop(CONTAMINATED)
    return result


def _matches(options: DecontaminateOptions, places: NDArray[np.int64]) -> list[dict[str, Any]]:
    """Returns the evaluation texts that matched, the one of the first shared n-gram first, and how many n-grams are shared with it."""
    counts = Counter(map(tuple, places.tolist()))
    return [
        {"against": {"file": options.against[file], "line": line}, "ngrams": count}
        for (file, line), count in list(counts.items())[:MAX_REPORTED]
    ]


def _ngram_text(text: str, first: int, n: int) -> str:
    return b" ".join(word_bytes(text).split()[first : first + n]).decode("utf-8", "replace")
