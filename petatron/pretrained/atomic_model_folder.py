"""Writes a new model folder under a temporary name and renames it, so that an existing folder is complete."""

from __future__ import annotations

from pathlib import Path

from petatron.base.errors import CheckpointError
from petatron.base.untrusted_files import open_regular_file
from petatron.checkpoint.files import step_list


def check_not_inside_step(path: Path, display_name: str) -> None:
    """Raises for a path inside a checkpoint, which must stay as it was saved."""
    resolved = path.resolve()
    for folder in (resolved, *resolved.parents):
        if _is_step_folder(folder):
            raise CheckpointError(
                f"{display_name} is inside the checkpoint {folder}, where nothing else may be. Choose a place beside it, such as "
                f"{folder.parent / (resolved.name if resolved != folder else 'new')}."
            )


def tmp_folder(target: Path) -> Path:
    """Returns the temporary folder in which a model is written."""
    return target.with_name(f"{target.name}.tmp")


def create_tmp_folder(target: Path, *, overwrite: bool = False) -> Path:
    """Creates the temporary folder of a conversion; raises if it exists.

    The target must not exist, be empty or, if it may be overwritten, have a config.json.
    """
    check_not_inside_step(target, str(target))
    is_model = overwrite and target.is_dir() and (target / "config.json").is_file()
    is_empty = not target.exists() or (target.is_dir() and not any(target.iterdir()))
    if target.is_symlink() or not (is_empty or is_model):
        raise CheckpointError(
            f"{target} is already there, and nothing is written over it. Remove it, or choose another name."
        )
    created = tmp_folder(target)
    if not target.parent.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
    try:
        created.mkdir()
    except FileExistsError:
        raise CheckpointError(
            f"{created} is in the way: a model is being written there, or was interrupted. Remove it if none is."
        ) from None
    return created


def _is_step_folder(folder: Path) -> bool:
    """Whether the folder has a manifest.json of ours, with the format's name in its first bytes."""
    try:
        with open_regular_file(folder / step_list.MANIFEST_FILE) as file:
            return b'"petatron checkpoint"' in file.read(64)
    except OSError:
        return False
