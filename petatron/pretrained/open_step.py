"""Opens the model folder of a step, and imports the user modules that its run imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from petatron.base.errors import CheckpointError, ConfigError
from petatron.base.model_folder_file_names import CONFIG_FILE
from petatron.base.untrusted_files import reading_untrusted
from petatron.checkpoint.files import step_folder
from petatron.checkpoint.files.manifest import Manifest
from petatron.checkpoint.huggingface.folder_as_checkpoint import HuggingFaceFolder
from petatron.checkpoint.inspect.summarize_checkpoint import run_config, run_metadata
from petatron.config.import_user_modules import import_stored
from petatron.config.schema.fields import all_fields
from petatron.config.schema.sections.mup import MupSettings
from petatron.models.registry import is_registered


def open_step(step: Path, manifest: Manifest) -> HuggingFaceFolder:
    """Opens the model folder of a step; `manifest` may lack its tables."""
    step_folder.check_aux_files(step, manifest)
    path = step / step_folder.MODEL_FOLDER
    if not (path / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{step} has no {step_folder.MODEL_FOLDER}/{CONFIG_FILE}, which says what its model is. Restore it from a copy."
        )
    folder = HuggingFaceFolder(path)
    model = folder.config.get("model")
    known = not isinstance(model, dict) or is_registered(str(model.get("model_type", "decoder")))
    if folder.is_own and not known and (problems := import_stored(stored_imports(step, manifest), file=str(step))):
        raise ConfigError(problems)
    return folder


def stored_imports(step: Path, manifest: Manifest) -> tuple[str, ...]:
    """Returns the user modules that the run of a step imported."""
    with reading_untrusted(step / step_folder.MANIFEST_FILE, step_folder.damaged_error):
        imports = run_config(run_metadata(manifest)).get("launch", {}).get("imports", [])
        if not isinstance(imports, list) or not all(isinstance(name, str) for name in imports):
            raise ValueError(f"its imports are {imports!r}")
    return tuple(imports)


def stored_mup(step: Path, manifest: Manifest) -> dict[str, Any]:
    """Returns the muP settings of a step's run; empty without muP. config.json has only the resulting factors."""
    with reading_untrusted(step / step_folder.MANIFEST_FILE, step_folder.damaged_error):
        model = run_config(run_metadata(manifest)).get("model", {})
        if model.get("use_mup") is not True:
            return {}
        names = {info.name for info in all_fields() if info.feature is MupSettings.feature} & model.keys()
        return {name: model[name] for name in names if model[name] is not None}
