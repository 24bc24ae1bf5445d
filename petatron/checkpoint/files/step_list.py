"""Lists the steps in a run's folder, finds the newest (which the file `latest` names), and resolves the one to load.

No digest covers `latest`, and it may be lost or changed on its own. Whoever asks for the newest
step is told so, and never gets another one unnoticed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from petatron.base.errors import CheckpointError
from petatron.base.log import get_logger
from petatron.base.terminal_escape import printable
from petatron.base.untrusted_files import not_a_file_reason, read_limited_bytes

MANIFEST_FILE = "manifest.json"
LATEST_FILE = "latest"
MODEL_FOLDER, STATE_FOLDER = "model", "state"
STEP_FOLDER_NAME = re.compile(r"step-([0-9]{8,18})(\.tmp|\.replaced|\.pruned)?")
_MAX_NAME_BYTES = 4096
_MAX_SHOWN_CHARS = 60
_OTHER_STEP = "take another step"
_log = get_logger(__name__)


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def list_steps(folder: Path) -> dict[int, Path]:
    """Returns every complete checkpoint of a folder, oldest first."""
    steps: dict[int, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():  # in this order a step precedes its .replaced
        match = STEP_FOLDER_NAME.fullmatch(path.name)
        if match and match.group(2) in (None, ".replaced") and (path / MANIFEST_FILE).is_file():
            steps.setdefault(int(match.group(1)), path)
    return dict(sorted(steps.items()))


def latest_step(folder: Path) -> int | None:
    """Returns the step that `latest` names if it exists, else the highest one."""
    named, problem = read_latest(folder)
    return max(list_steps(folder), default=None) if named is None or problem is not None else named


def read_latest(folder: Path) -> tuple[int | None, str | None]:
    """Returns the step that `latest` names, and why it cannot be taken, as a predicate of the file; twice None without the file.

    A save makes the file after the first step, so a crash may leave a step without it.
    """
    path = folder / LATEST_FILE
    if not os.path.lexists(path):
        return None, None
    if (reason := not_a_file_reason(path)) is not None:
        return None, reason
    try:
        text = read_limited_bytes(path, _MAX_NAME_BYTES).decode().strip()
    except OSError as error:
        return None, f"cannot be read: {error.strerror or error}"
    except UnicodeDecodeError:
        return None, "is not text"
    match = STEP_FOLDER_NAME.fullmatch(text)
    if match is None or match.group(2) is not None:
        return None, f"has '{printable(text, max_chars=_MAX_SHOWN_CHARS)}' where the name of a step should be"
    step = int(match.group(1))
    return step, None if step in list_steps(folder) else f"names {text}, which is not there or has no {MANIFEST_FILE}"


def warn_of_unusable_latest(folder: Path) -> None:
    """Tells which step is taken where `latest` does not say it."""
    _, problem = read_latest(folder)
    if problem is not None:
        text = "%s %s. Taking step %s, the newest there is; the next save writes the file anew."
        _log.warning(text, folder / LATEST_FILE, problem, latest_step(folder))


def check_steps_not_lost(folder: Path) -> None:
    """Raises where `latest` is there and no step: a run has lost its checkpoints, and must not start anew unnoticed."""
    _, problem = read_latest(folder)
    if problem is not None and not list_steps(folder):
        path = folder / LATEST_FILE
        raise CheckpointError(
            f"{path} {problem}, and {folder} holds no complete step. Restore the steps from a copy, or remove {path} to start from the "
            "beginning."
        )


def containing_step(path: Path) -> Path | None:
    """Returns the step that a folder is, or whose `model/` it is.

    Without the step's `state/`, which has the digests, its `model/` is a Hugging Face model folder like any other.
    """
    if (path / MANIFEST_FILE).is_file():
        return path
    resolved = path.resolve()
    has_step = (resolved.parent / MANIFEST_FILE).is_file() and (resolved.parent / STATE_FOLDER).is_dir()
    return resolved.parent if resolved.name == MODEL_FOLDER and has_step else None


def resolve_step(folder: Path, step: int | None, *, warn: bool = True) -> Path:
    """Returns the folder of a step (None: the newest); a folder that is itself a step, or the model of one, resolves to that step.

    Raises `DamagedCheckpointError` if `latest` names one that is not complete; warns, if asked to, if it names none at all.
    """
    containing = containing_step(folder)
    if containing is not None:
        if step is not None and containing.name != step_name(step):
            raise CheckpointError(
                f"{containing} is one step, and not step {step}. Leave the step out, or give the folder above."
            )
        return containing
    steps = list_steps(folder)
    if step is None:
        check_steps_not_lost(folder)
        named, problem = read_latest(folder)
        if named is not None and problem is not None:
            raise DamagedCheckpointError(
                f"{folder / LATEST_FILE} {problem}. Restore it from a copy{_other_steps(steps)}."
            )
        if warn:
            warn_of_unusable_latest(folder)
    wanted = latest_step(folder) if step is None else step
    if wanted is None:
        raise CheckpointError(f"{folder} holds no checkpoint. Give --load a folder that --save wrote to.")
    if wanted not in steps:
        have = ", ".join(map(str, steps)) or "none"
        raise CheckpointError(f"{folder} has no checkpoint of step {wanted}; it has: {have}. Choose one of these.")
    return steps[wanted]


def previous_step(folder: Path, source: Path | None) -> int | None:
    """Returns the newest step older than that of a checkpoint's folder; the newest of all for None."""
    steps = list_steps(folder)
    number = next((step for step, path in steps.items() if path == source), None)
    return max((step for step in steps if source is None or (number is not None and step < number)), default=None)


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is not what was saved."""


@contextmanager
def naming_step_flag(flag: str) -> Iterator[None]:
    """Adds, to an error about damage, the flag by which the running command takes another step; without one it takes the step's folder."""
    try:
        yield
    except DamagedCheckpointError as error:
        advice = f"{_OTHER_STEP} ("
        raise DamagedCheckpointError(str(error).replace(advice, f"{_OTHER_STEP} with {flag} (")) from error


def _other_steps(steps: Mapping[int, Path]) -> str:
    """Returns what else there is to take, with the folder of one: not every command has a flag for a step."""
    if not steps:
        return ": there is no other step"
    return f", or {_OTHER_STEP} (there are: {', '.join(map(str, steps))}; the newest of them is {steps[max(steps)]})"


def damaged_error(path: Path, why: str) -> DamagedCheckpointError:
    """The error for a file of a checkpoint that is not what was saved."""
    here = next((parent for parent in path.parents if STEP_FOLDER_NAME.fullmatch(parent.name)), path.parent)
    others = {step: folder for step, folder in list_steps(here.parent).items() if folder != here}
    return DamagedCheckpointError(f"{path} {why}. Restore it from a copy{_other_steps(others)}.")
