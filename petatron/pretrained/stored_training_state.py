"""The training state of a model on disk: optimizer state, schedule and progress of its run.

Our runs and Megatron's have the same state: Adam's moments, master weights for 16-bit models, settings of the same names. So a conversion
between the two includes it, and the run continues in the other program.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.base.format_text import abbreviate_names
from petatron.base.untrusted_files import is_count, reading_untrusted
from petatron.checkpoint.files import step_folder
from petatron.checkpoint.files.manifest import METADATA_KEY, Manifest
from petatron.checkpoint.inspect.run_metadata_check import is_run_metadata
from petatron.checkpoint.inspect.summarize_checkpoint import run_config, run_metadata
from petatron.checkpoint.megatron import MegatronTraining
from petatron.checkpoint.tensor_chunk import MASTER_PREFIX, WEIGHT_PREFIX, Chunk
from petatron.config.schema.model_identity import model_identity
from petatron.optim.lr_schedule import schedule_settings
from petatron.pretrained.settings_as_config_file import load_config_sections
from petatron.sharding.shard_spec import Shape

MOMENT_PREFIXES = ("exp_avg/", "exp_avg_sq/")
_SECTIONS = ("optim", "schedule", "train", "precision")
OPTIMIZER_STATE = "optimizer state, schedule and progress"
_REMEDY = "Convert the weights alone with --no-optim"


@dataclass(frozen=True, slots=True, eq=False)
class TrainingState:
    """The state of a run besides its weights.

    shapes: of its float32 tensors by key: `exp_avg/NAME`, `exp_avg_sq/NAME`, and `master/NAME` for 16-bit weights. fill: reads chunks with
    such keys. settings, progress, loss_scale: as our checkpoints record them. given: the settings that a config file needs to continue
    the run, by section.
    """

    shapes: Mapping[str, Shape]
    fill: Callable[[Sequence[Chunk]], None]
    updates: int
    settings: Mapping[str, Any]
    given: Mapping[str, Mapping[str, Any]]
    progress: Mapping[str, int]
    loss_scale: Mapping[str, Any]

    @property
    def sections(self) -> dict[str, dict[str, Any]]:
        """The sections of the run's config that Megatron has arguments for."""
        return {section: self.settings["config"][section] for section in _SECTIONS}

    def document(self, converted_from: str) -> dict[str, Any]:
        """Returns the manifest document from which a run of ours resumes."""
        metadata = {
            **self.settings,
            "converted_from": converted_from,
            "progress": dict(self.progress),
            "scaler": dict(self.loss_scale),
            "data": None,  # another program has its own data order
        }
        return {"optimizer": {"updates": float(self.updates)}, METADATA_KEY: metadata}


def megatron_training_state(
    training: MegatronTraining, model_sections: Mapping[str, Mapping[str, Any]]
) -> TrainingState:
    """Returns the training state of a Megatron checkpoint; its settings are checked like a config file's."""
    tensors = {f"{kind}/{name}": tensor for kind, named in training.tensors.items() for name, tensor in named.items()}
    last: dict[str, Tensor] = {}

    def fill(chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            if chunk.key not in last:
                last.clear()  # free the previous one first
                last[chunk.key] = tensors[chunk.key].load()
            chunk.tensor.copy_(last[chunk.key][chunk.box.slices()])

    given = {section: values for section, values in training.sections.items() if values}
    run = load_config_sections({**model_sections, **given}).config
    values = json.loads(json.dumps(asdict(run)))
    return TrainingState(
        shapes={key: tensor.shape for key, tensor in tensors.items()},
        fill=fill,
        updates=training.updates,
        settings={
            "model": model_identity(run.model, run.moe),
            "schedule": schedule_settings(run),
            "config": {section: values[section] for section in ("model", "moe", *_SECTIONS)},
        },
        given=given,
        progress=training.progress,
        loss_scale=training.loss_scale,
    )


def has_megatron_state(optimizer: object) -> bool:
    """Whether Megatron's files can store the state of `--optimizer NAME`."""
    return optimizer == "adam"


def manifest_training_state(
    step: Path, manifest: Manifest, names: Sequence[str], fill: Callable[[Sequence[Chunk]], None]
) -> TrainingState:
    """Returns the training state of our checkpoint (`names`: of the weights); raises for optimizers that Megatron lacks."""
    with reading_untrusted(step / step_folder.MANIFEST_FILE, step_folder.damaged_error):
        metadata, scalars = run_metadata(manifest), manifest.metadata.get("optimizer")
        sections = run_config(metadata)
        optimizer = sections.get("optim", {}).get("optimizer")
        if not has_megatron_state(optimizer) or not isinstance(scalars, dict):
            raise CheckpointError(
                f"{step} has the state of --optimizer {optimizer}, and only adam's has a place in Megatron's files. {_REMEDY}."
            )
        keys = [f"{prefix}{name}" for prefix in MOMENT_PREFIXES for name in names]
        if lacking := [key for key in keys if key not in manifest.tensors]:
            raise CheckpointError(
                f"{step} has no {abbreviate_names(lacking)}: frozen parameters have no state, and Megatron wants that of all. {_REMEDY}."
            )
        keys += [key for name in names if (key := f"{MASTER_PREFIX}{name}") in manifest.tensors]
        progress = dict(metadata["progress"])
        if not all(map(is_count, progress.values())):
            raise ValueError(f"its progress is {progress}")
        return TrainingState(
            shapes={key: manifest.tensors[key].shape for key in keys},
            fill=fill,
            updates=int(scalars["updates"]),
            settings={"model": metadata["model"], "schedule": metadata["schedule"], "config": sections},
            given={},
            progress=progress,
            loss_scale=dict(metadata["scaler"]),
        )


def has_training_state(manifest: Manifest) -> bool:
    """Whether a checkpoint has optimizer state of a training run."""
    return is_run_metadata(run_metadata(manifest)) and manifest.metadata.get("optimizer") is not None


def state_besides_weights(manifest: Manifest) -> Iterator[str]:
    """Yields the kinds of state that a checkpoint of ours has besides the weights of its model."""
    if manifest.metadata.get("optimizer") is not None:
        yield OPTIMIZER_STATE
    if manifest.local:
        yield "random states"
    kinds = {key.partition("/")[0] for key in manifest.tensors}
    known = {prefix.rstrip("/") for prefix in (*MOMENT_PREFIXES, WEIGHT_PREFIX, MASTER_PREFIX)} | {"router"}
    yield from sorted(kinds - known)


def fetch_float32(
    state: TrainingState, weights: Callable[[Sequence[Chunk]], None], kind: str, name: str, shape: Shape
) -> Tensor:
    """Returns a whole tensor of training state; a float32 weight, which is its own master weight, is read with `weights`."""
    tensor, start = torch.empty(shape, dtype=torch.float32), (0,) * len(shape)
    key = f"{kind}/{name}"
    if key in state.shapes:
        state.fill([Chunk(key, shape, start, tensor)])
    else:
        weights([Chunk(f"{WEIGHT_PREFIX}{name}", shape, start, tensor)])
    return tensor
