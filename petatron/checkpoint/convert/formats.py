"""Detects the format of a model on disk without opening it, and turns its settings into a config.

petatron      a folder of steps, one step, or the `model/` of one
huggingface   config.json and safetensors
megatron      what Megatron-LM saved
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from petatron.base.errors import CheckpointError
from petatron.base.model_companion_files import CONFIG_FILE, find_companion_files, is_hf_folder
from petatron.base.untrusted_files import open_regular_file
from petatron.checkpoint.files import step_list
from petatron.config import LoadedConfig
from petatron.validate import load_config

ModelFormat = Literal["petatron", "huggingface", "megatron"]
TRACKER_FILE = "latest_checkpointed_iteration.txt"
"""The file in which Megatron-LM names its newest step; its own package is slow to import."""
COMPANION_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
)
"""Files of a model folder that are copied along with the weights."""
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth")
_MAX_DEFAULT_SEQ_LENGTH = 4096


def detect_format(path: Path) -> ModelFormat:
    """Returns the format of a folder."""
    if step_list.containing_step(path) is not None or step_list.list_steps(path):
        return "petatron"
    if is_megatron_folder(path):
        return "megatron"
    if (path / CONFIG_FILE).is_file():
        return "huggingface"
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a folder. Give the folder of a model or of checkpoints, or the name of a model on the hub (OWNER/NAME)."
        )
    raise CheckpointError(
        f"{path} holds no model: neither steps of Petatron "
        f"({step_list.step_name(0)}/{step_list.MANIFEST_FILE}), nor {CONFIG_FILE} of a "
        f"Hugging Face model, nor what Megatron-LM saves ({TRACKER_FILE}). Give the folder that has one of them."
    )


def is_megatron_folder(path: Path) -> bool:
    """Whether Megatron-LM saved this: a folder of steps, or one of them."""
    return any((path / name).is_file() for name in (".metadata", TRACKER_FILE)) or any(path.glob("mp_rank_*"))


def check_not_inside_step(path: Path, display_name: str) -> None:
    """Raises for a path inside a checkpoint, which would no longer be what was saved."""
    whole = path.resolve()
    for folder in (whole, *whole.parents):
        if _is_step_folder(folder):
            raise CheckpointError(
                f"{display_name} is inside the checkpoint {folder}, where nothing else may be. Choose a place beside it, such as "
                f"{folder.parent / (whole.name if whole != folder else 'new')}."
            )


def tmp_folder(target: Path) -> Path:
    """Returns the temporary folder in which a model is written."""
    return target.with_name(f"{target.name}.tmp")


def create_tmp_folder(target: Path, *, overwrite: bool = False) -> Path:
    """Creates the temporary folder of a conversion exclusively.

    The target may exist only as an empty folder, or, to be overwritten, as one with a config.json.
    """
    check_not_inside_step(target, str(target))
    is_model = overwrite and target.is_dir() and (target / "config.json").is_file()
    is_empty = not target.exists() or (target.is_dir() and not any(target.iterdir()))
    if target.is_symlink() or not (is_empty or is_model):
        raise CheckpointError(
            f"{target} is already there, and nothing is written over it. Remove it, or choose another name."
        )
    draft = tmp_folder(target)
    if not target.parent.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
    try:
        draft.mkdir()
    except FileExistsError:
        raise CheckpointError(
            f"{draft} is in the way: a model is being written there, or was interrupted. Remove it if none is."
        ) from None
    return draft


def _is_step_folder(folder: Path) -> bool:
    """Many programs have a manifest.json; ours has its format name in the first bytes."""
    try:
        with open_regular_file(folder / step_list.MANIFEST_FILE) as file:
            return b'"petatron checkpoint"' in file.read(64)
    except OSError:
        return False


def folder_companions(folder: Path) -> dict[str, Path]:
    """Returns a folder's files other than the weights."""
    return find_companion_files(folder, COMPANION_FILES, CheckpointError)


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


def config_sections(model: Mapping[str, Any], moe: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns a model's settings as sections of a config file, with a sequence length that it supports unless one is given.

    With LongRoPE that is the original context: samples of that length train what the model does with short factors.
    """
    longest = model.get("max_position_embeddings") or _MAX_DEFAULT_SEQ_LENGTH
    if model.get("longrope_short_factor"):
        longest = min(longest, model.get("original_max_position_embeddings") or longest)
    length = model.get("seq_length") or min(longest, _MAX_DEFAULT_SEQ_LENGTH)
    return {"model": {**model, "seq_length": length}, **({"moe": dict(moe)} if moe else {})}


def config_yaml_text(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Serialises the sections as a config file; JSON values are YAML."""
    lines = []
    for section, values in sections.items():
        lines += [f"{section}:", *(f"  {name}: {json.dumps(value)}" for name, value in values.items())]
    return "\n".join(lines) + "\n"


def load_config_sections(
    sections: Mapping[str, Mapping[str, Any]], flags: Sequence[str] = (), *, world_size: int | None = 1
) -> LoadedConfig:
    """Loads the derived and checked config of a model, on the same path as a user's file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(config_yaml_text(sections))
        return load_config(flags, files=[file], world_size=world_size, require_training=False)
