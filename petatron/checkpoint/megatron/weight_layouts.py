"""How a Megatron weight is made of logical tensors, and how tensor-parallel ranks share it.

qkv         [groups x (heads per group + 2) x width, ...]: for each key/value head its query heads, the key, the value
gated       gate | up, each cut over the ranks, so that a rank holds its part of the gate and then its part of up
vocabulary  rows are token ids, padded at the end to a multiple that depends on the number of ranks
column      cut along dimension 0
row         cut along dimension 1
whole       every rank has all of it
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from petatron.checkpoint.megatron.weight_names import Kind, Weight
from petatron.config.schema.model import ModelConfig
from petatron.sharding.shard_spec import Shape


def unpack(weight: Weight, whole: Tensor, part: int, model: ModelConfig) -> Tensor:
    """The logical tensor `weight.logical[part]` (one expert of it, if the weight is an expert's)."""
    if weight.kind == "vocabulary":
        return whole[: weight.shape[0]]
    if weight.kind == "gated":
        return whole.chunk(2)[part]
    if weight.kind != "qkv":
        return whole
    per_group = _per_group(model)
    grouped = whole.unflatten(0, (model.num_query_groups or 0, per_group + 2, model.kv_channels or 0))
    heads = grouped[:, :per_group] if part == 0 else grouped[:, per_group + part - 1]
    return heads.reshape(-1, *whole.shape[1:])


def pack(weight: Weight, parts: Sequence[Tensor], model: ModelConfig, *, rows: int) -> Tensor:
    """The whole weight from its logical tensors; `rows` is the vocabulary with its padding, which becomes zero."""
    if weight.kind == "vocabulary":
        (table,) = parts
        padding = table.new_zeros((rows - table.shape[0], *table.shape[1:]))
        return torch.cat((table, padding)) if len(padding) else table
    if weight.kind == "gated":
        return torch.cat(tuple(parts))
    if weight.kind != "qkv":
        return parts[0]
    split = (model.num_query_groups or 0, -1, model.kv_channels or 0)
    return torch.cat([part.unflatten(0, split) for part in parts], dim=1).flatten(0, 2)


def _per_group(model: ModelConfig) -> int:
    assert model.num_query_groups is not None
    return model.num_attention_heads // model.num_query_groups


def cut_dim(kind: Kind) -> int | None:
    """The dimension that tensor-parallel ranks share."""
    return {"whole": None, "row": 1}.get(kind, 0)


def joined_shape(kind: Kind, shard: Shape, tp: int) -> Shape:
    """The shape of the whole from that of one of `tp` shards."""
    dim = cut_dim(kind)
    return tuple(size * tp if at == dim else size for at, size in enumerate(shard))


def join(kind: Kind, shards: Sequence[Tensor]) -> Tensor:
    """The whole weight from the shards of all tensor-parallel ranks."""
    dim = cut_dim(kind)
    if dim is None or len(shards) == 1:
        return shards[0]
    if kind == "gated":
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([half for side in zip(*halves) for half in side])
    return torch.cat(tuple(shards), dim=dim)


def cut(kind: Kind, whole: Tensor, *, tp: int, rank: int) -> Tensor:
    """One rank's shard, as memory of its own."""
    dim = cut_dim(kind)
    if dim is None or tp == 1:
        return whole.contiguous()
    if kind == "gated":
        return torch.cat([half.chunk(tp)[rank] for half in whole.chunk(2)])
    return whole.chunk(tp, dim=dim)[rank].clone(memory_format=torch.contiguous_format)
