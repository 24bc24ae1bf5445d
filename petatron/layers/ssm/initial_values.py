"""Initial values of a Mamba-2 layer's decays and step sizes, as functions of (seed, name, index) like all others."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from petatron.sharding.initial_values import draw_uniform_shard
from petatron.sharding.shard_spec import TensorShard


@dataclass(frozen=True, slots=True)
class LogDecayValues:
    """log(a) with a uniform in [low, high): a head's decay is exp(-a dt)."""

    low: float = 1.0
    high: float = 16.0

    def fill(self, out: Tensor, shard: TensorShard, *, seed: int) -> None:
        out.copy_((draw_uniform_shard(shard, seed=seed) * (self.high - self.low) + self.low).log())


@dataclass(frozen=True, slots=True)
class StepBiasValues:
    """The bias b for which softplus(b) is log-uniform in [low, high), and at least `floor`."""

    low: float = 1e-3
    high: float = 1e-1
    floor: float = 1e-4

    def fill(self, out: Tensor, shard: TensorShard, *, seed: int) -> None:
        logs = math.log(self.low) + draw_uniform_shard(shard, seed=seed) * (math.log(self.high) - math.log(self.low))
        steps = logs.exp().clamp(min=self.floor)
        # The inverse of softplus, log(e^s - 1), without the loss of digits of e^s - 1 for small s.
        out.copy_(steps + torch.log(-torch.expm1(-steps)))
