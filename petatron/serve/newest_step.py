"""The newest step of a run that is sound: what a server that follows a training run loads next."""

from __future__ import annotations

from pathlib import Path

from petatron.base.log import get_logger
from petatron.checkpoint.files.step_list import list_steps
from petatron.checkpoint.inspect.inspect_checkpoint import verify_checkpoint

_log = get_logger(__name__)


def newest_sound_step(folder: Path, *, after: int, rejected: set[int]) -> tuple[int, Path] | None:
    """Returns the newest step after one whose files are what was saved; None if there is none.

    Damaged steps are reported once and added to `rejected`.
    """
    for step, path in sorted(list_steps(folder).items(), reverse=True):
        if step <= after or step in rejected:
            continue
        report = verify_checkpoint(path)
        if report.is_valid:
            return step, path
        rejected.add(step)
        _log.warning("step %d of %s is not served: %s", step, folder, report.findings[0].text)
    return None
