"""Reads `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`: one file per tensor, pipeline and expert rank.

A rank's file numbers its layers and its experts from 0. Their global indices follow from the other files: virtual stage v of
pipeline rank p is the (v x pipeline size + p)-th stage of the model, and every stage begins where the one before ends. So
uneven stages need no rule of their own. Everything but experts is the same on all expert ranks and is read from the first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.base.format_text import abbreviate_names
from petatron.base.untrusted_files import is_count
from petatron.checkpoint.megatron.arguments import checkpoint_arguments
from petatron.checkpoint.megatron.lazy_weight import (
    STATE_KINDS,
    LazyWeight,
    MegatronContents,
    StateKind,
    StoredOptimizer,
    other_state,
    stored_scheduler,
)
from petatron.checkpoint.megatron.legacy_optimizer import DISTRIBUTED_FILE, rank_optimizer_state
from petatron.checkpoint.megatron.optimizer_state import check_readable, optimizer_parts, read_grad_scaler, read_step
from petatron.checkpoint.megatron.read_megatron_pickles import load_torch_file
from petatron.checkpoint.megatron.weight_layouts import stored_layout, unshard, unsharded_shape
from petatron.checkpoint.megatron.weight_names import MegatronWeight, is_weight, layer_index, mcore_name, with_layer
from petatron.config.schema.sections.vocabulary import padded_rows

_FILE = "model_optim_rng.pt"
_INTERLEAVED_VERSION = 2.0
_MAX_RANKS_PER_FOLDER = 64  # per folder on disk: beyond it the names are not listed
_EXPERTS_MODULE = (
    r"((?:decoder\.layers\.\d+|mtp\.layers\.\d+\.(?:transformer_layer|mtp_model_layer\.layers\.\d+))\.mlp\.experts)"
)
_TE_GROUPED_MLP = re.compile(_EXPERTS_MODULE + r"\.(linear_fc[12])\.(weight|bias)(\d+)$")
_SEQUENTIAL_MLP = re.compile(_EXPERTS_MODULE + r"\.local_experts\.(\d+)\.(.+)$")
_GROUPED_MLP = re.compile(_EXPERTS_MODULE + r"\.weight([12])$")
_OLD_HEAD_DIM, _GPT2_VOCAB = 64, 50257
_ONE_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(.+)$")


@dataclass(frozen=True, slots=True)
class _ParallelSizes:
    tp: int
    pp: int
    ep: int

    def folder(self, tp: int, pp: int, ep: int) -> str:
        """The name contains pipeline and expert ranks only if there are several."""
        pipeline = f"_{pp:03d}" if self.pp > 1 else ""
        return f"mp_rank_{tp:02d}{pipeline}" + (f"_{ep:03d}" if self.ep > 1 else "")


@dataclass(frozen=True, slots=True)
class _RankFiles:
    """The weights of each (tensor, pipeline, expert) rank, one dictionary per virtual stage, with `experts_per_rank` experts on a rank."""

    step: Path
    sizes: _ParallelSizes
    files: Mapping[tuple[int, int, int], list[dict[str, Tensor]]]
    experts_per_rank: int


def read_legacy(step: Path) -> MegatronContents:
    """Reads all weights of a step's folder."""
    first = min((path.parent.name for path in step.glob(f"mp_rank_*/{_FILE}")), default=None)
    if first is None:
        raise CheckpointError(f"{step} holds no mp_rank_*/{_FILE}. Give the folder that a Megatron run saved to.")
    head = load_torch_file(step / first / _FILE)
    version = float(head.get("checkpoint_version", 0) or 0)
    if "args" not in head and version < _INTERLEAVED_VERSION:
        head["args"] = _arguments_from_shapes(step, _model_chunks(step / first / _FILE, version, 1)[0])
    arguments = checkpoint_arguments(head, step / first / _FILE)
    sizes = _parallel_sizes(step, arguments)
    heads = arguments.get("num_attention_heads")
    local_heads = heads // sizes.tp if isinstance(heads, int) and is_count(heads) else 0
    files = {
        (tp, pp, ep): _model_chunks(step / sizes.folder(tp, pp, ep) / _FILE, version, local_heads)
        for pp in range(sizes.pp)
        for tp in range(sizes.tp)
        for ep in range(sizes.ep)
    }
    experts = int(arguments.get("num_experts") or 0) // sizes.ep
    ranks = _RankFiles(step, sizes, files, experts)
    num_weights = sum(_num_weights(chunk, experts) for chunks in files.values() for chunk in chunks)
    iteration = int(head.get("iteration") or 0)
    others = other_state([*head, *(["optimizer"] if any(step.glob(f"mp_rank_*/{DISTRIBUTED_FILE}")) else [])])

    def optimizer(expected: Mapping[str, MegatronWeight]) -> StoredOptimizer:
        return _read_optimizer(
            step, sizes, arguments, partial(_translate, version=version, heads=local_heads), expected
        )

    return MegatronContents(
        arguments=arguments,
        iteration=iteration,
        num_weights=num_weights,
        other_state=others,
        lazy_weights=lambda expected: dict(_unsharded_weights(ranks, expected)),
        scheduler=stored_scheduler(head),
        optimizer=optimizer if "optimizer" in others else None,
    )


def _read_optimizer(
    step: Path,
    sizes: _ParallelSizes,
    arguments: Mapping[str, Any],
    translate: Callable[[list[dict[str, Any]], Path], list[dict[str, Tensor]]],
    expected: Mapping[str, MegatronWeight],
) -> StoredOptimizer:
    """Opens the state of an optimizer: what each rank has of it is named, unsharded and checked like its weights."""
    files: dict[StateKind, dict[tuple[int, int, int], list[dict[str, Tensor]]]] = {kind: {} for kind in STATE_KINDS}
    scalars: list[tuple[int, dict[str, Any]]] = []
    for pp, tp, ep in product(range(sizes.pp), range(sizes.tp), range(sizes.ep)):
        path = step / sizes.folder(tp, pp, ep) / _FILE
        content = load_torch_file(path)
        parts = optimizer_parts(content.get("optimizer"), path)
        check_readable(parts, arguments, path)
        chunks = [dict(_flat_tensors(content[key], path)) for key in _chunk_keys(content, path)]
        for kind, state in rank_optimizer_state(parts, chunks, path, arguments, pp=pp).items():
            files[kind][tp, pp, ep] = translate(list(state), path)
        scalars.append((read_step(parts, path), read_grad_scaler(parts)))
    if any(other != scalars[0] for other in scalars):
        raise CheckpointError(
            f"The optimizers of the ranks in {step} are at different steps. Copy the folders of one step."
        )
    experts = int(arguments.get("num_experts") or 0) // sizes.ep
    tensors: dict[StateKind, dict[str, LazyWeight]] = {
        kind: dict(_unsharded_weights(_RankFiles(step, sizes, ranks, experts), expected))
        for kind, ranks in files.items()
    }
    return StoredOptimizer(tensors, *scalars[0])


def _arguments_from_shapes(step: Path, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns the arguments of a GPT-2 whose files have none, as NVIDIA published them in 2019: heads of 64, and GPT-2's vocabulary."""
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    tp = len(list(step.glob(f"mp_rank_*/{_FILE}")))
    wanted = ("embedding.word_embeddings", "embedding.position_embeddings", "decoder.layers.0.mlp.linear_fc1")
    try:
        (rows, hidden), (positions, _), (ffn, _) = (shapes[f"{module}.weight"] for module in wanted)
    except (KeyError, ValueError):
        return {}
    padded = rows * tp
    return {
        "num_layers": 1 + max(layer_index(name) or 0 for name in shapes),
        "hidden_size": hidden,
        "ffn_hidden_size": ffn * tp,
        "num_attention_heads": hidden // _OLD_HEAD_DIM,
        "max_position_embeddings": positions,
        "padded_vocab_size": padded,
        "vocab_size": _GPT2_VOCAB if padded == padded_rows(_GPT2_VOCAB, 128, tp) else None,
        "tensor_model_parallel_size": tp,
    }


def _interleaved_qkv(tensor: Tensor, version: float, heads: int, path: Path) -> Tensor:
    """Returns the order of today, [head, (q, k, v), dim], from [(q, k, v), head, dim] of version 0 or [head, dim, (q, k, v)] of 1."""
    if not heads or tensor.shape[0] % (3 * heads):
        raise CheckpointError(
            f"{path} has {tensor.shape[0]} rows of queries, keys and values for {heads} heads. Copy it again."
        )
    stored = (3, heads, -1) if version < 1 else (heads, -1, 3)
    parts = tensor.unflatten(0, stored)
    return parts.transpose(*((0, 1) if version < 1 else (1, 2))).flatten(0, 2)


def _num_weights(chunk: Mapping[str, Tensor], experts_per_rank: int) -> int:
    """Counts the weights in a dictionary, of which some may stack all experts of a rank."""
    return sum(
        min(experts_per_rank, tensor.numel()) if _GROUPED_MLP.match(name) else 1 for name, tensor in chunk.items()
    )


def _parallel_sizes(step: Path, arguments: Mapping[str, Any]) -> _ParallelSizes:
    """Determines the parallel sizes, with one folder for each rank."""
    sizes = _ParallelSizes(
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
    if min(sizes.tp, sizes.pp, sizes.ep) < 1 or ranks > _MAX_RANKS_PER_FOLDER * len(there):
        raise CheckpointError(f"{step} is incomplete: {layout}, but there are {len(there)} ranks. Copy all folders.")
    wanted = {sizes.folder(tp, pp, ep) for tp in range(sizes.tp) for pp in range(sizes.pp) for ep in range(sizes.ep)}
    if wanted - there:
        raise CheckpointError(
            f"{step} is incomplete: {layout}, but {abbreviate_names(wanted - there)} is missing. Copy the folders of all ranks."
        )
    if there - wanted:
        raise CheckpointError(
            f"{step} holds ranks of another layout: {layout}, but there is also {abbreviate_names(there - wanted)}. "
            "Keep only the folders that one run wrote."
        )
    return sizes


def _model_chunks(path: Path, version: float, heads: int) -> list[dict[str, Tensor]]:
    """Returns the weights of a rank, one dictionary per virtual stage, under mcore names with local indices.

    heads: of a rank, to reorder the queries, keys and values of old versions by.
    """
    content = load_torch_file(path)
    keys = _chunk_keys(content, path)
    if version < _INTERLEAVED_VERSION and any(
        str(name).startswith("decoder.") for key in keys for name in content[key]
    ):
        raise CheckpointError(
            f"{path} has names of Megatron-Core and checkpoint version {version:g}, which is older. Save it with "
            "checkpoint_version 3.0, if its queries, keys and values are in today's order."
        )
    return _translate([content[key] for key in keys], path, version=version, heads=heads)


def _chunk_keys(content: Mapping[str, Any], path: Path) -> list[str]:
    """Returns the keys of a rank's models, one per virtual stage."""
    keys = ["model"] if "model" in content else sorted(
        (key for key in content if re.fullmatch(r"model\d+", key)), key=lambda key: int(key[5:])
    )  # fmt: skip
    if not keys:
        raise CheckpointError(f"{path} has neither `model` nor `model0`. Is it a file of the optimizer alone?")
    return keys


def _translate(chunks: list[dict[str, Any]], path: Path, *, version: float, heads: int) -> list[dict[str, Tensor]]:
    """Gives the tensors of each virtual stage mcore names, and queries, keys and values today's order."""
    translated = [
        {
            expert_name: tensor
            for name, stored in _flat_tensors(chunk, path)
            for expert_name, tensor in _per_expert_names(mcore_name(name), stored)
        }
        for chunk in chunks
    ]
    if version >= _INTERLEAVED_VERSION:
        return translated
    return [
        {
            name: _interleaved_qkv(tensor, version, heads, path) if ".linear_qkv." in name else tensor
            for name, tensor in chunk.items()
        }
        for chunk in translated
    ]


def _flat_tensors(tree: Any, path: Path, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Flattens nested dictionaries, as before Megatron-Core, into dotted names; yields weights alone, in their order."""
    if not isinstance(tree, Mapping):
        raise CheckpointError(
            f"{path} has a {type(tree).__name__} where the model's weights should be. Is it Megatron's?"
        )
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat_tensors(value, path, f"{name}.")
        elif isinstance(value, Tensor) and is_weight(name):
            if value.numel() * value.dtype.itemsize > value.untyped_storage().nbytes():
                raise CheckpointError(f"{path}: {name} has more values than the file has bytes for. Copy it again.")
            yield name, value


def _per_expert_names(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields one name per expert, for any of Megatron's three ways of storing experts."""
    if (match := _SEQUENTIAL_MLP.match(name)) is not None:
        yield f"{match[1]}.{match[2]}.{match[3]}", tensor
    elif (match := _TE_GROUPED_MLP.match(name)) is not None:
        yield f"{match[1]}.{match[4]}.{match[2]}.{match[3]}", tensor
    else:
        yield name, tensor


def _unsharded_weights(
    rank_files: _RankFiles, expected: Mapping[str, MegatronWeight]
) -> Iterator[tuple[str, LazyWeight]]:
    virtual_stages = {len(chunks) for chunks in rank_files.files.values()}
    if len(virtual_stages) > 1:
        counts = abbreviate_names([str(count) for count in sorted(virtual_stages)])
        raise CheckpointError(f"{rank_files.step} mixes ranks of {counts} virtual stages. Copy the folders of one run.")
    first_layer = 0
    for virtual in range(virtual_stages.pop()):
        for pp in range(rank_files.sizes.pp):
            layers = 0
            for name, placed, shards, where in _stage_weights(rank_files, virtual, pp, first_layer):
                layers = max(layers, 1 + (-1 if (layer := layer_index(name)) is None else layer))
                yield placed, _unsharded_weight(placed, shards, expected.get(placed), where)
            first_layer += layers


def _stage_weights(
    rank_files: _RankFiles, virtual_stage: int, pp: int, first_layer: int
) -> Iterator[tuple[str, str, list[Tensor], str]]:
    """Yields each weight of a stage: its local name, its global name, the shards of all ranks, and the file of the first."""
    sizes = rank_files.sizes
    for ep in range(sizes.ep):
        where = rank_files.step / sizes.folder(0, pp, ep) / _FILE
        shards = [
            _split_grouped_mlp(rank_files.files[tp, pp, ep][virtual_stage], rank_files.experts_per_rank)
            for tp in range(sizes.tp)
        ]
        _check_same_names(shards, where)
        for name in shards[0]:
            layer = layer_index(name)
            placed = name if layer is None else with_layer(name, first_layer + layer)
            expert = _ONE_EXPERT.match(placed)
            if expert is not None:
                placed = f"{expert[1]}.{ep * rank_files.experts_per_rank + int(expert[2])}.{expert[3]}"
            elif ep > 0:
                continue
            yield name, placed, [shard[name] for shard in shards], str(where)


def _check_same_names(ranks: list[dict[str, Tensor]], where: Path) -> None:
    for rank in ranks[1:]:
        if different := rank.keys() ^ ranks[0].keys():
            raise CheckpointError(
                f"The tensor-parallel ranks beside {where} do not hold the same weights: {abbreviate_names(different)}. "
                "Copy the folders of one step of one run."
            )


def _split_grouped_mlp(chunk: dict[str, Tensor], experts_per_rank: int) -> dict[str, Tensor]:
    """Splits `weight1` and `weight2`, which stack all experts of a rank as [in, out] matrices; others are unchanged.

    `weight1` has the shape [in, experts x out] but its memory is [experts, in, out].
    """
    apart: dict[str, Tensor] = {}
    for name, tensor in chunk.items():
        match = _GROUPED_MLP.match(name)
        if match is None or not experts_per_rank:
            apart[name] = tensor
            continue
        if tensor.numel() < experts_per_rank:
            raise CheckpointError(
                f"{name} has {tensor.numel()} values for {experts_per_rank} experts. Copy the checkpoint again."
            )
        inner = tensor.shape[0] if match[2] == "1" else tensor.shape[0] // experts_per_rank
        for expert, matrix in enumerate(tensor.reshape(experts_per_rank, inner, -1)):
            apart[f"{match[1]}.{expert}.linear_fc{match[2]}.weight"] = matrix.t()
    return apart


def _unsharded_weight(name: str, shards: list[Tensor], expected: MegatronWeight | None, where: str) -> LazyWeight:
    if any(shard.shape != shards[0].shape or shard.dtype != shards[0].dtype for shard in shards):
        forms = abbreviate_names([f"{list(shard.shape)} of {shard.dtype}" for shard in shards])
        raise CheckpointError(
            f"{name} in {where} differs from that of the other tensor-parallel ranks: {forms}. "
            "Copy the folders of one step of one run."
        )
    layout = stored_layout(expected, tuple(shards[0].shape))
    shape = unsharded_shape(layout, tuple(shards[0].shape), len(shards))
    rows = () if expected is None else expected.rows
    return LazyWeight(shape, shards[0].dtype, where, partial(unshard, layout, shards, rows))
