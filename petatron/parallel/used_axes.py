"""Which axes of the mesh a run communicates over: the groups that exist before its first step."""

from __future__ import annotations

from collections.abc import Mapping

from petatron.config import RunConfig
from petatron.sharding.shard_spec import Placement


def used_axes(run: RunConfig, placements: Mapping[str, Placement]) -> list[str]:
    """In one order for all ranks of the world, since making a group is a rendezvous of its members.

    Sums over blocks of ranks differ between pipeline stages (`ends`, `tp/2`); ranks of one block are of one stage, or are its ends.
    """
    parallel, axes = run.parallel, ["tp", "cp", "pp", "dp_cp"]
    if parallel.cp_comm_type == "a2a+p2p":
        heads = (parallel.hierarchical_context_parallel_sizes or (1,))[0]
        axes += [f"cp/{heads}", f"cp%{heads}"]
    if parallel.data_parallel_sharding_strategy != "no_shard":
        axes += ["shard", "dp_outer"]
    if run.moe.num_experts is not None:
        axes += ["ep_etp", "sequence", "stage", "edp"]
        if parallel.data_parallel_sharding_strategy != "no_shard":
            axes.append("edp_shard")
    summed = {piece.grad_reduce_axis for placement in placements.values() for piece in placement.tensor_shards}
    return [*axes, *sorted(name for name in summed if name is not None and name not in axes), "world"]
