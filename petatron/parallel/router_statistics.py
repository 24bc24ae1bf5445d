"""What the routers of all layers did in a step, summed over every rank: for the log, and for balancing by bias.

Reports of layers are added up over micro-batches where they arise. One small all-reduce per step, in which every rank
fills the rows of the layers it holds, tells every rank about all layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from petatron.layers.moe.load_balancing import expert_bias_update, expert_counts, statistics_length
from petatron.layers.moe.moe_layer import MoELayer
from petatron.mesh import collectives
from petatron.mesh.mesh import ParallelMesh
from petatron.models.decoder import Decoder


class RouterStatistics:
    """The routers of this rank's layers, and the sums of the last step over all ranks."""

    def __init__(
        self, stages: Mapping[int, Decoder], layers: Sequence[int], num_experts: int, mesh: ParallelMesh
    ) -> None:
        """`layers` are the numbers of all mixtures of experts in the model."""
        self.layers = tuple(layers)
        self._statistics_length = statistics_length(num_experts)
        self.totals: Tensor | None = None  # [layers, report], as in `load_balancing.router_statistics`
        self._mesh = mesh
        self._routers = {
            module.layer_index: module.router
            for stage in stages.values()
            for module in stage.modules()
            if isinstance(module, MoELayer)
        }

    @torch.no_grad()
    def update(self, statistics: Mapping[int, Tensor]) -> None:
        """Take a step's reports; experts that were chosen too often are made less likely where that is asked for."""
        if not self.layers:
            return
        totals = torch.zeros(len(self.layers), self._statistics_length, dtype=torch.float64, device=self._mesh.device)
        for row, layer in enumerate(self.layers):
            if layer in statistics:
                totals[row] = statistics[layer]
        self.totals = totals = collectives.all_reduce(totals, self._mesh.world)
        for row, layer in enumerate(self.layers):
            router = self._routers.get(layer)
            if router is not None and router.expert_bias is not None:
                counts = expert_counts(totals[row])
                rate = router.moe.moe_router_bias_update_rate
                router.expert_bias.copy_(expert_bias_update(router.expert_bias, counts, rate))

    def expert_biases(self) -> Iterator[tuple[str, Tensor]]:
        """What routers have learnt beside their weights, by name; equal on all ranks that hold the layer."""
        for layer, router in self._routers.items():
            if router.expert_bias is not None:
                yield f"layers.{layer}.mlp.router.expert_bias", router.expert_bias
