"""The newest step of a run that is sound: what a server that follows a training run loads next."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from petatron.base.errors import CheckpointError
from petatron.base.log import get_logger
from petatron.base.untrusted_files import reading_untrusted
from petatron.checkpoint.files.step_folder import MANIFEST_FILE, damaged_error, read_manifest_head
from petatron.checkpoint.files.step_list import list_steps
from petatron.checkpoint.inspect.inspect_checkpoint import verify_checkpoint
from petatron.checkpoint.inspect.run_metadata_check import other_run_problems
from petatron.checkpoint.inspect.summarize_checkpoint import run_metadata

_log = get_logger(__name__)


def newest_sound_step(
    folder: Path, *, after: int, rejected: set[int], served_properties: Mapping[str, Any] | None = None
) -> tuple[int, Path] | None:
    """Returns the newest step after one whose files are what was saved, and whose manifest fits them; None if there is none.

    `served_properties` are those of the step that is served: a step of another model or run does not follow it. Steps that are refused are
    reported once and added to `rejected`.
    """
    for step, path in sorted(list_steps(folder).items(), reverse=True):
        if step <= after or step in rejected:
            continue
        problem = _problem(path, served_properties or {})
        if problem is None:
            return step, path
        rejected.add(step)
        _log.warning("step %d of %s is not served: %s", step, folder, problem)
    return None


def step_properties(folder: Path, step: int | None) -> Mapping[str, Any]:
    """Returns what a step's manifest says of its run; nothing where it cannot be read, or is gone."""
    path = list_steps(folder).get(step) if step is not None else None
    try:
        return {} if path is None else run_metadata(read_manifest_head(path))
    except CheckpointError:
        return {}


def _problem(path: Path, served_properties: Mapping[str, Any]) -> str | None:
    report = verify_checkpoint(path)
    if not report.is_valid:
        return report.findings[0].text
    try:
        properties = run_metadata(read_manifest_head(path))
        with reading_untrusted(path / MANIFEST_FILE, damaged_error):
            other_run = next(other_run_problems(properties, served_properties), None)
    except CheckpointError as error:
        return str(error)
    return None if other_run is None else f"{path / MANIFEST_FILE} {other_run}"
