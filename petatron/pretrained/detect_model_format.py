"""Detects the format of a model on disk without opening it, and refuses folders that cannot be opened as they are.

petatron      a folder of steps, one step, or the `model/` of one
huggingface   config.json and safetensors
megatron      what Megatron-LM saved
peft          adapter_config.json and the adapters, which name the model beside which they are
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from petatron.base.errors import CheckpointError, ConfigError, Problem
from petatron.base.model_folder_file_names import CONFIG_FILE, TRACKER_FILE, is_adapter_folder, is_hf_folder
from petatron.base.untrusted_files import not_a_file_reason
from petatron.checkpoint.files.step_folder import MODEL_FOLDER
from petatron.checkpoint.files.step_list import (
    MANIFEST_FILE,
    check_steps_not_lost,
    containing_step,
    list_steps,
    resolve_step,
    step_name,
)
from petatron.checkpoint.load.weights_from_average import read_manifest_with_weights
from petatron.config import CheckpointConfig
from petatron.pretrained.hub import local_model

ModelFormat = Literal["petatron", "huggingface", "megatron", "peft"]
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth")


def detect_format(path: Path) -> ModelFormat:
    """Returns the format of a folder."""
    if has_steps(path):
        return "petatron"
    if is_megatron_folder(path):
        return "megatron"
    if (path / CONFIG_FILE).is_file():
        return "huggingface"
    if is_adapter_folder(path):
        return "peft"
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a folder. Give the folder of a model or of checkpoints, or the name of a model on the hub (OWNER/NAME)."
        )
    raise CheckpointError(
        f"{path} holds no model: neither steps of Petatron "
        f"({step_name(0)}/{MANIFEST_FILE}), nor {CONFIG_FILE} of a "
        f"Hugging Face model, nor what Megatron-LM saves ({TRACKER_FILE}). Give the folder that has one of them."
    )


def has_steps(path: Path) -> bool:
    """Whether this is a folder of steps, one step, or a folder inside a step."""
    return containing_step(path) is not None or bool(list_steps(path))


def is_megatron_folder(path: Path) -> bool:
    """Whether Megatron-LM saved this folder of steps, or step."""
    return any((path / name).is_file() for name in (".metadata", TRACKER_FILE)) or any(path.glob("mp_rank_*"))


def reject_pickle_weights(folder: Path) -> None:
    """Raises for a Hugging Face folder whose weights are pickles, which execute code when they are loaded."""
    if is_hf_folder(folder):
        return
    pickled = sorted(path.name for pattern in _PICKLE_PATTERNS for path in folder.glob(pattern))
    if pickled:
        raise CheckpointError(
            f"{folder} holds its weights as pickles ({', '.join(pickled[:3])}), which are not read because they can run any "
            "code. Save it again as safetensors: in Python, transformers.AutoModelForCausalLM.from_pretrained("
            f"{str(folder)!r}).save_pretrained(NEW_FOLDER)."
        )
    if (folder / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{folder} has {CONFIG_FILE} and no safetensors beside it. Copy all files of the model there."
        )
    raise CheckpointError(f"{folder} has no {CONFIG_FILE}. Give the folder of a Hugging Face model.")


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
    if is_megatron_folder(folder):
        _check_megatron_load(folder, config)
        return
    refuse_unconverted(folder)
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


def refuse_unconverted(folder: Path) -> None:
    """Raises for a model folder whose weights need a conversion first."""
    if not has_steps(folder) and not is_megatron_folder(folder) and (folder / CONFIG_FILE).is_file():
        reject_pickle_weights(folder)


def _check_megatron_load(folder: Path, config: CheckpointConfig) -> None:
    """Checks `--load` of a Megatron checkpoint: a run can start from it, and resumes only after a conversion."""
    if not config.finetune:
        raise CheckpointError(
            f"--load {folder} was saved by Megatron-LM. To go on with its run, optimizer state included, convert it first: petatron "
            f"checkpoint convert {folder} NEW_FOLDER --to petatron. To start a run from its weights, use --from {folder}."
        )
    if config.ckpt_step is not None:
        raise CheckpointError(
            f"--load {folder} was saved by Megatron-LM. Leave --ckpt-step out, and give the iter_ folder of the step."
        )


def _check_hf_load(folder: Path, config: CheckpointConfig) -> None:
    """Checks `--load` of a Hugging Face model, which has no state to resume from."""
    if not config.finetune:
        raise CheckpointError(
            f"--load {folder} is the folder of a model: there are weights, but no run to go on with. Use --from {folder} to start a "
            "run from them."
        )
    if config.ckpt_step is not None:
        raise CheckpointError(f"--load {folder} is the folder of a model, which has no steps. Leave --ckpt-step out.")


def find_model(checkpoint: str | Path) -> Path:
    """Returns the model folder of a path: a Hugging Face model, a run's newest step, or a Megatron checkpoint; raises otherwise."""
    path = local_model(checkpoint, where="CHECKPOINT")
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a folder. Give the folder of a run, of one of its steps, or of a Hugging Face model, or the name of one "
            "on the hub (OWNER/NAME)."
        )
    if is_hf_folder(path):
        return path
    if has_steps(path):
        return resolve_step(path, None)
    if is_megatron_folder(path) or is_adapter_folder(path):
        return path
    refuse_unconverted(path)
    raise CheckpointError(
        f"{path} holds no checkpoint, and is no Hugging Face model. Give the folder of a run, of one of its steps, of a Hugging Face "
        "model, or of what Megatron-LM saved."
    )


def weights_kind_problems(weights: str | None, model_format: str) -> list[Problem]:
    """Returns the problems of `--weights` for a format: only our checkpoints have several kinds of weights."""
    if weights is None or model_format == "petatron":
        return []
    rule = f"chooses among the state of a checkpoint, and a {model_format} model has one set of weights"
    return [Problem("--weights", weights, rule, "Leave it out.")]


def check_weights_kind(folder: Path, weights: str | None) -> None:
    """Raises if the model has no such kind of weights; None means its current weights."""
    if weights is None:
        return
    model_format = detect_format(folder)
    if problems := weights_kind_problems(weights, model_format):
        raise ConfigError(problems)
    read_manifest_with_weights(resolve_step(folder, None), weights)


def model_files(folder: Path) -> Path:
    """Returns the folder with a model's files: `model/` of a step, or the folder itself."""
    inner = folder / MODEL_FOLDER
    return inner if inner.is_dir() else folder
