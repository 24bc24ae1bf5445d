"""Router statistics of all layers in a step, summed over every rank: for the log, and for load balancing by bias.

Statistics of a layer are summed over micro-batches where they are computed. One small all-reduce per step, in which every rank
fills the rows of its layers, gives every rank those of all layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from petatron.layers.forward_context import StatisticsKey
from petatron.layers.moe.load_balancing import expert_bias_update, expert_counts, statistics_length
from petatron.layers.moe.moe_layer import RoutesTokens
from petatron.mesh import collectives
from petatron.mesh.mesh import ParallelMesh
from petatron.models.stage_interface import StageModule


class RouterStatistics:
    """The routers of this rank's layers, and the last step's statistics over all ranks."""

    def __init__(
        self, stages: Mapping[int, StageModule], layers: Sequence[int], num_experts: int, mesh: ParallelMesh
    ) -> None:
        """`layers` are the indices of all MoE layers of the model."""
        self.layers = tuple(layers)
        self._statistics_length = statistics_length(num_experts)
        self.totals: Tensor | None = None  # [layers, statistics], as in `load_balancing.router_statistics`
        self._mesh = mesh
        modules = (module for stage in stages.values() for module in stage.modules())
        self._routers = dict(module.indexed_router() for module in modules if isinstance(module, RoutesTokens))

    @torch.no_grad()
    def update(self, statistics: Mapping[StatisticsKey, Tensor]) -> None:
        """All-reduces a step's statistics; updates the expert biases of routers that have one and are not frozen."""
        if not self.layers:
            return
        totals = torch.zeros(len(self.layers), self._statistics_length, dtype=torch.float64, device=self._mesh.device)
        for row, layer in enumerate(self.layers):
            if layer in statistics:
                totals[row] = statistics[layer]
        self.totals = totals = collectives.all_reduce(totals, self._mesh.world)
        for row, layer in enumerate(self.layers):
            router = self._routers.get(layer)
            if router is not None and router.expert_bias is not None and router.weight.requires_grad:
                counts = expert_counts(totals[row])
                rate = router.moe.moe_router_bias_update_rate
                router.expert_bias.copy_(expert_bias_update(router.expert_bias, counts, rate))

    def expert_biases(self) -> Iterator[tuple[str, Tensor]]:
        """Yields expert biases by name; equal on all ranks that have the layer."""
        for layer, router in self._routers.items():
            if router.expert_bias is not None:
                yield f"layers.{layer}.mlp.router.expert_bias", router.expert_bias
