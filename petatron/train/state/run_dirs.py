"""Checks the folders of a run: `--load` must contain what is requested, and `--save` must belong to this run alone."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from petatron.base.errors import CheckpointError
from petatron.base.log import get_logger
from petatron.base.model_companion_files import CONFIG_FILE, is_hf_folder
from petatron.base.safe_files import reopen_file
from petatron.base.untrusted_files import not_a_file_reason
from petatron.checkpoint.convert.formats import check_not_inside_step, is_megatron_folder, reject_pickle_weights
from petatron.checkpoint.files.disk import check_writable
from petatron.checkpoint.files.signature import open_signer
from petatron.checkpoint.files.step_list import (
    LATEST_FILE,
    MANIFEST_FILE,
    check_steps_not_lost,
    containing_step,
    list_steps,
)
from petatron.config import CheckpointConfig

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
        refuse_unconverted(Path(config.pretrained_checkpoint), "--pretrained-checkpoint")
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
        found = list_steps(Path(config.save))
        if found and not (continues and not config.finetune):
            raise CheckpointError(_occupied_save_text(config, newest=max(found), continues=continues))


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


def check_load_dir(folder: Path, config: CheckpointConfig, *, may_be_empty: bool) -> None:
    """Raises if a folder contains nothing that `--load` accepts."""
    if (folder / MANIFEST_FILE).is_file():
        step = folder.name.rpartition("-")[2].lstrip("0") or "0"
        raise CheckpointError(
            f"--load {folder} is one checkpoint. Give the folder that holds it: --load {folder.parent} --ckpt-step {step}."
        )
    if folder.is_file():
        raise CheckpointError(f"--load {folder} is a file. Give the folder that --save wrote to.")
    if list_steps(folder):
        return
    if is_hf_folder(folder):
        _check_hf_load(folder, config)
        return
    refuse_unconverted(folder, "--load")
    broken = (
        sorted(path.name for path in folder.glob("step-*") if not path.name.endswith(".tmp")) if folder.is_dir() else []
    )
    if broken:
        reasons = {name: not_a_file_reason(folder / name / MANIFEST_FILE) for name in broken}
        strange = [f"{name}/{MANIFEST_FILE} {why}" for name, why in reasons.items() if why not in (None, "is missing")]
        if strange:
            raise CheckpointError(
                f"--load {folder}: {'; '.join(strange)}. Restore these steps from a copy, or remove them to start from the beginning."
            )
        raise CheckpointError(
            f"--load {folder}: {', '.join(broken)} have no {MANIFEST_FILE}, so they are not complete checkpoints. Restore them from "
            "a copy, or remove them to start from the beginning."
        )
    check_steps_not_lost(folder)
    asked = [
        flag
        for flag, given in (
            ("--finetune", config.finetune),
            ("--no-load-optim", config.no_load_optim),
            ("--ckpt-step", config.ckpt_step is not None),
            ("--exit-on-missing-checkpoint", config.exit_on_missing_checkpoint),
            ("--use-checkpoint-args", config.use_checkpoint_args),
        )
        if given
    ]
    if asked or not may_be_empty:
        because = f", and {' and '.join(asked)} needs one" if asked else ""
        raise CheckpointError(
            f"--load {folder} holds no checkpoint{because}. Give a folder that --save wrote to. (A run that loads from the "
            "folder it saves to may start with an empty one.)"
        )


def refuse_unconverted(folder: Path, flag: str) -> None:
    """Raises for checkpoints of other programs that must be converted first."""
    if containing_step(folder) is not None or list_steps(folder):
        return
    if is_megatron_folder(folder):
        raise CheckpointError(
            f"{flag} {folder} was saved by Megatron-LM. Convert it first: petatron checkpoint convert {folder} NEW_FOLDER --to "
            "petatron"
        )
    if (folder / CONFIG_FILE).is_file():
        reject_pickle_weights(folder)


def _check_hf_load(folder: Path, config: CheckpointConfig) -> None:
    """A Hugging Face model has weights and no state to resume from."""
    if not config.finetune:
        raise CheckpointError(
            f"--load {folder} is the folder of a model: there are weights, but no run to go on with. Use --from {folder} to start a "
            "run from them."
        )
    if config.ckpt_step is not None:
        raise CheckpointError(f"--load {folder} is the folder of a model, which has no steps. Leave --ckpt-step out.")


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
