"""Reads the settings that a checkpoint was saved with, for `--use-checkpoint-args` and `--from`.

A checkpoint of a training run contains the run's whole config. A converted checkpoint, one of a custom program, and a Hugging Face folder
contain only config.json, which describes the model and no layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from petatron.base.errors import CheckpointError
from petatron.base.model_folder_file_names import is_hf_folder
from petatron.base.untrusted_files import reading_untrusted
from petatron.checkpoint.files import step_folder, step_list
from petatron.checkpoint.files.manifest import Manifest
from petatron.checkpoint.huggingface.folder_as_checkpoint import HuggingFaceFolder
from petatron.checkpoint.inspect.summarize_checkpoint import run_config, run_metadata
from petatron.checkpoint.megatron import open_megatron
from petatron.checkpoint.tensor_chunk import WEIGHT_PREFIX
from petatron.config import CheckpointConfig
from petatron.config.required_settings import required
from petatron.config.settings_from_checkpoint import CheckpointSettings, tokenizer_paths
from petatron.data.tokenizer import folder_tokenizer
from petatron.models.hf.check_claimed_counts import check_counts
from petatron.pretrained.detect_model_format import (
    check_load_dir,
    detect_format,
    is_megatron_folder,
    refuse_unconverted,
)
from petatron.pretrained.hub import local_model
from petatron.pretrained.model_reader import open_model_reader
from petatron.pretrained.open_step import open_step, stored_imports
from petatron.pretrained.settings_as_config_file import config_sections

_SECTIONS = ("model", "moe", "parallel", "tokenizer")
_TOKENIZER_FILES = ("tokenizer_model", "vocab_file", "merge_file")


def read_checkpoint_args(
    config: CheckpointConfig, start_folder: str | None = None, *, settings_only: bool = False
) -> CheckpointSettings:
    """Returns the settings of the checkpoint that a run loads, or of the model in `start_folder`; raises if there is none.

    With `settings_only` a Hugging Face model needs no weights: a config.json is enough.
    """
    if start_folder is not None:
        return _read_start_folder(local_model(start_folder, settings_only=settings_only), settings_only=settings_only)
    folder = Path(required("load", config.load))
    check_load_dir(folder, config, may_be_empty=False)
    if not step_folder.list_steps(folder) and is_megatron_folder(folder):
        return _read_start_folder(folder, settings_only=settings_only)
    if not step_folder.list_steps(folder):
        return CheckpointSettings(str(folder), _settings_from_hf_folder(HuggingFaceFolder(folder)))
    with step_list.naming_step_flag("--ckpt-step"):
        return _settings_from_step(*_select_step(folder, config))


def _read_start_folder(folder: Path, *, settings_only: bool) -> CheckpointSettings:
    """Reads the model settings of a Hugging Face folder, a run's newest step, one step, or a Megatron checkpoint."""
    try:
        kind = detect_format(folder)
    except CheckpointError as error:
        raise CheckpointError(f"--from {error}") from error
    if kind == "petatron":
        step = step_list.resolve_step(folder, None, warn=False)  # whoever loads the weights warns
        return _settings_from_step(step, step_folder.read_manifest(step))
    if kind == "megatron":
        checkpoint = open_megatron(folder)
        sections = config_sections(checkpoint.model, checkpoint.moe)
        return CheckpointSettings(
            str(folder), {**sections, "tokenizer": _tokenizer_section(checkpoint.tokenizer, folder)}
        )
    if kind == "peft":
        reader = open_model_reader(folder, model_format="peft")
        files = [file.parent for file in reader.companion_files.values()]
        tokenizer = next((held for file in files if (held := _tokenizer_section({}, file))), {})
        return CheckpointSettings(str(folder), {**reader.config_sections, "tokenizer": tokenizer})
    if settings_only and kind == "huggingface" and not is_hf_folder(folder):
        sections = config_sections(*HuggingFaceFolder(folder).settings(without_weights=True))
        return CheckpointSettings(
            str(folder), {**sections, "tokenizer": _tokenizer_section({}, folder)}, has_weights=False
        )
    refuse_unconverted(folder)
    return CheckpointSettings(str(folder), _settings_from_hf_folder(HuggingFaceFolder(folder)))


def _settings_from_step(step: Path, manifest: Manifest) -> CheckpointSettings:
    saved = run_config(run_metadata(manifest))
    model_folder = step / step_folder.MODEL_FOLDER
    if not saved:
        return CheckpointSettings(str(step), _settings_from_hf_folder(open_step(step, manifest)))
    path, weights = step / step_folder.MANIFEST_FILE, sum(key.startswith(WEIGHT_PREFIX) for key in manifest.tensors)
    with reading_untrusted(path, step_folder.damaged_error):
        sections = {name: saved[name] for name in _SECTIONS if name in saved}
        model, moe = saved.get("model", {}), saved.get("moe", {})
        check_counts(path, step_folder.damaged_error, model, moe, num_tensors=weights, separate_experts=False)
        sections["tokenizer"] = _tokenizer_section(saved.get("tokenizer", {}), model_folder)
    return CheckpointSettings(str(step), sections, stored_imports(step, manifest))


def _select_step(folder: Path, config: CheckpointConfig) -> tuple[Path, Manifest]:
    """Returns the step to load; with `--load-fallback` the newest whose manifest can be read."""
    step = config.ckpt_step
    while True:
        source = None
        try:
            source = step_list.resolve_step(folder, step, warn=False)  # the load warns
            return source, step_folder.read_manifest(source)
        except step_folder.DamagedCheckpointError:
            step = step_list.previous_step(folder, source) if config.load_fallback else None
            if step is None:
                raise


def _settings_from_hf_folder(folder: HuggingFaceFolder) -> dict[str, Mapping[str, Any]]:
    return {**config_sections(*folder.checked_settings()), "tokenizer": _tokenizer_section({}, folder.path)}


def _tokenizer_section(saved: Mapping[str, Any], model_folder: Path) -> Mapping[str, Any]:
    """Returns the run's tokenizer if its files still exist, else the copy in the model folder, else nothing."""
    files = [saved[name] for name in _TOKENIZER_FILES if saved.get(name) is not None]
    if saved.get("tokenizer_type") is not None and all(Path(file).exists() for file in files):
        names = [path.partition(".")[2] for path in tokenizer_paths()]
        return {name: saved[name] for name in names if name in saved}
    held = folder_tokenizer(model_folder)
    return {} if held is None else {name: value for name, value in asdict(held).items() if value}
