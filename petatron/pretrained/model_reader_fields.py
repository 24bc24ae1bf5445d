"""`ModelReader`: an opened model of any format (`model_reader.py`), whose logical tensors are read on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from petatron.checkpoint.tensor_chunk import Chunk
from petatron.models.model_spec import ModelSpec
from petatron.pretrained.detect_model_format import ModelFormat
from petatron.pretrained.stored_training_state import TrainingState
from petatron.sharding.shard_spec import Shape


@dataclass(frozen=True, slots=True, eq=False)
class ModelReader:
    """An opened model.

    config_sections: its settings as sections of a config file. config_json: its config.json, if it has one. companion_files: files
    to copy along, such as the tokenizer's. shapes, dtypes: of every tensor of weights and router state, by key. fill: reads chunks with
    such keys. other_state: names of other state. open_training: opens the training state, and raises if it cannot be converted; None if
    there is none. tokenizer: tokenizer settings in a Megatron checkpoint's arguments. base_model: the model that the weights began with.
    """

    format: ModelFormat
    path: Path
    step: int
    config_sections: Mapping[str, Mapping[str, Any]]
    spec: ModelSpec
    config_json: Mapping[str, Any] | None
    companion_files: Mapping[str, Path]
    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, torch.dtype]
    fill: Callable[[Sequence[Chunk]], None]
    other_state: tuple[str, ...] = ()
    open_training: Callable[[], TrainingState] | None = None
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    base_model: str | None = None
