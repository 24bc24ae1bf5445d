"""A tiny model, and what the doors of all kinds of models have in common."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import petatron
from petatron.checkpoint.tensor_chunk import Chunk
from petatron.mesh.mesh import ParallelMesh
from petatron.pretrained.convert_model import ConversionOptions, convert
from petatron.pretrained.model_reader import ModelReader, open_model_reader
from petatron.pretrained.saveable_model import Model
from tests.fuzz.kinds.files import files_of

_SHAPE = (
    "--num-layers 1 --hidden-size 8 --ffn-hidden-size 12 --num-attention-heads 2 --kv-channels 4 --num-query-groups 1 --seq-length 8 "
    "--max-position-embeddings 8 --vocab-size 20 --mock-data --lr 1e-2 --train-iters 3 --seed 7"
)
_MOE = "--num-experts 2 --moe-router-topk 2 --moe-ffn-hidden-size 12"


@cache
def mesh() -> ParallelMesh:
    return ParallelMesh.single()


def tiny(*flags: str, moe: bool = False) -> tuple[Any, Model]:
    """A run and its model, with weights that follow from the seed."""
    torch.set_num_threads(1)
    words = [*_SHAPE.split(), *(_MOE.split() if moe else []), *flags]
    run = petatron.load("tiny-llama", words).config
    return run, petatron.build_model(run, mesh())


def digest(tensor: Tensor) -> str:
    """Dtype, shape and bytes of a tensor."""
    content = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=8)
    content.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


def values_of(source: ModelReader) -> dict[str, str]:
    """Every tensor of an opened model."""
    found = {}
    for key, shape in source.shapes.items():
        tensor = torch.empty(shape, dtype=source.dtypes[key])
        source.fill([Chunk(key, shape, (0,) * len(shape), tensor)])
        found[key] = digest(tensor)
    return found


def read(folder: Path, scratch: Path) -> Any:
    """Opens a model of any form and reads all of it."""
    return values_of(open_model_reader(folder))


def to_huggingface(folder: Path, scratch: Path) -> Any:
    convert(open_model_reader(folder), scratch / "new", ConversionOptions(target_format="huggingface"))
    return _written(scratch / "new")


def to_petatron(folder: Path, scratch: Path) -> Any:
    convert(open_model_reader(folder), scratch / "new", ConversionOptions(target_format="petatron", training=False))
    return {name: content for name, content in _written(scratch / "new").items() if not name.endswith("config.yaml")}


def to_megatron(folder: Path, scratch: Path) -> Any:
    convert(open_model_reader(folder), scratch / "new", ConversionOptions(target_format="megatron"))
    return values_of(open_model_reader(scratch / "new"))


def _written(folder: Path) -> Mapping[str, str]:
    return {name: hashlib.blake2b(content, digest_size=8).hexdigest() for name, content in files_of(folder).items()}


def pretrained(folder: Path, scratch: Path) -> Any:
    model = petatron.from_pretrained(folder, mesh())
    return {name: digest(parameter) for name, parameter in model.module.named_parameters()}
