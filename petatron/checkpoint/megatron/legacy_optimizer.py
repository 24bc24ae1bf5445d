"""The optimizer state of one rank of a legacy checkpoint, given the names of the weights that it belongs to.

Legacy files tell the owner of state by order alone. A model's parameters come in the order of its state dictionary, which the same file
has. They form groups: biases and vectors have no weight decay; embedding and output head may have a learning rate of their own, and
experts an optimizer of their own.

A plain optimizer numbers the parameters group by group, and each number has its moments. The distributed optimizer has flat buffers in
`distrib_optim.pt`, one for each virtual stage and dtype, in which parameters follow each other from the last to the first:

    a parameter begins at a multiple of 64 elements; a bucket ends when it has `--ddp-bucket-size` elements, and the next begins at a
    multiple of 128 and of the data-parallel size; the padding at the end of buckets is not in the file. An embedding that is tied over
    pipeline stages is a bucket of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.base.untrusted_files import is_count
from petatron.checkpoint.megatron.lazy_weight import STATE_KINDS, StateKind
from petatron.checkpoint.megatron.optimizer_state import torch_state, unreadable_kind
from petatron.checkpoint.megatron.read_megatron_pickles import load_torch_object

DISTRIBUTED_FILE = "distrib_optim.pt"
_PARAM_ALIGNMENT, _BUCKET_ALIGNMENT = 64, 128
_MIN_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000
_EXPERT = re.compile(r"\.mlp\.experts\.")
_VOCABULARY = re.compile(r"(?:^|\.)(?:word_embeddings(?:_for_head)?|output_layer)\.weight$")
_BUFFER_KINDS: Mapping[StateKind, str] = {"master": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
RankState = Mapping[StateKind, Sequence[dict[str, Tensor]]]
"""Tensors of each kind by the names of the file's weights, one dictionary per virtual stage."""


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A parameter of a rank: its name, the virtual stage that has it, and its weight."""

    name: str
    chunk: int
    weight: Tensor

    @property
    def decays(self) -> bool:
        return self.weight.dim() > 1 and not self.name.endswith(".bias")

    @property
    def is_expert(self) -> bool:
        return _EXPERT.search(self.name) is not None

    @property
    def is_vocabulary(self) -> bool:
        return _VOCABULARY.search(self.name) is not None


def rank_optimizer_state(
    parts: Sequence[Mapping[str, Any]],
    chunks: Sequence[Mapping[str, Tensor]],
    path: Path,
    arguments: Mapping[str, Any],
    *,
    pp: int,
) -> RankState:
    """Names the state of the optimizers of a rank: `parts` are their dictionaries, `chunks` the weights of each virtual stage, in order."""
    tied_on_one_rank = not arguments.get("untie_embeddings_and_output_weights") and (
        int(arguments.get("pipeline_model_parallel_size") or 1) == 1
    )
    parameters = [
        _Parameter(name, number, weight)
        for number, chunk in enumerate(chunks)
        for name, weight in chunk.items()
        if not name.endswith(".expert_bias") and not (tied_on_one_rank and name.endswith("output_layer.weight"))
    ]
    state: dict[StateKind, list[dict[str, Tensor]]] = {kind: [{} for _ in chunks] for kind in STATE_KINDS}
    file = path.parent / DISTRIBUTED_FILE
    buffers = load_torch_object(file) if file.is_file() else None
    entries = (
        _plain_state(parts, parameters, path)
        if buffers is None
        else _buffer_state(buffers, parts, parameters, file, arguments, pp=pp)
    )
    for kind, parameter, tensor in entries:
        if tensor.shape != parameter.weight.shape:
            raise _mismatch(
                path, f"{parameter.name} is {list(parameter.weight.shape)}, its {kind} {list(tensor.shape)}"
            )
        state[kind][parameter.chunk][parameter.name] = tensor
    experts_alone = isinstance(buffers, list) and buffers[:1] == [None]
    names = [set(chunk) for chunk in state["exp_avg"]]
    owned = [parameter for parameter in parameters if parameter.is_expert or not experts_alone]
    missing = [parameter.name for parameter in owned if parameter.name not in names[parameter.chunk]]
    if missing:
        raise _mismatch(path, f"{missing[0]} has none")
    return state


def _mismatch(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"The optimizer state beside {path} is not that of its weights: {why}. Save it once with --ckpt-format torch_dist, where it "
        "has names, or convert the weights alone with --no-optim."
    )


def _plain_state(
    parts: Sequence[Mapping[str, Any]], parameters: Sequence[_Parameter], path: Path
) -> Iterator[tuple[StateKind, _Parameter, Tensor]]:
    groups = [group for part in parts for group in _groups(part, path)]
    apart = [flag for flag in ("is_expert_parallel", "is_decoupled_lr") if any(group.get(flag) for group in groups)]
    for part in parts:
        states, masters = torch_state(part).get("state"), part.get("fp32_from_fp16_params", part.get("fp32_from_fp16"))
        for number, group in enumerate(_groups(part, path)):
            members, places = _members(group, parameters, apart), group.get("params")
            if not isinstance(places, list) or not isinstance(states, Mapping) or len(places) != len(members):
                count = len(places) if isinstance(places, list) else "no"
                raise _mismatch(path, f"a group has {count} parameters, and the model {len(members)} of its kind")
            narrow = [member for member in members if member.weight.dtype != torch.float32]
            wide = masters[number] if isinstance(masters, list) and number < len(masters) else []
            if len(wide) != len(narrow):
                raise _mismatch(path, f"a group has {len(wide)} master weights for {len(narrow)} parameters of 16 bits")
            for member, tensor in zip(narrow, wide):
                yield "master", member, tensor
            for member, place in zip(members, places):
                moments = states.get(place, {})
                for kind in STATE_KINDS:
                    if kind in moments:
                        yield kind, member, moments[kind]


def _groups(part: Mapping[str, Any], path: Path) -> list[Mapping[str, Any]]:
    groups = torch_state(part).get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise _mismatch(path, "it has no param_groups")
    return groups


def _members(group: Mapping[str, Any], parameters: Sequence[_Parameter], apart: Sequence[str]) -> list[_Parameter]:
    """Returns the parameters of a group, in the model's order; apart: what other groups are apart for, besides weight decay."""
    decays = bool(group["wd_mult"] if "wd_mult" in group else group.get("pre_wd_mult", group.get("weight_decay", 1.0)))
    members = [parameter for parameter in parameters if parameter.decays == decays]
    if "is_expert_parallel" in apart:
        members = [member for member in members if member.is_expert == bool(group.get("is_expert_parallel"))]
    if "is_decoupled_lr" in apart:
        members = [member for member in members if member.is_vocabulary == bool(group.get("is_decoupled_lr"))]
    return members


def _buffer_state(
    buffers: Any,
    parts: Sequence[Mapping[str, Any]],
    parameters: Sequence[_Parameter],
    path: Path,
    arguments: Mapping[str, Any],
    *,
    pp: int,
) -> Iterator[tuple[StateKind, _Parameter, Tensor]]:
    """Cuts the flat buffers of a distributed optimizer into the state of its parameters."""
    separate_experts = len(parts) > 1
    for number, buffer in enumerate(buffers if isinstance(buffers, list) else [buffers]):
        if buffer is None:  # the first expert-parallel rank has what all of them have in common
            continue
        if not isinstance(buffer, Mapping) or not buffer.get("buckets_coalesced"):
            raise unreadable_kind("the buckets of a Megatron before 2024", path)
        members = [member for member in parameters if not separate_experts or member.is_expert == (number == 1)]
        by_buffer: dict[tuple[int, torch.dtype], list[_Parameter]] = {}
        for member in members:
            by_buffer.setdefault((member.chunk, member.weight.dtype), []).append(member)
        stored = [flat for key, dtypes in buffer.items() if is_count(key) for flat in dtypes.values()]
        if len(stored) != len(by_buffer):
            raise _mismatch(path, f"{len(stored)} buffers for the {len(by_buffer)} that the model makes")
        for (key, group), flat in zip(by_buffer.items(), stored):
            places = _buffer_places(
                group, flat.get("numel_unpadded"), arguments, path, first_stage=pp == 0 and not key[0]
            )
            for kind, name in _BUFFER_KINDS.items():
                for member, start in places:
                    values = flat[name][start : start + member.weight.numel()]
                    yield kind, member, values.view(member.weight.shape)


def _buffer_places(
    group: Sequence[_Parameter], size: Any, arguments: Mapping[str, Any], path: Path, *, first_stage: bool
) -> list[tuple[_Parameter, int]]:
    """Returns where each parameter begins in a buffer of `size` elements."""
    ranks = int(arguments.get("data_parallel_size") or 1)
    default = max(_MIN_BUCKET, _BUCKET_PER_RANK * ranks)
    bucketed = first_stage and bool(arguments.get("overlap_grad_reduce"))
    bucket_size = (arguments.get("ddp_bucket_size") or default) if bucketed else None
    tied = not arguments.get("untie_embeddings_and_output_weights") and (
        int(arguments.get("pipeline_model_parallel_size") or 1) > 1
    )
    padding = math.lcm(ranks, _BUCKET_ALIGNMENT, 1 << 16 if arguments.get("ddp_pad_buckets_for_high_nccl_busbw") else 1)
    layouts = [_laid_out(group, candidate, padding, tied=tied) for candidate in (bucket_size, None, default)]
    for places, total in layouts:
        if total == size:
            return places
    raise _mismatch(path, f"a buffer has {size} elements, and the parameters that belong there take {layouts[0][1]}")


def _laid_out(
    group: Sequence[_Parameter], bucket_size: int | None, padding: int, *, tied: bool
) -> tuple[list[tuple[_Parameter, int]], int]:
    """Lays parameters out as Megatron does; `total` leaves out the padding at the end of buckets, and so do the places."""
    places: list[tuple[_Parameter, int]] = []
    start = bucket = total = 0  # `start` and `bucket` count with all padding

    def close(end: int) -> int:
        nonlocal bucket, total
        total += end - bucket
        bucket = -(-end // padding) * padding
        return bucket

    open_members = 0
    for parameter in reversed(group):
        start = -(-start // _PARAM_ALIGNMENT) * _PARAM_ALIGNMENT
        alone = tied and parameter.is_vocabulary
        if alone and open_members:
            start, open_members = close(start), 0
        places.append((parameter, total + start - bucket))
        start += parameter.weight.numel()
        open_members += 1
        if alone or (bucket_size is not None and start - bucket >= bucket_size):
            start, open_members = close(start), 0
    if open_members:
        close(start)
    return places, total
