"""The layouts of Megatron's weights: how logical tensors are fused in one, and how it is sharded over tensor-parallel ranks.

qkv              [groups x (heads per group + 2) x width, ...]: for each key/value head its query heads, the key, the value
sections         logical tensors one after another (gate | up, z | x | B | C | dt), each sharded: a rank has its shard of every one
vocabulary       rows are token ids, padded at the end to a multiple that depends on the number of ranks
column           sharded along dimension 0
row              sharded along dimension 1
whole            replicated
whole_or_column  one or the other by Megatron's version, which the shape of a shard tells; written replicated
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from petatron.checkpoint.megatron.weight_names import MegatronWeight, WeightLayout
from petatron.config.schema.model import ModelConfig
from petatron.sharding.shard_spec import Shape


def extract_logical(weight: MegatronWeight, full_weight: Tensor, logical_index: int, model: ModelConfig) -> Tensor:
    """Extracts the logical tensor `weight.logical_names[logical_index]` (one expert of it, if the weight is an expert's)."""
    if weight.layout == "vocabulary":
        return full_weight[: weight.shape[0]]
    if weight.layout == "sections":
        return full_weight.split(weight.rows)[logical_index]
    if weight.layout != "qkv":
        return full_weight
    per_group = model.num_attention_heads // model.num_query_groups
    grouped = full_weight.unflatten(0, (model.num_query_groups, per_group + 2, model.kv_channels))
    heads = grouped[:, :per_group] if logical_index == 0 else grouped[:, per_group + logical_index - 1]
    return heads.reshape(-1, *full_weight.shape[1:])


def fuse_logical(
    weight: MegatronWeight, parts: Sequence[Tensor], model: ModelConfig, *, padded_vocab_size: int
) -> Tensor:
    """Fuses logical tensors into the full weight; `padded_vocab_size` includes the padding, which becomes zero."""
    if weight.layout == "vocabulary":
        (table,) = parts
        padding = table.new_zeros((padded_vocab_size - table.shape[0], *table.shape[1:]))
        return torch.cat((table, padding)) if len(padding) else table
    if weight.layout == "sections":
        return torch.cat(tuple(parts))
    if weight.layout != "qkv":
        return parts[0]
    split = (model.num_query_groups, -1, model.kv_channels)
    return torch.cat([part.unflatten(0, split) for part in parts], dim=1).flatten(0, 2)


def shard_dim(layout: WeightLayout) -> int | None:
    """Returns the dimension that is sharded over tensor-parallel ranks."""
    return {"whole": None, "whole_or_column": None, "row": 1}.get(layout, 0)


def stored_layout(weight: MegatronWeight | None, shard_shape: Shape) -> WeightLayout:
    """Returns the layout of a weight that is stored in shards of this shape; one that no model of ours has is replicated."""
    if weight is None:
        return "whole"
    if weight.layout != "whole_or_column":
        return weight.layout
    return "whole" if shard_shape[:1] == weight.shape[:1] else "column"


def unsharded_shape(layout: WeightLayout, shard_shape: Shape, tp: int) -> Shape:
    """Returns the full shape from that of one of `tp` shards."""
    dim = shard_dim(layout)
    return tuple(size * tp if at == dim else size for at, size in enumerate(shard_shape))


def unshard(layout: WeightLayout, shards: Sequence[Tensor], rows: Sequence[int] = ()) -> Tensor:
    """Returns the full weight from the shards of all tensor-parallel ranks; rows: of its sections, whole."""
    dim = shard_dim(layout)
    if dim is None or len(shards) == 1:
        return shards[0]
    if layout == "sections":
        parts = [shard.split([size // len(shards) for size in rows]) for shard in shards]
        return torch.cat([part for section in zip(*parts, strict=True) for part in section])
    return torch.cat(tuple(shards), dim=dim)


def shard_weight(weight: MegatronWeight, full_weight: Tensor, *, tp: int, tp_rank: int) -> Tensor:
    """Returns one rank's shard, in its own memory."""
    dim = shard_dim(weight.layout)
    if dim is None or tp == 1:
        return full_weight.contiguous()
    if weight.layout == "sections":
        return torch.cat([section.chunk(tp)[tp_rank] for section in full_weight.split(weight.rows)])
    return full_weight.chunk(tp, dim=dim)[tp_rank].clone(memory_format=torch.contiguous_format)
