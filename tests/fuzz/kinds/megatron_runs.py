"""What a Megatron run saves besides weights: the state of its optimizer and its schedule. Real megatron-core wrote the samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from petatron.checkpoint.tensor_chunk import Chunk
from petatron.pretrained.convert_model import ConversionOptions, convert
from petatron.pretrained.model_reader import open_model_reader
from tests.fuzz.kind import Kind
from tests.fuzz.kinds.files import files_of
from tests.fuzz.kinds.models import digest, values_of

_GOLDEN = Path(__file__).parents[2] / "golden" / "megatron"
_SAMPLES = {
    "megatron-run-dist": "run-torch_dist-distributed-bf16",
    "megatron-run-legacy": "run-legacy-distributed-pp2",
    "megatron-run-plain": "run-legacy-plain-bf16",
}
_FORMATS = {".pt": "torch", ".metadata": "pickle", ".distcp": "torch", ".json": "json", ".txt": "text"}


def make(name: str) -> Kind:
    files = {
        path: content for path, content in files_of(_GOLDEN / _SAMPLES[name]).items() if path != "reference.safetensors"
    }
    return Kind(
        name,
        files,
        doors={"read": read_state, "resume": to_run},
        shares={"read": 4},
        formats=_FORMATS,
        streams=(".pt",),
    )


def read_state(folder: Path, scratch: Path) -> Any:
    """Opens a run and reads all of its state."""
    source = open_model_reader(folder)
    tensors = values_of(source)
    if source.open_training is None:
        return tensors
    state = source.open_training()
    for key, shape in state.shapes.items():
        tensor = torch.empty(shape)
        state.fill([Chunk(key, shape, (0,) * len(shape), tensor)])
        tensors[key] = digest(tensor)
    return tensors


def to_run(folder: Path, scratch: Path) -> Any:
    """Converts a run to one of ours, which would resume."""
    result = convert(open_model_reader(folder), scratch / "new", ConversionOptions(target_format="petatron"))
    return result.has_training, sorted(files_of(scratch / "new"))
