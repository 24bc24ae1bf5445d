"""Averages the losses that layers other than experts compute over a step, for the log.

A rank has a share of each loss; the shares of all ranks and micro-batches add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from petatron.layers.forward_context import StatisticsKey
from petatron.mesh import collectives
from petatron.mesh.mesh import ParallelMesh


class LayerLosses:
    """The last step's losses by name, each a mean over the layers that have it and over micro-batches."""

    def __init__(self, num_layers: Mapping[str, int], mesh: ParallelMesh) -> None:
        """num_layers: how many layers of the whole model have each loss."""
        self._num_layers = dict(num_layers)
        self._mesh = mesh
        self.means: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, statistics: Mapping[StatisticsKey, Tensor], *, micro_batches: int) -> None:
        """All-reduces the losses of a step; every data-parallel rank has run `micro_batches` micro-batches."""
        if not self._num_layers:
            return
        totals = torch.stack([self._total(name, statistics) for name in self._num_layers])
        totals = collectives.all_reduce(totals, self._mesh.world)
        counts = [layers * micro_batches * self._mesh.dp.size for layers in self._num_layers.values()]
        self.means = {name: total / count for name, total, count in zip(self._num_layers, totals, counts)}

    def _total(self, name: str, statistics: Mapping[StatisticsKey, Tensor]) -> Tensor:
        values: Sequence[Tensor] = [
            x.sum() for key, x in statistics.items() if not isinstance(key, int) and key[0] == name
        ]
        zero = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        return torch.stack([zero, *values]).sum()
