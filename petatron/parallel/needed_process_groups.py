"""The mesh axes that a run communicates over: their process groups exist before its first step."""

from __future__ import annotations

from collections.abc import Mapping

from petatron.config import RunConfig
from petatron.config.declared_optimizers import rule_spec
from petatron.sharding.shard_spec import Placement


def used_axes(run: RunConfig, placements: Mapping[str, Placement]) -> list[str]:
    """Returns them in one order for all ranks, since creating a group is a rendezvous of its members.

    Gradient reductions over blocks of ranks differ between pipeline stages (`ends`, `tp/2`); a block's ranks are of one stage, or are
    its ends.
    """
    parallel, axes = run.parallel, ["tp", "cp", "pp", "dp_cp"]
    if parallel.cp_comm_type == "a2a+p2p" and parallel.context_parallel_size > 1:
        heads = (parallel.hierarchical_context_parallel_sizes or (1,))[0]
        axes += [f"cp/{heads}", f"cp%{heads}"]
    if parallel.data_parallel_sharding_strategy != "no_shard":
        axes += ["shard", "dp_outer"]
    if run.moe.num_experts is not None:
        axes += ["ep_etp", "sequence", "stage", "edp"]
        if rule_spec(run.optim).unit != "element":  # it needs more of an expert's matrix than one rank's shard
            axes.append("etp")
        if parallel.data_parallel_sharding_strategy != "no_shard":
            axes.append("edp_shard")
    reduced = {shard.grad_reduce_axis for placement in placements.values() for shard in placement.tensor_shards}
    return [*axes, *sorted(name for name in reduced if name is not None and name not in axes), "world"]
