"""Page-locked host memory that a run's offload takes, and what a node has: a budget like that of the device.

Every rank pins memory for the activations of offloaded layers, for all micro-batches in flight, and for its offloaded optimizer state. The
ranks of a node share its memory, of which a fifth is left for processes, data and the page cache. A disk (`--optimizer-nvme-offload`)
takes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from petatron.config import RunConfig
from petatron.config.pipeline_stages import pipeline_stages
from petatron.estimate.memory.forecast import DeviceKind, stages_per_rank
from petatron.estimate.offload_plan import offloaded_bytes
from petatron.estimate.recompute_plan import RecomputePlan
from petatron.estimate.state_bytes import state_bytes
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.models.registry import model_spec

DEVICES_PER_NODE = 8
_USABLE_SHARE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """The memory of a node, and the ranks that share it."""

    total_bytes: int
    ranks_per_node: int

    @property
    def bytes_per_rank(self) -> int:
        """What a rank may pin."""
        return int(_USABLE_SHARE * self.total_bytes) // self.ranks_per_node


def ranks_per_node(run: RunConfig) -> int:
    """Returns the ranks of a node: as many as are started on each of several, else no more than 8 devices."""
    launch, world = run.launch, run.parallel.world_size
    if launch.nnodes > 1:
        return max(1, world // launch.nnodes)
    return min(world, DEVICES_PER_NODE)


def pinned_activation_bytes(run: RunConfig, plans: Sequence[RecomputePlan], *, device: DeviceKind) -> int:
    """Returns what the rank that pins most has of activations; `plans` are those of all stages."""
    number = run.memory.cpu_offloading_num_layers
    if number == 0:
        return 0
    spec, shape, stages = model_spec(run), ActivationShape.from_config(run, device=device), pipeline_stages(run)
    return max(
        sum(
            plans[index].in_flight * offloaded_bytes(plans[index], shape, spec.stage_layers(stages[index]), number)
            for index in local
        )
        for local in stages_per_rank(run)
    )


def pinned_optimizer_bytes(run: RunConfig) -> int:
    """Returns what the rank that pins most has of optimizer state."""
    if not run.memory.optimizer_cpu_offload:
        return 0
    on_device = replace(run, memory=replace(run.memory, optimizer_cpu_offload=False, optimizer_nvme_offload=None))
    stages = pipeline_stages(run)
    ranks = [[stages[index] for index in local] for local in stages_per_rank(run)]
    return max(state_bytes(on_device, rank).optimizer - state_bytes(run, rank).optimizer for rank in ranks)
