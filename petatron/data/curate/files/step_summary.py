"""The summary of a curation step: counts that account for every line that was read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from petatron.base.version import __version__
from petatron.data.curate.files.document_blocks import MAX_SHOWN_PROBLEMS, malformed_error
from petatron.data.curate.files.step_files import OnError
from petatron.data.inputs.line_blocks import RefusedLine

BLANK = "blank"


@dataclass(slots=True)
class StepSummary:
    """Counts of lines: those kept, by the part of the output that has them, and those dropped, by reason.

    >>> summary = StepSummary("filter", {})
    >>> summary.count_kept("", 2)
    >>> summary.count_dropped("blank", 1)
    >>> summary.lines, summary.num_kept, summary.as_json()["dropped"]
    (3, 2, {'blank': 1})
    """

    step: str
    settings: Mapping[str, Any]
    kept: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    """The first malformed lines."""
    inputs: dict[str, int] = field(default_factory=dict)
    """Lines of each input."""
    details: dict[str, Any] = field(default_factory=dict)
    """What only this step counts."""

    @property
    def num_kept(self) -> int:
        return self.kept.total()

    @property
    def lines(self) -> int:
        return self.num_kept + self.dropped.total()

    def count_kept(self, part: str, number: int) -> None:
        self.kept[part] += number

    def count_dropped(self, reason: str, number: int) -> None:
        if number:
            self.dropped[reason] += number

    def count_malformed(self, path: str, refused: RefusedLine, on_error: OnError) -> None:
        """Counts a line that is malformed, or too long; `DataError` where such a line ends the step."""
        if on_error == "fail":
            raise malformed_error(path, refused)
        self.dropped[refused.kind] += 1
        if len(self.problems) < MAX_SHOWN_PROBLEMS:
            self.problems.append(f"{path}:{refused.line}: {refused.reason}")

    def check(self) -> None:
        """Asserts that every line is accounted for."""
        read = sum(self.inputs.values())
        assert read == self.lines, (self.step, read, self.lines)

    def as_json(self) -> dict[str, Any]:
        parts = {part: count for part, count in sorted(self.kept.items()) if part}
        return {
            "petatron": __version__,
            "step": self.step,
            "settings": dict(self.settings),
            "inputs": self.inputs,
            "lines": self.lines,
            "kept": self.num_kept,
            **({"parts": parts} if parts else {}),
            "dropped": dict(sorted(self.dropped.items(), key=lambda item: (-item[1], item[0]))),
            **self.details,
            "problems": self.problems,
        }

    def file_content(self) -> str:
        return json.dumps(self.as_json(), indent=1) + "\n"
