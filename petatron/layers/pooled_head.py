"""The head on whole sequences: a weighted sum of hidden states, a GEMM with tanh (BERT's pooler), and a GEMM to the outputs.

Weights of tokens come with the batch, so that the head knows neither which part of a sequence a rank has nor where it ends: 1 for the
first token (BERT), 1 / length for a mean. Every tensor-parallel rank computes the same from the sum.

It may also be applied to every token: the value of each state that a critic predicts.

Slots are the identity on one device, and filled by tensor and sequence parallelism: `shard` takes this rank's sequence shard of the
weights, `total` all-reduces the sums of the shards, `gather` gathers hidden states (`layers/parallel_slots.py`).

S sequence, B batch, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from petatron.layers.linear import Linear
from petatron.layers.parallel_slots import CommSlot, TensorSlot, identity
from petatron.layers.spec.param_spec import ParamSpec, linear_params, with_prefix
from petatron.layers.whole_sequence import WholeSequence
from petatron.sharding.shard_spec import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledHeadSpec:
    """num_outputs: 0 for none, where the pooled states are what is wanted."""

    hidden_size: int
    num_outputs: int
    std: float
    pooler: bool = True
    out_bias: bool = True

    def build(self) -> PooledHead:
        return PooledHead(self)

    def params(self) -> Mapping[str, ParamSpec]:
        width = self.hidden_size
        params = dict[str, ParamSpec]()
        if self.pooler:
            params |= with_prefix("pooler", linear_params(width, width, Shard(), bias=True, std=self.std))
        if self.num_outputs:
            out = linear_params(width, self.num_outputs, Shard(), bias=self.out_bias, std=self.std)
            params |= with_prefix("out", out)
        return params


class PooledHead(nn.Module):
    """Pools a sequence and predicts `num_outputs` logits of it."""

    tensor_slots: Mapping[str, TensorSlot] = {
        "shard": "sequence shard",
        "total": "sum of sequence shards",
        "gather": "whole sequence",
    }

    def __init__(self, spec: PooledHeadSpec) -> None:
        super().__init__()
        self.shard: CommSlot = identity
        self.total: CommSlot = identity
        self.gather: CommSlot = identity
        self.whole_sequence = WholeSequence()
        width, count = spec.hidden_size, spec.num_outputs
        self.pooler = Linear(width, (width,), bias=True) if spec.pooler else None
        self.out = Linear(width, (count,), bias=spec.out_bias) if count else None

    def weighted_sum(self, x_SBD: Tensor, weights_BS: Tensor) -> Tensor:
        """Returns [B, D], summed over this rank's context-parallel part of each sequence."""
        weights_SB = self.shard(weights_BS.t())
        return self.total(torch.einsum("sbd,sb->bd", x_SBD, weights_SB.to(x_SBD.dtype)))

    def forward(self, summed_BD: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the pooled states [B, D] of weighted sums, and the outputs [B, outputs] if there are any."""
        pooled_BD = summed_BD if self.pooler is None else torch.tanh(self.pooler(summed_BD))
        return pooled_BD, None if self.out is None else self.out(pooled_BD)

    def of_tokens(self, x_SBD: Tensor, length: int) -> Tensor:
        """Returns the outputs of every token of the whole sequence [S, B, outputs]; all ranks compute the same."""
        outputs = self(self.whole_sequence(x_SBD, length))[1]
        assert outputs is not None
        return outputs
