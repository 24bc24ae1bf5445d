"""Checks the folders of a run: `--load` must contain what is requested, and `--save` must belong to this run alone."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from petatron.base.errors import CheckpointError
from petatron.base.log import get_logger
from petatron.base.model_folder_file_names import is_hf_folder
from petatron.base.safe_files import reopen_file
from petatron.checkpoint.files.digested_file_io import check_writable
from petatron.checkpoint.files.signature import open_signer
from petatron.checkpoint.files.step_list import LATEST_FILE, list_steps
from petatron.config import CheckpointConfig
from petatron.pretrained.atomic_model_folder import check_not_inside_step
from petatron.pretrained.detect_model_format import check_load_dir, refuse_unconverted

_log = get_logger(__name__)


def check_run_dirs(config: CheckpointConfig) -> None:
    """Raises for a missing checkpoint, and for a folder that contains another run's checkpoints.

    One command line may serve the first start and every restart: a folder that is both saved to and loaded from may be empty. A folder
    that is only loaded from may not.
    """
    if config.sign_key is not None:
        open_signer(Path(config.sign_key))  # a key that cannot be used is told before a folder is made
    continues = config.load is not None and config.save is not None and same_path(config.load, config.save)
    if config.load is not None:
        check_load_dir(Path(config.load), config, may_be_empty=continues)
    if config.pretrained_checkpoint is not None and not (config.load is not None and list_steps(Path(config.load))):
        refuse_unconverted(Path(config.pretrained_checkpoint))
    if config.save is not None:
        check_not_inside_step(Path(config.save), f"--save {config.save}")
        if is_hf_folder(Path(config.save)):
            raise CheckpointError(
                f"--save {config.save} is the folder of a model. Give checkpoints a folder of their own."
            )
        latest = Path(config.save) / LATEST_FILE
        if latest.is_dir() and not latest.is_symlink():
            raise CheckpointError(f"{latest} is a folder, and a save names its step in a file there. Move it away.")
        check_writable(config.save)
        steps = list_steps(Path(config.save))
        if steps and not (continues and not config.finetune):
            raise CheckpointError(_occupied_save_text(config, newest=max(steps), continues=continues))


def _occupied_save_text(config: CheckpointConfig, *, newest: int, continues: bool) -> str:
    """Says which run the checkpoints in `--save` belong to, and what of this run's flags does not continue it."""
    text = f"--save {config.save} already holds checkpoints (the newest of step {newest})"
    if continues:
        return (
            f"{text}, and --finetune starts a new run from their weights, at iteration 0: its checkpoints would be mixed with those of "
            "the run it starts from. Give --save another folder, or leave --finetune out to continue that run."
        )
    if config.pretrained_checkpoint is not None and config.load is None:
        return (
            f"{text}, and this run starts at iteration 0, from the weights of {config.pretrained_checkpoint}. Give --save another "
            f"folder, or continue the run there with --load {config.save}."
        )
    return f"{text}, and this run would start at another place. Continue it with --load {config.save}, or choose another folder."


def same_path(a: str, b: str) -> bool:
    return Path(a).resolve() == Path(b).resolve()


@contextmanager
def lock_save_dir(folder: str | None, *, rank: int) -> Iterator[None]:
    """Locks the save folder while the run lasts, so that two runs cannot overwrite each other."""
    if folder is None or rank != 0:
        yield
        return
    path = Path(folder) / ".lock"
    try:
        descriptor = reopen_file(path)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be opened, and nothing is written without that lock: {error.strerror or error}. Remove it, or make the "
            "folder writable."
        ) from error
    with os.fdopen(descriptor, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"Another run is writing to --save {folder}. Wait until it ends, or choose another folder."
            ) from None
        except OSError as error:
            _log.warning("--save %s cannot be locked (%s); make sure that no other run writes there", folder, error)
        yield
