"""`ModelFolder` and `LoadedCheckpoint`: what `CheckpointManager` saves besides chunks, and what a load returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from petatron.models.hf.folder_entries import FolderEntry


@dataclass(frozen=True, slots=True, eq=False)
class ModelFolder:
    """How a model's weights are saved: its tensors, and the other files of the folder (config.json, a tokenizer's) as bytes."""

    entries: tuple[FolderEntry, ...]
    aux_files: Mapping[str, bytes]


@dataclass(frozen=True, slots=True, eq=False)
class LoadedCheckpoint:
    """What a load returns besides the tensors it filled.

    metadata: what `save` was given, as JSON values.
    local: this rank's own tensors (random states), or None when they were saved under another layout.
    missing_keys: requested keys that the checkpoint does not contain; always empty for a strict load.
    is_signed: whether it has a signature; a load does not check it.
    source: the folder that it was read from.
    """

    step: int
    metadata: dict[str, Any]
    local: dict[str, Tensor] | None
    missing_keys: tuple[str, ...] = ()
    is_signed: bool = False
    source: Path | None = None
