"""Opens the folder of a run: its metrics, settings, checkpoints, state, and the numbers that sum it up.

Folders may come from others. Only regular files are read, links inside a folder are not followed, and no path that a file
names is opened.
"""

from __future__ import annotations

import math
import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from petatron.base.errors import RunFolderError
from petatron.base.format_text import count_with_noun
from petatron.base.terminal_escape import printable
from petatron.checkpoint.files.step_list import STEP_FOLDER_NAME, list_steps
from petatron.config.layout_and_precision_text import layout_text
from petatron.history.metrics_file import METRICS_FILE, RunMetrics, read_metrics
from petatron.history.run_settings import CONFIG_FILE, RunSettings, read_settings
from petatron.history.run_state import RunState, is_locked, run_state

MAX_LABEL_CHARS = 60
_MAX_DEPTH = 8


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A complete checkpoint: its step, the bytes of its files, and when its manifest was written."""

    step: int
    num_bytes: int
    time_s: float


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """Everything that is known of a run. `notes` tell what could not be read."""

    folder: Path
    label: str
    metrics: RunMetrics
    settings: RunSettings
    checkpoints: tuple[SavedStep, ...]
    state: RunState
    state_reason: str
    changed_s: float
    notes: tuple[str, ...]

    @property
    def layout(self) -> str:
        return layout_text(self.settings.section("parallel")) if self.settings.values else "unknown"


def open_runs(folders: Sequence[Path]) -> list[RecordedRun]:
    """Opens runs, each with a label that no other has; one error names all folders that are none."""
    runs: list[RecordedRun] = []
    problems: list[str] = []
    for folder, label in zip(folders, _labels(folders)):
        try:
            runs.append(open_run(folder, label=label))
        except RunFolderError as error:
            problems.append(str(error))
    if problems:
        raise RunFolderError("\n".join(problems))
    return runs


def open_run(folder: Path, *, label: str | None = None, every_point: bool = True) -> RecordedRun:
    """Opens the folder that `--save` or `--log-dir` named."""
    path = folder / METRICS_FILE
    try:
        metrics = read_metrics(path, every_point=every_point)
        changed_s = os.stat(path, follow_symlinks=False).st_mtime
    except OSError as error:
        raise RunFolderError(_why_no_run(folder, error)) from error
    notes = list(_record_notes(metrics))
    settings = RunSettings()
    try:
        settings = read_settings(folder / CONFIG_FILE, metrics.start_metadata("origins"))
        notes += [f"{CONFIG_FILE}: {problem}" for problem in settings.problems[:5]]
    except (OSError, ValueError) as error:
        notes.append(f"{CONFIG_FILE} cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8 text'}")
    state, reason = run_state(metrics, locked=is_locked(folder), now_s=time.time())
    steps = tuple(_saved_steps(folder))
    name = label or printable(folder.resolve().name, max_chars=MAX_LABEL_CHARS)
    return RecordedRun(folder, name, metrics, settings, steps, state, reason, changed_s, tuple(notes))


def _why_no_run(folder: Path, error: OSError) -> str:
    name = printable(str(folder))
    if not folder.exists():
        return f"{name} does not exist. Give the folder that --save or --log-dir named."
    if not folder.is_dir():
        return f"{name} is a file. Give the folder of a run, which holds a {METRICS_FILE}."
    if isinstance(error, FileNotFoundError):
        return (
            f"{name} is not the folder of a run: it holds no {METRICS_FILE}. Give the folder that --save or --log-dir named; "
            f"`petatron runs {name}` lists the runs below it."
        )
    reason = (error.strerror or str(error)).removeprefix("it ")
    return f"{name}/{METRICS_FILE} cannot be read: {reason}. Put the file itself there."


def _record_notes(metrics: RunMetrics) -> Iterator[str]:
    if metrics.damaged_lines:
        yield f"{METRICS_FILE}: {count_with_noun(metrics.damaged_lines, 'line')} could not be read and were skipped"
    if metrics.superseded:
        yield (
            f"{METRICS_FILE}: {count_with_noun(metrics.superseded, 'log point')} of an earlier start were trained again; "
            "the later record counts"
        )
    for kind, count in metrics.other_kinds.items():
        yield f"{METRICS_FILE}: {count_with_noun(count, 'record')} of the kind {printable(kind, max_chars=40)!r} not shown"


def _saved_steps(folder: Path) -> Iterator[SavedStep]:
    for step, path in list_steps(folder).items():
        sizes = [(entry.st_size, entry.st_mtime) for entry in _regular_files(path, depth=0)]
        yield SavedStep(step, sum(size for size, _ in sizes), max((changed for _, changed in sizes), default=math.nan))


def _regular_files(folder: Path, *, depth: int) -> Iterator[os.stat_result]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        status = entry.stat(follow_symlinks=False)
        if stat.S_ISREG(status.st_mode):
            yield status
        elif stat.S_ISDIR(status.st_mode) and depth < _MAX_DEPTH:
            yield from _regular_files(Path(entry.path), depth=depth + 1)


def find_run_folders(root: Path) -> list[Path]:
    """Returns all folders with metrics below a folder, itself included; links and steps are not entered."""
    if not root.is_dir():
        what = "is a file" if root.exists() else "does not exist"
        raise RunFolderError(f"{printable(str(root))} {what}. Give a folder with runs in it.")
    run_folders: list[Path] = []
    for place, folders, files in os.walk(root):
        if METRICS_FILE in files:
            run_folders.append(Path(place))
        depth = len(Path(place).relative_to(root).parts)
        inside = sorted(folders) if depth < _MAX_DEPTH else ()
        folders[:] = [name for name in inside if not name.startswith(".") and not STEP_FOLDER_NAME.fullmatch(name)]
    return run_folders


def _labels(folders: Iterable[Path]) -> list[str]:
    """Returns the shortest ends of the paths that tell the runs apart."""
    paths = [folder.resolve() for folder in folders]
    length, names = 1, [path.name or str(path) for path in paths]
    while len(set(names)) < len(set(paths)):
        length += 1
        names = [str(Path(*path.parts[-length:])) for path in paths]
    seen: dict[str, int] = {}
    labels: list[str] = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        label = name if seen[name] == 1 else f"{name} ({seen[name]})"
        labels.append(printable(label, max_chars=MAX_LABEL_CHARS))
    return labels
