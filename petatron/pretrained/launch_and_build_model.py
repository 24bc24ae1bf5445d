"""Joins the ranks, builds the mesh, and builds a model on it, with or without initial weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import torch

from petatron.base.device import detect_device
from petatron.config import RunConfig
from petatron.config.nccl_communicators import communicator_options
from petatron.config.optimizer_registry import rule_spec
from petatron.config.pipeline_stages import pipeline_stages
from petatron.data.tokenizer import Tokenizer
from petatron.estimate.recompute_plan import plan_recompute
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.mesh.launch.environment import read_environment
from petatron.mesh.launch.process_group import start_process_group
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.mesh.rng import RandomStreams
from petatron.models.frozen_params import everything_frozen, frozen_logical_names, frozen_params
from petatron.models.objective import Objective, model_objective
from petatron.models.optimizer_groups import OptimizerGroupRule, optimizer_group
from petatron.models.registry import model_spec
from petatron.models.uses_random_numbers import uses_random_numbers
from petatron.optim.loss_scaler import compute_dtype
from petatron.parallel.layer_losses import LayerLosses
from petatron.parallel.parallelize import parallelize
from petatron.parallel.pipeline.enable_cuda_graphs import enable_requested_cuda_graphs
from petatron.parallel.router_statistics import RouterStatistics
from petatron.pretrained.adapter_magnitudes import quantize_frozen, set_magnitudes
from petatron.pretrained.saveable_model import Model
from petatron.schedule.pipeline_plan import num_micro_batches, pipeline_plan
from petatron.sharding.shard_spec import Placement
from petatron.validate.layer_capabilities import check_training


class HasConfig(Protocol):
    """A run with a config and a tokenizer, such as `petatron.load` returns."""

    tokenizer: Tokenizer | None

    @property
    def config(self) -> RunConfig: ...


def config_of(run: RunConfig | HasConfig) -> RunConfig:
    """Returns the config: functions of the public API take a run or its config."""
    return run if isinstance(run, RunConfig) else run.config


def launch(run: RunConfig | HasConfig) -> ParallelMesh:
    """Joins the other ranks, if any, and builds the mesh of this run's layout.

    >>> import petatron
    >>> launch(petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])).describe()
    'one device (1 rank)'
    """
    run = config_of(run)
    return ParallelMesh(Layout.from_config(run.parallel), read_environment().rank, **join_ranks(run))


def join_ranks(run: RunConfig) -> dict[str, Any]:
    """Joins the other ranks, if any, and returns what every mesh of this rank has in common: device, backend, time limit and options."""
    environment = read_environment()
    device_info = detect_device(run.train.device, local_rank=environment.local_rank // run.launch.ranks_per_device)
    backend = start_process_group(
        environment,
        backend=run.parallel.distributed_backend,
        timeout_minutes=run.parallel.distributed_timeout_minutes,
        device_type=device_info.kind,
        deterministic=run.train.deterministic_mode,
        ranks_per_device=run.launch.ranks_per_device,
    )
    device = torch.device("cuda", torch.cuda.current_device()) if device_info.kind == "cuda" else torch.device("cpu")
    return {
        "device": device,
        "backend": backend,
        "timeout_minutes": run.parallel.distributed_timeout_minutes,
        "options": communicator_options(run.parallel),
    }


def build_initial_model(
    run: RunConfig,
    mesh: ParallelMesh,
    *,
    init_weights: bool = True,
    gradients: bool = True,
    group_rule: OptimizerGroupRule | None = None,
) -> Model:
    """Builds the model of `build_model` without loading: for callers that load all state of a run."""
    # CUDA graphs cannot read RNG states during capture, so only they rely on knowing whether the step draws.
    uses_rng = uses_random_numbers(run) or run.train.cuda_graphs != "on"
    streams = RandomStreams.seeded(run.train.seed, mesh, used_in_step=uses_rng)
    plan = pipeline_plan(run)
    dtype = compute_dtype(run.precision)
    spec, stages = model_spec(run), pipeline_stages(run)
    check_training(run, spec)
    local_stages = [number for number in range(len(stages)) if plan.rank_of(number) == mesh.pp.rank]
    with torch.device("meta"):
        modules = {number: spec.build_stage(stages[number]) for number in local_stages}
    frozen = frozen_params(run) if gradients else everything_frozen(spec)
    io = frozen.with_boundaries(spec.io(stages), spec, stages)
    objective = model_objective(run, io)
    in_flight = plan.in_flight(num_micro_batches(run))
    shape = ActivationShape.from_config(run, device="cuda" if mesh.device.type == "cuda" else "cpu")
    plan_stage = partial(plan_recompute, run.memory, spec, shape, num_local_stages=len(local_stages), frozen=frozen)
    parts = parallelize(
        modules,
        spec,
        mesh,
        run,
        dtype=dtype,
        rng_streams=streams,
        recompute_plans={n: plan_stage(stages[n], in_flight=in_flight[n]) for n in local_stages},
        optimizer_group=group_rule or partial(optimizer_group, run.optim),
        frozen=frozen,
        tied_across_ranks=plan.rank_of(0) != plan.rank_of(len(stages) - 1),
        init_weights=init_weights,
    )
    mesh.create_groups(used_axes(run, parts.placements, objective))
    model = Model(
        modules,
        parts,
        plan,
        RouterStatistics(modules, spec.moe_layers, run.moe.num_experts or 0, mesh),
        mesh,
        streams,
        io=io,
        spec=spec,
        dtype=dtype,
        sequence_parallel=run.parallel.sequence_parallel,
        objective=objective,
        layer_losses=LayerLosses(spec.num_layers_by_aux_loss, mesh),
    )
    model.frozen_tensors, model.has_gradients = frozenset(frozen_logical_names(spec, frozen)), gradients
    model.frozen_format = run.model.adapter_base_format if gradients else None
    if init_weights:
        set_magnitudes(model)
        quantize_frozen(model)
    enable_requested_cuda_graphs(run, model)
    return model


def used_axes(run: RunConfig, placements: Mapping[str, Placement], objective: Objective | None = None) -> list[str]:
    """Returns the mesh axes that a run communicates over; their process groups are created before the first step.

    The order is the same on all ranks, since creating a group is a rendezvous of its members.

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
        if rule_spec(run.optim).unit != "element":  # the update rule needs whole matrices of experts
            axes.append("etp")
        if parallel.data_parallel_sharding_strategy != "no_shard":
            axes.append("edp_shard")
    if objective is not None and objective.reads_all_samples:
        axes.append("dp")
    reduced = {shard.grad_reduce_axis for placement in placements.values() for shard in placement.tensor_shards}
    return [*axes, *sorted(name for name in reduced if name is not None and name not in axes), "world"]
