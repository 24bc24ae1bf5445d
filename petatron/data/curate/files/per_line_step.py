"""Runs a curation step that judges every document independently: one pass, blocks judged in workers, results written in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from petatron.base.safe_files import write_atomic
from petatron.data.curate.files.document_blocks import ParsedBlock, joined_lines, read_blocks
from petatron.data.curate.files.output_folder import OutputFiles, output_folder
from petatron.data.curate.files.pass_progress import OnProgress, PassProgress
from petatron.data.curate.files.step_files import StepFiles
from petatron.data.curate.files.step_summary import BLANK, StepSummary
from petatron.data.curate.files.worker_pool import WorkerPool
from petatron.data.inputs.curation_output_folder import DROPPED_FOLDER, SUMMARY_FILE
from petatron.data.inputs.line_blocks import LineBlock, RefusedLine


@dataclass(slots=True)
class JudgedBlock:
    """What becomes of the lines of a block: those of each part of the output, and the others by reason."""

    num_lines: int
    malformed: tuple[RefusedLine, ...] = ()
    lines: dict[str, list[bytes]] = field(default_factory=dict)
    """By the part of the output; every part but `SAVED` has lines that are kept."""
    dropped: Counter[str] = field(default_factory=Counter)
    tallies: dict[str, Counter[str]] = field(default_factory=dict)
    """What else is counted, for the summary."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """For the report of the step; the file is added to them."""

    @classmethod
    def of(cls, parsed: ParsedBlock) -> JudgedBlock:
        return cls(parsed.num_lines, parsed.malformed, dropped=Counter({BLANK: parsed.num_blank}))

    def keep(self, line: bytes, part: str = "") -> None:
        self.lines.setdefault(part, []).append(line)

    def drop(self, reason: str, saved: bytes | None = None) -> None:
        """Counts a dropped line; `saved` is what is written of it beside the others."""
        self.dropped[reason] += 1
        if saved is not None:
            self.lines.setdefault(SAVED, []).append(saved)

    def tally(self, name: str, key: str, number: int = 1) -> None:
        self.tallies.setdefault(name, Counter())[key] += number


SAVED = DROPPED_FOLDER
"""The part of an output with the lines that the rest does not have."""

Judge = Callable[[LineBlock], JudgedBlock]


@dataclass(frozen=True, slots=True)
class IndexedJudge:
    """Judges a block that comes with the index of its input; what is sent to workers."""

    judge: Judge

    def __call__(self, indexed: tuple[int, LineBlock]) -> JudgedBlock:
        return self.judge(indexed[1])


def run_line_step(
    files: StepFiles,
    summary: StepSummary,
    judge: Judge,
    *,
    parts: Sequence[str] = ("",),
    judge_again: Callable[[JudgedBlock], JudgedBlock] | None = None,
    on_rows: Callable[[Iterable[dict[str, Any]]], None] | None = None,
    on_progress: OnProgress | None = None,
) -> None:
    """Judges all lines and publishes the output; `judge_again` judges what was kept in this process, for a model that is here."""
    progress = PassProgress(files, "read", on_progress)
    summary.inputs |= {file.path: 0 for file in files.sources}
    with output_folder(Path(files.output), overwrite=files.overwrite) as folder:
        with WorkerPool(files.workers) as pool, OutputFiles(folder, files, parts) as output:
            for (index, block), result in pool.ordered_results(IndexedJudge(judge), read_blocks(files)):
                result = result if judge_again is None else judge_again(result)
                _count(summary, files, block, result)
                for part, lines in result.lines.items():
                    output.write(index, joined_lines(lines), part)
                if on_rows is not None:
                    on_rows({"file": block.path, **row} for row in result.rows)
                progress.add_block(index, block, result.num_lines)
        summary.check()
        write_atomic(folder / SUMMARY_FILE, summary.file_content())


def _count(summary: StepSummary, files: StepFiles, block: LineBlock, result: JudgedBlock) -> None:
    summary.inputs[block.path] += result.num_lines
    for refused in result.malformed:
        summary.count_malformed(block.path, refused, files.on_error)
    for reason, count in result.dropped.items():
        summary.count_dropped(reason, count)
    for part, lines in result.lines.items():
        if part != SAVED:
            summary.count_kept(part, len(lines))
    for name, counts in result.tallies.items():
        total = Counter(summary.details.get(name, {})) + counts
        summary.details[name] = dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))
