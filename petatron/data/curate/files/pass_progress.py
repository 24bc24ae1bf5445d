"""The progress of a curation step through its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from petatron.data.curate.files.step_files import StepFiles
from petatron.data.inputs.line_blocks import LineBlock


@dataclass(frozen=True, slots=True)
class StepProgress:
    """In bytes of the inputs on disk; `part` names the pass over them, and there is no total where a server does not say its sizes."""

    part: str
    lines: int
    bytes_read: int
    bytes_total: int | None


OnProgress = Callable[[StepProgress], None]


class PassProgress:
    """Reports one pass over the inputs, block by block."""

    def __init__(self, files: StepFiles, part: str, on_progress: OnProgress | None) -> None:
        self._part, self._on_progress = part, on_progress
        ends = list(accumulate((file.size or 0 for file in files.sources), initial=0))
        self._lines, self._starts = 0, ends[:-1]
        self._total = None if any(file.size is None for file in files.sources) else ends[-1]

    def add_block(self, index: int, block: LineBlock, num_lines: int) -> None:
        """Adds a block of the input with this index."""
        self._lines += num_lines
        if self._on_progress is not None:
            position = self._starts[index] + block.file_position
            self._on_progress(StepProgress(self._part, self._lines, position, self._total))
