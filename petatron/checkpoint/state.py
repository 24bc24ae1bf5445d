"""What a run hands to a checkpoint and gets back from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from petatron.models.hf.folder_entries import FolderEntry
from petatron.sharding.boxes import Box, Shape

ChunkMetadata = tuple[str, Shape, torch.dtype, Box]
"""Key, logical shape, dtype and box of a chunk."""

WEIGHT_PREFIX = "model/"
"""Keys of the model's weights begin with this; they are what the model folder holds."""
MASTER_PREFIX = "master/"
"""Keys of the same weights in the optimizer's wider precision, where it has them apart."""
ROUTER_PREFIX = "router/"
"""Keys of what routers have learnt beside their weights begin with this."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A box of a logical tensor and the memory it lives in.

    key: which tensor, `kind/name`: `model/layers.0.attention.q.weight`, `exp_avg/layers.0.attention.q.weight`. Weights in the
    optimizer's precision are of the kind `master`.
    tensor: a view of live storage with the shape of the box, any strides; saved from and loaded into.
    primary: whether this rank is the one that saves the box, among the ranks that hold it; every rank loads it.
    """

    key: str
    logical_shape: Shape
    start: Shape
    tensor: Tensor
    primary: bool = True

    def __post_init__(self) -> None:
        fits = all(at + size <= whole for at, size, whole in zip(self.start, self.tensor.shape, self.logical_shape))
        assert fits and len(self.start) == self.tensor.dim() == len(self.logical_shape), (
            f"{self.key}: a box at {self.start} of shape {tuple(self.tensor.shape)} is not inside {self.logical_shape}"
        )

    @property
    def metadata(self) -> ChunkMetadata:
        """What other ranks need to know of it."""
        return self.key, self.logical_shape, self.tensor.dtype, self.box

    @property
    def box(self) -> Box:
        return Box(self.start, tuple(self.tensor.shape))


@dataclass(frozen=True, slots=True, eq=False)
class ModelFolder:
    """How a model's weights are kept: its tensors, and the other files of the folder (config.json, a tokenizer's) as bytes."""

    entries: tuple[FolderEntry, ...]
    aux_files: Mapping[str, bytes]


@dataclass(frozen=True, slots=True, eq=False)
class LoadedCheckpoint:
    """What a load found besides the tensors it filled.

    facts: what `save` was given, as JSON values.
    local: this rank's own tensors (random states), or None when they were saved under another layout.
    missing_keys: keys that were asked for and are not in the checkpoint; always empty for a strict load.
    """

    step: int
    facts: dict[str, Any]
    local: dict[str, Tensor] | None
    missing_keys: tuple[str, ...] = ()
