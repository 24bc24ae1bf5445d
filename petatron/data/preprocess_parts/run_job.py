"""Runs a job part by part: goes on with what is finished, tokenizes the rest by some engine, joins all and leaves no folder behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from petatron.base.errors import DataError
from petatron.base.format_text import abbreviate_names
from petatron.base.log import get_logger
from petatron.data.inputs.input_file import InputFile
from petatron.data.preprocess_parts.input_cuts import Cut, cut_inputs
from petatron.data.preprocess_parts.join_parts import join_parts
from petatron.data.preprocess_parts.part_report import PartReport
from petatron.data.preprocess_parts.part_writer import WriteOptions
from petatron.data.preprocess_parts.parts_folder import PartsFolder, TokenizingJob

Engine = Callable[[TokenizingJob, Sequence[int]], Iterator[PartReport]]
"""Tokenizes parts and returns their reports in any order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """What is to be done. part_bytes: None for a job that is one part."""

    output_prefix: str
    files: tuple[InputFile, ...]
    settings: Mapping[str, Any]
    part_bytes: int | None
    write: WriteOptions
    overwrite: bool


@dataclass(frozen=True, slots=True)
class JobResult:
    """The reports of all parts in order, and which parts an earlier run has done."""

    reports: tuple[PartReport, ...]
    resumed: frozenset[int]


def begin_job(request: JobRequest) -> TokenizingJob:
    """Cuts the inputs into parts, and makes their folder; returns the job that is there if it has begun."""
    folder = PartsFolder(request.output_prefix)
    with folder.locked():
        return _stored_or_new(request, folder)


def open_job(request: JobRequest) -> tuple[PartsFolder, TokenizingJob]:
    """Returns the folder of a job that has begun, and the job with its parts."""
    folder = PartsFolder(request.output_prefix)
    job = folder.stored_job(TokenizingJob(request.files, request.settings, ()), overwrite=False)
    if job is None:
        raise DataError(f"{folder.path} has no job. Begin it with the same command and --engine slurm.")
    return folder, job


def _stored_or_new(request: JobRequest, folder: PartsFolder) -> TokenizingJob:
    job = TokenizingJob(request.files, request.settings, ())
    if (stored := folder.stored_job(job, overwrite=request.overwrite)) is not None:
        return stored
    cuts = (Cut(0, 0, 0),) if request.part_bytes is None else cut_inputs(request.files, request.part_bytes)
    job = replace(job, cuts=cuts)
    folder.write_job(job)
    return job


def finished_parts(request: JobRequest, folder: PartsFolder, job: TokenizingJob) -> dict[int, PartReport]:
    return folder.finished(job, skips=request.write.skips, max_line_bytes=request.write.max_line_bytes)


def check_finished(request: JobRequest) -> None:
    """Raises unless every part of a job that has begun is finished; changes nothing, as parts may be in progress."""
    folder, job = open_job(request)
    finished = finished_parts(request, folder, job)
    missing = [str(part) for part in range(job.num_parts) if part not in finished]
    if missing:
        raise DataError(
            f"{len(missing):,} of {job.num_parts:,} parts in {folder.path} are not finished: {abbreviate_names(missing)}. "
            "Run them with --part; if they have failed, their logs say why."
        )


def run_job(request: JobRequest, engine: Engine, check: Callable[[Sequence[PartReport]], None]) -> JobResult:
    """Does the job; `check` raises where the parts together are no dataset."""
    folder = PartsFolder(request.output_prefix)
    with folder.locked():
        job = _stored_or_new(request, folder)
        folder.clear_abandoned()
        reports = finished_parts(request, folder, job)
        resumed = frozenset(reports)
        unfinished = [part for part in range(job.num_parts) if part not in resumed]
        folder.forget_reports(unfinished)
        if resumed and unfinished:
            get_logger(__name__).info(
                "%s: %d of %d parts are finished already, and the rest is done",
                folder.path,
                len(resumed),
                job.num_parts,
            )
        with _keeping_finished(folder, request, job):
            for report in engine(job, unfinished):
                reports[report.part] = report
            in_order = tuple(reports[part] for part in range(job.num_parts))
            _check_joined(folder, in_order, check)
            join_parts(folder, job, in_order, request.write)
        folder.remove()
    return JobResult(in_order, resumed)


def _check_joined(
    folder: PartsFolder, reports: Sequence[PartReport], check: Callable[[Sequence[PartReport]], None]
) -> None:
    try:
        check(reports)
    except DataError:
        folder.forget_job()  # its parts are of no use
        raise


@contextmanager
def _keeping_finished(folder: PartsFolder, request: JobRequest, job: TokenizingJob) -> Iterator[None]:
    """Keeps the folder of a job that ends early if some part is finished, and says so."""
    try:
        yield
    except BaseException as error:
        count = len(finished_parts(request, folder, job)) if folder.has_job else 0
        if not count:
            folder.remove()
        elif isinstance(error, DataError):
            kept = f"{folder.path} keeps the parts that are finished ({count:,} of {job.num_parts:,})"
            raise DataError(f"{error} {kept}: run the command again to continue there.") from error
        raise
