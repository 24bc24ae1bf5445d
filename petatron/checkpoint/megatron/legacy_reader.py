"""Reading `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`: one file per tensor, pipeline and expert rank.

A rank's file counts its layers and its experts from 0. Which ones of the model they are follows from the other files: virtual stage v of
pipeline rank p is the (v x pipeline size + p)-th stage of the model, and every stage begins where the one before ends. So
uneven stages need no rule of their own. Everything but experts is the same on all expert ranks and is read from the first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.base.text import some
from petatron.checkpoint.megatron.arguments import arguments_of
from petatron.checkpoint.megatron.lazy_weight import Found, Stored
from petatron.checkpoint.megatron.pickle_allowlist import load_file
from petatron.checkpoint.megatron.weight_layouts import join, joined_shape
from petatron.checkpoint.megatron.weight_names import Kind, is_weight, layer_of, modern_name, with_layer

_FILE = "model_optim_rng.pt"
_OLDEST_VERSION = 2.0
_MOST_RANKS_MISSING = 64  # of each that is there: beyond it their names are not listed
_GROUPED = re.compile(r"(decoder\.layers\.\d+\.mlp\.experts)\.(linear_fc[12])\.(weight|bias)(\d+)$")
_SEQUENTIAL = re.compile(r"(decoder\.layers\.\d+\.mlp\.experts)\.local_experts\.(\d+)\.(.+)$")
_PRODUCTS = re.compile(r"(decoder\.layers\.\d+\.mlp\.experts)\.weight([12])$")
_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(.+)$")


@dataclass(frozen=True, slots=True)
class _Sizes:
    tp: int
    pp: int
    ep: int

    def folder(self, tp: int, pp: int, ep: int) -> str:
        """Pipeline and expert ranks are in the name only if there are several."""
        pipeline = f"_{pp:03d}" if self.pp > 1 else ""
        return f"mp_rank_{tp:02d}{pipeline}" + (f"_{ep:03d}" if self.ep > 1 else "")


@dataclass(frozen=True, slots=True)
class _Ranks:
    """The weights of each (tensor, pipeline, expert) rank, one dictionary per virtual stage; `experts` is how many a rank has."""

    step: Path
    sizes: _Sizes
    files: Mapping[tuple[int, int, int], list[dict[str, Tensor]]]
    experts: int


def read_legacy(step: Path) -> Found:
    """All weights of a step's folder."""
    first = min((path.parent.name for path in step.glob(f"mp_rank_*/{_FILE}")), default=None)
    if first is None:
        raise CheckpointError(f"{step} holds no mp_rank_*/{_FILE}. Give the folder that a Megatron run saved to.")
    head = load_file(step / first / _FILE)
    arguments = arguments_of(head, step / first / _FILE)
    sizes = _sizes(step, arguments)
    version = float(head.get("checkpoint_version", 0) or 0)
    if version < _OLDEST_VERSION:
        raise CheckpointError(
            f"{step / first / _FILE} is of checkpoint version {version:g}, which orders queries, keys and values otherwise. "
            "Load and save it once with a Megatron of 2021 or later."
        )
    files = {
        (tp, pp, ep): _chunks(step / sizes.folder(tp, pp, ep) / _FILE)
        for pp in range(sizes.pp)
        for tp in range(sizes.tp)
        for ep in range(sizes.ep)
    }
    experts = int(arguments.get("num_experts") or 0) // sizes.ep
    ranks = _Ranks(step, sizes, files, experts)
    num_weights = sum(_count(chunk, experts) for chunks in files.values() for chunk in chunks)
    iteration = int(head.get("iteration") or 0)
    return Found(arguments, iteration, num_weights, lambda kinds: dict(_weights(ranks, kinds)))


def _count(chunk: Mapping[str, Tensor], experts: int) -> int:
    """Weights in a dictionary of them, of which some may hold all experts of a rank."""
    return sum(min(experts, tensor.numel()) if _PRODUCTS.match(name) else 1 for name, tensor in chunk.items())


def _sizes(step: Path, arguments: Mapping[str, Any]) -> _Sizes:
    """The layout, with one folder for each of its ranks."""
    sizes = _Sizes(
        int(arguments.get("tensor_model_parallel_size") or 1),
        int(arguments.get("pipeline_model_parallel_size") or 1),
        int(arguments.get("expert_model_parallel_size") or 1),
    )
    experts_tp = arguments.get("expert_tensor_parallel_size") or sizes.tp
    if arguments.get("num_experts") and experts_tp != sizes.tp:
        raise CheckpointError(
            f"{step} was saved with expert tensor parallel size {experts_tp} beside tensor parallel size {sizes.tp}, "
            "for which rank folders do not say which part they hold. Save it as torch_dist (--ckpt-format torch_dist)."
        )
    there = {path.parent.name for path in step.glob(f"mp_rank_*/{_FILE}")}
    layout = f"its arguments say tensor {sizes.tp} x pipeline {sizes.pp} x expert {sizes.ep}"
    ranks = sizes.tp * sizes.pp * sizes.ep
    if min(sizes.tp, sizes.pp, sizes.ep) < 1 or ranks > _MOST_RANKS_MISSING * len(there):
        raise CheckpointError(f"{step} is incomplete: {layout}, but there are {len(there)} ranks. Copy all folders.")
    wanted = {sizes.folder(tp, pp, ep) for tp in range(sizes.tp) for pp in range(sizes.pp) for ep in range(sizes.ep)}
    if wanted - there:
        raise CheckpointError(
            f"{step} is incomplete: {layout}, but {some(wanted - there)} is missing. Copy the folders of all ranks."
        )
    if there - wanted:
        raise CheckpointError(
            f"{step} holds ranks of another layout: {layout}, but there is also {some(there - wanted)}. "
            "Keep only the folders that one run wrote."
        )
    return sizes


def _chunks(path: Path) -> list[dict[str, Tensor]]:
    """The weights of a rank, one dictionary per virtual stage, under modern names with local numbers."""
    content = load_file(path)
    keys = ["model"] if "model" in content else sorted(
        (key for key in content if re.fullmatch(r"model\d+", key)), key=lambda key: int(key[5:])
    )  # fmt: skip
    if not keys:
        raise CheckpointError(f"{path} has neither `model` nor `model0`. Is it a file of the optimizer alone?")
    return [dict(_flat(content[key], path)) for key in keys]


def _flat(tree: Any, path: Path, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Nested dictionaries, as before the core library, become dotted names."""
    if not isinstance(tree, Mapping):
        raise CheckpointError(
            f"{path} has a {type(tree).__name__} where the model's weights should be. Is it Megatron's?"
        )
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, path, f"{name}.")
        elif isinstance(value, Tensor) and is_weight(name):
            if value.numel() * value.dtype.itemsize > value.untyped_storage().nbytes():
                raise CheckpointError(f"{path}: {name} has more values than the file has bytes for. Copy it again.")
            yield from _experts_apart(modern_name(name), value)


def _experts_apart(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """One name per expert, whichever of Megatron's three ways of keeping experts was used."""
    if (match := _SEQUENTIAL.match(name)) is not None:
        yield f"{match[1]}.{match[2]}.{match[3]}", tensor
    elif (match := _GROUPED.match(name)) is not None:
        yield f"{match[1]}.{match[4]}.{match[2]}.{match[3]}", tensor
    else:
        yield name, tensor


def _weights(ranks: _Ranks, kinds: Mapping[str, Kind]) -> Iterator[tuple[str, Stored]]:
    depths = {len(chunks) for chunks in ranks.files.values()}
    if len(depths) > 1:
        found = some([str(depth) for depth in sorted(depths)])
        raise CheckpointError(f"{ranks.step} mixes ranks of {found} virtual stages. Copy the folders of one run.")
    first_layer = 0
    for virtual in range(depths.pop()):
        for pp in range(ranks.sizes.pp):
            layers = 0
            for name, placed, shards, where in _stage(ranks, virtual, pp, first_layer):
                layers = max(layers, 1 + (-1 if (layer := layer_of(name)) is None else layer))
                yield placed, _joined(placed, shards, kinds.get(placed, "whole"), where)
            first_layer += layers


def _stage(ranks: _Ranks, virtual: int, pp: int, first_layer: int) -> Iterator[tuple[str, str, list[Tensor], str]]:
    """Each weight of a stage: its name there, its name in the model, the shards of all ranks, and the file of the first."""
    sizes = ranks.sizes
    for ep in range(sizes.ep):
        where = ranks.step / sizes.folder(0, pp, ep) / _FILE
        shards = [_whole_experts(ranks.files[tp, pp, ep][virtual], ranks.experts) for tp in range(sizes.tp)]
        _same_names(shards, where)
        for name in shards[0]:
            layer = layer_of(name)
            placed = name if layer is None else with_layer(name, first_layer + layer)
            expert = _EXPERT.match(placed)
            if expert is not None:
                placed = f"{expert[1]}.{ep * ranks.experts + int(expert[2])}.{expert[3]}"
            elif ep > 0:
                continue
            yield name, placed, [shard[name] for shard in shards], str(where)


def _same_names(ranks: list[dict[str, Tensor]], where: Path) -> None:
    for rank in ranks[1:]:
        if different := rank.keys() ^ ranks[0].keys():
            raise CheckpointError(
                f"The tensor-parallel ranks beside {where} do not hold the same weights: {some(different)}. "
                "Copy the folders of one step of one run."
            )


def _whole_experts(chunk: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """`weight1` and `weight2` hold all experts of a rank as [in, out] matrices one after the other; others are kept.

    `weight1` has the shape [in, experts x out] but its memory is [experts, in, out].
    """
    apart: dict[str, Tensor] = {}
    for name, tensor in chunk.items():
        match = _PRODUCTS.match(name)
        if match is None or not count:
            apart[name] = tensor
            continue
        if tensor.numel() < count:
            raise CheckpointError(f"{name} has {tensor.numel()} values for {count} experts. Copy the checkpoint again.")
        inner = tensor.shape[0] if match[2] == "1" else tensor.shape[0] // count
        for expert, matrix in enumerate(tensor.reshape(count, inner, -1)):
            apart[f"{match[1]}.{expert}.linear_fc{match[2]}.weight"] = matrix.t()
    return apart


def _joined(name: str, shards: list[Tensor], kind: Kind, where: str) -> Stored:
    if any(shard.shape != shards[0].shape or shard.dtype != shards[0].dtype for shard in shards):
        found = some([f"{list(shard.shape)} of {shard.dtype}" for shard in shards])
        raise CheckpointError(
            f"{name} in {where} differs from that of the other tensor-parallel ranks: {found}. "
            "Copy the folders of one step of one run."
        )
    shape = joined_shape(kind, tuple(shards[0].shape), len(shards))
    return Stored(shape, shards[0].dtype, where, partial(join, kind, shards))
