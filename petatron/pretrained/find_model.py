"""Finds the folder of a model that is only read: generated with, served, evaluated."""

from __future__ import annotations

from pathlib import Path

from petatron.base.errors import CheckpointError
from petatron.base.model_companion_files import CONFIG_FILE, is_hf_folder
from petatron.checkpoint.files import step_folder, step_list
from petatron.pretrained.folder_kind import has_steps, reject_pickle_weights
from petatron.pretrained.hub import local_model


def find_model(checkpoint: str | Path) -> Path:
    """Returns the folder of a Hugging Face model, or of the newest step of a run; `CheckpointError` if it is neither."""
    path = local_model(checkpoint, where="CHECKPOINT")
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a folder. Give the folder of a run, of one of its steps, or of a Hugging Face model, or the name of one "
            "on the hub (OWNER/NAME)."
        )
    if is_hf_folder(path):
        return path
    if not has_steps(path):
        if (path / CONFIG_FILE).is_file():
            reject_pickle_weights(path)
        raise CheckpointError(
            f"{path} holds no checkpoint, and is no Hugging Face model. Give the folder of a run, of one of its steps, or of a "
            "Hugging Face model; what Megatron-LM saved is converted by petatron checkpoint convert."
        )
    return step_list.resolve_step(path, None)


def model_files(folder: Path) -> Path:
    """Returns where the files of a model are: inside a step, or the folder itself."""
    inner = folder / step_folder.MODEL_FOLDER
    return inner if inner.is_dir() else folder
