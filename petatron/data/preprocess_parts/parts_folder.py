"""The folder of a job beside its output, `<prefix>.parts`: what the job is, its finished parts, and what to do with those of another.

    job.json             inputs, settings and where the parts begin; written first
    00012_text_document.bin, .idx, .sources
    00012.json           the report of the part; written last, so that a part with a report is complete

Files have their names only when they are complete and on the disk. Whoever runs a part removes what an earlier attempt at it has left.
A job of the same inputs and settings continues with the parts of the folder, also if it would have cut them elsewhere.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from petatron.base.errors import DataError
from petatron.base.format_text import abbreviate_names
from petatron.base.log import get_logger
from petatron.base.safe_files import make_folder, remove_tree, reopen_file, tmp_path_for, write_atomic
from petatron.base.terminal_escape import printable
from petatron.base.untrusted_files import is_count, read_limited_json, reading_untrusted
from petatron.data.data_file_error import data_file_error
from petatron.data.index_cache import fingerprint
from petatron.data.inputs.input_file import InputFile
from petatron.data.preprocess_parts.input_cuts import Cut, SliceRange, part_slices
from petatron.data.preprocess_parts.part_report import PartReport

_FORMAT = 1
_JOB_FILE = "job.json"
_LOCK_FILE = ".lock"
_MAX_JOB_BYTES = 1 << 32
_MAX_REPORT_BYTES = 1 << 24
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class TokenizingJob:
    """What is tokenized and how. settings: what decides about the output besides the inputs, by the names of flags."""

    files: tuple[InputFile, ...]
    settings: Mapping[str, Any]
    cuts: tuple[Cut, ...]

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint({"inputs": self._inputs(), "settings": dict(self.settings)})

    @property
    def num_parts(self) -> int:
        return len(self.cuts)

    @cached_property
    def num_bytes(self) -> int:
        return sum(file.size or 0 for file in self.files)

    @cached_property
    def bytes_before(self) -> list[int]:
        """The bytes of all files before each."""
        before = [0]
        for file in self.files:
            before.append(before[-1] + (file.size or 0))
        return before

    def slices(self, part: int) -> list[SliceRange]:
        return list(part_slices(self.cuts, part, len(self.files)))

    def part_bytes(self, part: int) -> int:
        end = self.cuts[part + 1].position if part + 1 < self.num_parts else self.num_bytes
        return end - self.cuts[part].position

    def to_json(self) -> dict[str, Any]:
        cuts = [[cut.file, cut.offset, cut.position] for cut in self.cuts]
        return {"format": _FORMAT, "inputs": self._inputs(), "settings": dict(self.settings), "cuts": cuts}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> TokenizingJob:
        files = tuple(InputFile(path, form, size, version) for path, form, size, version in values["inputs"])
        cuts = tuple(Cut(*numbers) for numbers in values["cuts"])
        numbers = [number for cut in cuts for number in (cut.file, cut.offset, cut.position)]
        if values["format"] != _FORMAT or not cuts or not all(map(is_count, numbers)):
            raise ValueError("it is of another version")
        if not all(map(_is_input, files)) or any(cut.file >= len(files) for cut in cuts):
            raise ValueError("its inputs are no files")
        if cuts[0] != Cut(0, 0, 0) or any(left >= right for left, right in pairwise((c.file, c.offset) for c in cuts)):
            raise ValueError("its parts do not follow one another")
        if not isinstance(values["settings"], dict):
            raise ValueError("its settings have no names")
        return TokenizingJob(files, values["settings"], cuts)

    def difference(self, other: TokenizingJob) -> str | None:
        """Says what differs in another job; None if nothing does that decides about the output."""
        differences = [
            f"{name} was {_shown(other.settings.get(name))} and is {_shown(self.settings.get(name))}"
            for name in sorted({*self.settings, *other.settings})
            if self.settings.get(name) != other.settings.get(name)
        ]
        ours, theirs = ({file.path: file for file in job.files} for job in (self, other))
        differences += [
            f"{what} {abbreviate_names([printable(path) for path in paths])}"
            for what, paths in (
                ("new inputs:", [path for path in ours if path not in theirs]),
                ("inputs that are no longer named:", [path for path in theirs if path not in ours]),
                ("inputs that have changed:", [path for path in ours if path in theirs and ours[path] != theirs[path]]),
            )
            if paths
        ]
        if not differences and self.fingerprint != other.fingerprint:
            differences.append("the inputs have another order")
        return "; ".join(differences) or None

    def _inputs(self) -> list[list[Any]]:
        return [[file.path, file.format, file.size, file.version] for file in self.files]


def _is_input(file: InputFile) -> bool:
    names = (file.path, file.format, file.version)
    return all(isinstance(name, str) for name in names) and (file.size is None or is_count(file.size))


def _shown(value: object) -> str:
    return printable(json.dumps(value), max_chars=_SHOWN_CHARACTERS)


class PartsFolder:
    """The folder of the parts of one output prefix."""

    def __init__(self, output_prefix: str) -> None:
        self.path = Path(f"{output_prefix}.parts")
        self._prefix = output_prefix

    @property
    def has_job(self) -> bool:
        return (self.path / _JOB_FILE).is_file()

    def read_job(self) -> TokenizingJob:
        """Returns the job that the folder belongs to."""
        path = self.path / _JOB_FILE
        with reading_untrusted(path, data_file_error):
            return TokenizingJob.from_json(read_limited_json(path, _MAX_JOB_BYTES))

    def stored_job(self, job: TokenizingJob, *, overwrite: bool) -> TokenizingJob | None:
        """Returns this job with the parts as they are cut here; None where it has not begun.

        Another job's folder is an error, and with `overwrite` it is emptied.
        """
        if not self.has_job:
            return None
        stored = self.read_job()
        difference = job.difference(stored)
        if difference is None:
            return stored
        if not overwrite:
            raise DataError(
                f"{self.path} has parts of another job: {difference}. Give the command that began it, or another "
                "--output-prefix; with --overwrite these parts are removed."
            )
        self.forget_job()
        return None

    def write_job(self, job: TokenizingJob) -> None:
        content = json.dumps(job.to_json())
        with self._writing():
            write_atomic(self.path / _JOB_FILE, content)

    def forget_job(self) -> None:
        """Empties the folder."""
        (self.path / _JOB_FILE).unlink(missing_ok=True)
        for path in self.path.iterdir():
            if path.name != _LOCK_FILE:
                remove_tree(path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes on this machine out of the folder, which is made if needed, and removed if it is nobody's job then."""
        with self._writing():
            make_folder(self.path)
            strange = [path.name for path in self.path.iterdir() if not path.name.startswith(".")]
            if strange and not self.has_job:
                names = abbreviate_names([printable(name) for name in sorted(strange)])
                raise DataError(
                    f"{self.path} is where the parts go, and has other files: {names}. Move them elsewhere."
                )
            descriptor = reopen_file(self.path / _LOCK_FILE)
        with os.fdopen(descriptor, "r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataError(
                    f"Another process writes to {self.path}. Wait until it ends, or choose another --output-prefix."
                ) from None
            except OSError as error:
                get_logger(__name__).warning(
                    "%s cannot be locked (%s); make sure that nobody else writes there", self.path, error
                )
            try:
                yield
            finally:
                if self.path.exists() and not self.has_job:
                    remove_tree(self.path)

    def part_prefix(self, part: int, output: str) -> str:
        """Returns the prefix of a part's files of one output."""
        return str(self.path / f"{part:05d}{output.removeprefix(self._prefix)}")

    def write_report(self, report: PartReport, paths: Sequence[Path]) -> None:
        """Makes a part a finished one, whose files are complete and closed."""
        with self._writing():
            report.file_bytes = {path.name: path.stat().st_size for path in paths}
            _sync_folder(self.path)
            write_atomic(self._report_path(report.part), json.dumps(report.to_json()))

    def finished(self, job: TokenizingJob, *, skips: bool, max_line_bytes: int) -> dict[int, PartReport]:
        """Returns the reports of the parts that need not be done again."""
        reports = {}
        for part in range(job.num_parts):
            report = self._read_report(part, job)
            if report is not None and report.may_stand(skips=skips, max_line_bytes=max_line_bytes):
                reports[part] = report
        return reports

    def forget_reports(self, parts: Iterable[int]) -> None:
        """Makes parts unfinished before their files are replaced."""
        for part in parts:
            self._report_path(part).unlink(missing_ok=True)

    def clear_part(self, part: int) -> None:
        """Removes what an attempt at a part has left."""
        self._report_path(part).unlink(missing_ok=True)
        for pattern in (f"{part:05d}_*", f".{part:05d}_*.tmp"):
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)

    def clear_abandoned(self) -> None:
        """Removes files without a name of their own; only while nobody else works in the folder."""
        for path in self.path.glob(".*.tmp"):
            path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Removes all parts, and then the folder at once: a folder with a job is never one that is done."""
        for path in sorted(self.path.iterdir()):
            if path.name not in (_JOB_FILE, _LOCK_FILE):
                remove_tree(path)
        removed = tmp_path_for(self.path)
        self.path.rename(removed)
        remove_tree(removed)

    def _report_path(self, part: int) -> Path:
        return self.path / f"{part:05d}.json"

    def _read_report(self, part: int, job: TokenizingJob) -> PartReport | None:
        """A report that is damaged, or that its files do not fit, is none."""
        path = self._report_path(part)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            report = PartReport.from_json(read_limited_json(path, _MAX_REPORT_BYTES))
            sizes = {name: (self.path / Path(name).name).stat().st_size for name in report.file_bytes}
            if (report.part, report.job, report.file_bytes) == (part, job.fingerprint, sizes):
                return report
        return None

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"Cannot write to {self.path}: {error.strerror or error}. Choose an output prefix in a writable folder."
            ) from error


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
