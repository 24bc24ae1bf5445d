"""Reading the distributed format, `torch_dist`: a table in `.metadata`, tensors in `__R_N.distcp`, the rest in `common.pt`.

The table lists global tensors and, for each, chunks with their place in the tensor and in a file; a chunk in a file is what
`torch.save` makes of a tensor. Layers of one shape are one tensor with the layers along its first dimension, experts are another
dimension after that; models whose layers differ have a tensor per layer, newer files one per expert. Reading a weight
touches only the chunks that it meets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.checkpoint.megatron.arguments import arguments_of
from petatron.checkpoint.megatron.names import is_weight, modern_name
from petatron.checkpoint.megatron.safe import StandIn, load_blob, load_file, load_metadata
from petatron.checkpoint.megatron.stored import Found, Stored
from petatron.mesh.spec import Shape

_OTHER_STATE = re.compile(r"(chained_\d+\.)?optimizer\b|rng_state|rerun_state_machine_state|opt_param_scheduler")
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_EXPERT = re.compile(r"mlp\.experts\.experts\.(?:(\d+)\.)?(.+)")
_HALF = re.compile(r"(.*linear_fc1\.(?:weight|bias))_([wv])")


@dataclass(frozen=True, slots=True)
class _Chunk:
    start: Shape
    shape: Shape
    file: Path
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class _Global:
    """A tensor of the table."""

    name: str
    shape: Shape
    dtype: torch.dtype
    chunks: tuple[_Chunk, ...]


@dataclass(frozen=True, slots=True)
class _Box:
    """Which part of a global tensor a weight is: `lead` are its indices along the dimensions before the weight's own.

    half: 0 for a gate and 1 for an up that are tensors of their own; transposed: stored as [in, out].
    """

    tensor: _Global
    lead: Shape
    half: int | None = None
    transposed: bool = False

    @property
    def shape(self) -> Shape:
        inner = self.tensor.shape[len(self.lead) :]
        return (*inner[:-2], inner[-1], inner[-2]) if self.transposed else inner


def read_dist(step: Path) -> Found:
    """All weights of a step's folder."""
    common_path = step / "common.pt"
    if not common_path.is_file():
        raise CheckpointError(f"{step} has no common.pt, which holds the model's arguments. Copy the whole folder.")
    common = load_file(common_path)
    reader = _Reader()
    boxes: dict[str, list[_Box]] = {}
    for tensor in _table(step):
        for name, box in _weights_in(tensor):
            boxes.setdefault(name, []).append(box)
    weights = {name: _stored(step, reader, found) for name, found in boxes.items()}
    return Found(arguments_of(common, common_path), int(common.get("iteration") or 0), lambda kinds: weights)


def _table(step: Path) -> Iterator[_Global]:
    path = step / ".metadata"
    table = load_metadata(path)
    try:
        tensors: dict[str, Any] = table.__dict__["state_dict_metadata"]
        places = {
            (index.fqn, tuple(index.offset or ())): info for index, info in table.__dict__["storage_data"].items()
        }
        for name, facts in tensors.items():
            if hasattr(facts, "chunks") and is_weight(name) and not _OTHER_STATE.match(name):
                chunks = tuple(
                    _chunk(step, tuple(chunk.offsets), tuple(chunk.sizes), places[name, tuple(chunk.offsets)])
                    for chunk in {tuple(chunk.offsets): chunk for chunk in facts.chunks}.values()
                )
                yield _Global(name, tuple(facts.size), _dtype(facts.properties), chunks)
    except (KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{path} is not a table that is understood ({type(error).__name__}: {error}). "
            "Save the checkpoint with a torch between 2.1 and this one."
        ) from None


def _dtype(properties: StandIn) -> torch.dtype:
    """Properties keep themselves as a tuple that begins with the number format."""
    kept = properties.__dict__
    return kept["state"][0] if "state" in kept else kept["dtype"]


def _chunk(step: Path, start: Shape, shape: Shape, info: StandIn) -> _Chunk:
    kept = info.__dict__
    name = str(kept["relative_path"])
    if Path(name).name != name:
        raise CheckpointError(
            f"{step / '.metadata'} points outside of its folder, at {name}. Do not use this checkpoint."
        )
    if kept.get("transform_descriptors"):
        raise CheckpointError(f"{step / name} is compressed, which is not understood. Save it without compression.")
    return _Chunk(start, shape, step / name, int(kept["offset"]), int(kept["length"]))


def _weights_in(tensor: _Global) -> Iterator[tuple[str, _Box]]:
    """The weights that a global tensor holds, by the names of `names.py`."""
    layered = _LAYER.fullmatch(tensor.name)
    if layered is None:
        yield modern_name(tensor.name), _Box(tensor, ())
        return
    stacked = layered[1] is None
    for layer in range(tensor.shape[0]) if stacked and tensor.shape else [int(layered[1] or 0)]:
        lead = (layer,) if stacked else ()
        expert = _EXPERT.fullmatch(layered[2])
        if expert is None:
            half, suffix = _split_half(layered[2])
            yield modern_name(f"decoder.layers.{layer}.{suffix}"), _Box(tensor, lead, half)
            continue
        half, suffix = _split_half(expert[2])
        products = re.fullmatch(r"weight([12])", suffix)
        suffix = suffix if products is None else f"linear_fc{products[1]}.weight"
        together = expert[1] is None
        count = tensor.shape[len(lead)] if together and len(tensor.shape) > len(lead) else 0
        for index in range(count) if together else [int(expert[1])]:
            box = _Box(tensor, (*lead, index) if together else lead, half, products is not None)
            yield f"decoder.layers.{layer}.mlp.experts.{index}.{suffix}", box


def _split_half(name: str) -> tuple[int | None, str]:
    """`linear_fc1.weight_w` and `_v` are the gate and the up of newer files."""
    match = _HALF.fullmatch(name)
    return (None, name) if match is None else ("wv".index(match[2]), match[1])


def _stored(step: Path, reader: _Reader, boxes: list[_Box]) -> Stored:
    """Halves become one weight, gate first."""
    boxes = sorted(boxes, key=lambda box: box.half or 0)
    halves = [box.half for box in boxes]
    if halves not in ([None], [0, 1]):
        names = ", ".join(box.tensor.name for box in boxes)
        raise CheckpointError(f"{step / '.metadata'}: {names} are not one weight, nor a gate and an up. Copy it again.")
    first = boxes[0].shape
    shape = (sum(box.shape[0] for box in boxes), *first[1:]) if first else first
    return Stored(shape, boxes[0].tensor.dtype, str(step / ".metadata"), partial(reader.weight, boxes))


class _Reader:
    """Reads chunks; keeps the last one, since q, k and v, or the experts of one chunk, are asked for one after another."""

    def __init__(self) -> None:
        self._last: tuple[_Chunk, Tensor] | None = None

    def weight(self, boxes: list[_Box]) -> Tensor:
        parts = [self._box(box) for box in boxes]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _box(self, box: _Box) -> Tensor:
        tensor = box.tensor
        inner = tensor.shape[len(box.lead) :]
        start, shape = (*box.lead, *(0 for _ in inner)), (*(1 for _ in box.lead), *inner)
        out = torch.empty(shape, dtype=tensor.dtype)
        covered = 0
        for chunk in tensor.chunks:
            meet = [
                (max(at, c_at), min(at + size, c_at + c_size))
                for at, size, c_at, c_size in zip(start, shape, chunk.start, chunk.shape)
            ]
            if any(low >= high for low, high in meet):
                continue
            there = tuple(slice(low - at, high - at) for (low, high), at in zip(meet, start))
            here = tuple(slice(low - at, high - at) for (low, high), at in zip(meet, chunk.start))
            out[there] = self._load(chunk, tensor)[here]
            covered += out[there].numel()
        if covered != out.numel():
            raise CheckpointError(
                f"The chunks of {tensor.name} do not cover it: {covered} of {out.numel()} values. "
                "Copy the folder again, with the .distcp files of all ranks."
            )
        out = out.reshape(inner)
        return out.transpose(-1, -2) if box.transposed else out

    def _load(self, chunk: _Chunk, tensor: _Global) -> Tensor:
        if self._last is not None and self._last[0] == chunk:
            return self._last[1]
        try:
            with chunk.file.open("rb") as file:
                file.seek(chunk.offset)
                blob = file.read(chunk.length)
        except OSError as error:
            raise CheckpointError(
                f"{chunk.file} cannot be read, but holds a part of {tensor.name}: {error.strerror}. "
                "Copy the folder again, with the .distcp files of all ranks."
            ) from None
        if len(blob) != chunk.length:
            raise CheckpointError(
                f"{chunk.file} is cut short: {tensor.name} needs bytes {chunk.offset} to {chunk.offset + chunk.length}. "
                "Copy it again."
            )
        loaded = load_blob(blob, chunk.file)
        if loaded.numel() != torch.Size(chunk.shape).numel() or loaded.dtype != tensor.dtype:
            raise CheckpointError(
                f"{chunk.file} has {list(loaded.shape)} of {loaded.dtype} where the table has {list(chunk.shape)} of "
                f"{tensor.dtype} for {tensor.name}. Its files are of different saves; copy the folder again."
            )
        self._last = (chunk, loaded.reshape(chunk.shape))
        return self._last[1]
