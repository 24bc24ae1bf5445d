"""`PartReport`: the counts of a finished part of a job, and their sums over all parts. Every line that was read is in one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from petatron.base.untrusted_files import is_count

MAX_SHOWN_PROBLEMS = 5


@dataclass(slots=True)
class LineCounts:
    """lines: those read, each of which is a document, or blank, malformed, too long or without any text.

    documents: lines with a text that was written. empty: texts without tokens, over all keys; sequences and tokens are over all keys too.
    """

    lines: int = 0
    documents: int = 0
    without_text: int = 0
    blank: int = 0
    malformed: int = 0
    too_long: int = 0
    empty: int = 0
    sequences: int = 0
    tokens: int = 0

    def add(self, other: LineCounts) -> None:
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def skipped(self) -> int:
        return self.malformed + self.too_long


COUNTS = tuple(item.name for item in fields(LineCounts))


@dataclass(slots=True)
class PartReport:
    """The result of a part.

    key_tokens: tokens of each key. first_lines, last_lines: how many lines its first and its last file have in it, for the numbers of lines
    in the parts that follow. file_bytes: the size of every file that it has written, by the end of its name.
    """

    part: int
    job: str
    max_line_bytes: int
    counts: LineCounts = field(default_factory=LineCounts)
    key_tokens: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    first_lines: int = 0
    last_lines: int = 0
    file_bytes: dict[str, int] = field(default_factory=dict)

    def add_problem(self, problem: str) -> None:
        if len(self.problems) < MAX_SHOWN_PROBLEMS:
            self.problems.append(problem)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> PartReport:
        """Reads what `to_json` wrote; ValueError, KeyError or TypeError for anything else."""
        report = PartReport(values["part"], values["job"], values["max_line_bytes"])
        report.counts = LineCounts(**values["counts"])
        report.problems = [str(problem) for problem in values["problems"][:MAX_SHOWN_PROBLEMS]]
        report.key_tokens = list(values["key_tokens"])
        report.first_lines, report.last_lines = values["first_lines"], values["last_lines"]
        report.file_bytes = dict(values["file_bytes"])
        numbers = [report.part, report.max_line_bytes, report.first_lines, report.last_lines]
        numbers += [*(getattr(report.counts, name) for name in COUNTS), *report.key_tokens, *report.file_bytes.values()]
        if not all(is_count(number) for number in numbers) or not isinstance(report.job, str):
            raise ValueError("it has numbers that are no counts")
        return report

    def may_stand(self, *, skips: bool, max_line_bytes: int) -> bool:
        """Whether the part would be the same with these options: what is malformed ends the work or is skipped, and lines of a length."""
        if self.counts.skipped and not skips:
            return False
        same_limit = max_line_bytes == self.max_line_bytes
        return same_limit or (not self.counts.too_long and max_line_bytes > self.max_line_bytes)


def lines_before_parts(
    reports: Sequence[PartReport], begins_in_file: Sequence[bool], same_file: Sequence[bool]
) -> list[int]:
    """Returns how many lines of its first file come before each part.

    begins_in_file: whether a part begins within a file; same_file: whether it ends in the file that it begins in.
    """
    before, lines = [], 0
    for report, within, same in zip(reports, begins_in_file, same_file, strict=True):
        lines = lines if within else 0
        before.append(lines)
        lines = lines + report.first_lines if same else report.last_lines
    return before
