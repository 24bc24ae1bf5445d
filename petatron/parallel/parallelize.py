"""`parallelize`, the one ordered recipe that turns a model's stages on the meta device into this rank's initialized shards.

Order: stage split (the caller builds only this rank's stages) -> precision -> tensor/sequence parallel -> kernels and FP8 ->
context parallel -> expert parallel -> recompute -> activation offload -> materialize -> data parallel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from petatron.base.log import get_logger
from petatron.config.schema.parallel import FSDP_STRATEGIES
from petatron.config.schema.run import RunConfig
from petatron.estimate.offload_plan import plan_offload
from petatron.estimate.recompute_plan import RecomputePlan
from petatron.kernels.registry import KernelContext, choose_kernel
from petatron.layers.forward_context import ForwardContext
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.param_spec import ParamSpec
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rng import RandomStreams
from petatron.models.frozen_params import NOTHING_FROZEN, FrozenParams
from petatron.models.model_spec import ModelSpec
from petatron.models.optimizer_groups import OptimizerGroupRule
from petatron.models.stage_interface import StageModule
from petatron.parallel import tensor_parallel
from petatron.parallel.activation_offload import HostLink, apply_activation_offload
from petatron.parallel.activation_recompute import apply_recompute
from petatron.parallel.context import apply_context_parallel
from petatron.parallel.data.gradient_reduction import GradientReducer
from petatron.parallel.data.param_gather_wait import wait_for_params_before_use
from petatron.parallel.expert_parallel_token_dispatcher import apply_expert_parallel
from petatron.parallel.install_fp8_gemms import Fp8GemmSet, apply_fp8
from petatron.parallel.pipeline.combined_forward_backward import CombinedForwardBackward
from petatron.parallel.pipeline.weight_grad_queue import WeightGradQueue
from petatron.parallel.row_exchange import apply_row_sharding, row_axis, row_sharded_tables, set_row_grad_targets
from petatron.parallel.select_kernels import select_stage_kernels
from petatron.sharding.flat_buffer import FlatBufferOptions, FlatParamGroup, flatten_parameters
from petatron.sharding.flat_shard import ParameterGroup, group_tensor_shards
from petatron.sharding.fp8_gather import Fp8Weights
from petatron.sharding.initial_values import InitialValues
from petatron.sharding.optimizer_group_spec import FROZEN_GROUP, GroupSpec
from petatron.sharding.row_sharded_group import RowShardedGroup
from petatron.sharding.shard_spec import ModelParallelCoordinate, Placement, TensorShard

if TYPE_CHECKING:
    from petatron.parallel.data.fsdp_param_group import FsdpGradientReducer, FsdpParamGroup

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _ParamPlan:
    """Placements and optimizer groups by parameter, and initial values by logical tensor; without any, weights are zero."""

    placements: Mapping[str, Placement]
    groups: Mapping[str, GroupSpec]
    initial_values: Mapping[str, InitialValues] | None


@dataclass(frozen=True, slots=True)
class ParallelizeResult:
    """Placements and groups of parameters, and the reducer of their gradients.

    batch_invariant: the bits of a token depend on it and its document alone (`--exact-rollouts`).
    """

    placements: dict[str, Placement]
    param_groups: Sequence[ParameterGroup]
    gradient_reducer: GradientReducer | FsdpGradientReducer
    weight_grad_queue: WeightGradQueue
    fp8_gemms: Fp8GemmSet
    combined_passes: CombinedForwardBackward | None = None
    batch_invariant: bool = False


def parallelize(
    stages: Mapping[int, StageModule],
    spec: ModelSpec,
    mesh: ParallelMesh,
    run: RunConfig,
    *,
    dtype: torch.dtype,
    rng_streams: RandomStreams,
    recompute_plans: Mapping[int, RecomputePlan],
    optimizer_group: OptimizerGroupRule,
    frozen: FrozenParams = NOTHING_FROZEN,
    tied_across_ranks: bool = False,
    init_weights: bool = True,
) -> ParallelizeResult:
    """Applies every kind of parallelism of the mesh to this rank's stages of a model.

    `frozen` parameters have no gradients and no optimizer group. `tied_across_ranks`: first and last stage are on different ranks.
    Without `init_weights` all weights are zero.
    """
    parallel = run.parallel
    # A single process has no ranks to shard over, and no process group.
    fully_sharded = parallel.data_parallel_sharding_strategy in FSDP_STRATEGIES and mesh.world.size > 1
    weight_grad_queue = WeightGradQueue()
    placements: dict[str, Placement] = {}
    params: dict[str, ParamSpec] = {}
    for stage in stages.values():
        stage_params = frozen.apply(spec.params(stage.stage, tied_across_ranks=tied_across_ranks))
        params |= stage_params
        # Fully sharded parameters are the master weights; the precision of the run is that of their gathered copies.
        stage.to(torch.promote_types(dtype, torch.float32) if fully_sharded else dtype)
        placements |= _shard_stage(stage, stage_params, mesh, run, rng_streams)
        _freeze(stage, stage_params, dtype)
        for _, table in row_sharded_tables(stage):
            table.to(dtype)  # no rank gathers it
        if not fully_sharded:  # fully_shard gets gradients from autograd
            tensor_parallel.set_weight_grad_target(stage, weight_grad_queue)
    _tie_params(stages, spec)
    exact = run.train.exact_rollouts
    kernel_context = KernelContext.of(mesh.device, dtype, allow_compile=run.train.compile, batch_invariant=exact)
    select_stage_kernels(list(stages.values()), spec, kernel_context)
    fp8_gemms = apply_fp8(
        list(stages.values()),
        run.precision,
        kernel_context,
        num_layers=len(spec.layers),
        cache_weights=not fully_sharded,
    )
    combined = CombinedForwardBackward(mesh.device) if parallel.overlap_moe_expert_parallel_comm else None
    link = HostLink(mesh.device)
    for index, stage in stages.items():
        _apply_to_stage(stage, spec, mesh, run, recompute_plans[index], rng_streams=rng_streams, combined=combined)
        _offload_activations(stage, spec, mesh, run, recompute_plans[index], link=link, num_stages=len(stages))
        _run_without_backward(stage, recompute_plans[index].num_without_backward)
    weights = _fp8_weights(fp8_gemms, run, mesh, kernel_context)
    shards = ((name, shard) for name, placement in placements.items() for shard in placement.tensor_shards)
    param_plan = _ParamPlan(
        placements,
        groups={
            name: optimizer_group(name, param) if param.trainable else FROZEN_GROUP for name, param in params.items()
        },
        initial_values={shard.name: params[name].init for name, shard in shards} if init_weights else None,
    )
    if fully_sharded:
        without_backward = [recompute_plans[stage_index].num_without_backward for stage_index in stages]
        groups, gradient_reducer = _build_fsdp_groups(stages, param_plan, mesh, run, dtype, weights, without_backward)
    else:
        groups, gradient_reducer = _build_flat_groups(stages, param_plan, mesh, run, weights)
        weight_grad_queue.accumulate = gradient_reducer.write_grad
    groups = [*groups, *_build_row_groups(stages, param_plan, mesh, run.train.seed)]
    if not init_weights:
        _init_new_heads(groups, params, placements, dtype, run.train.seed)
    updated = (group for group in groups if group.spec.trainable)
    length = sum(flat_shard.length for group in updated for flat_shard in group.flat_shards)
    text = "rank %d updates %s elements of parameters, padding included, %s"
    _log.debug(text, mesh.rank, f"{length:,}", str(dtype)[6:])
    return ParallelizeResult(
        placements, groups, gradient_reducer, weight_grad_queue, fp8_gemms, combined, batch_invariant=exact
    )


def _apply_to_stage(
    stage: StageModule,
    spec: ModelSpec,
    mesh: ParallelMesh,
    run: RunConfig,
    plan: RecomputePlan,
    *,
    rng_streams: RandomStreams,
    combined: CombinedForwardBackward | None,
) -> None:
    """Applies context and expert parallelism and recompute to the layers of a stage."""
    apply_context_parallel(
        stage,
        mesh,
        comm_type=run.parallel.cp_comm_type,
        hierarchical_sizes=run.parallel.hierarchical_context_parallel_sizes,
        order="contiguous" if spec.sequence_sharding == "contiguous" else "zigzag",
    )
    apply_expert_parallel(stage, mesh, run.moe, before_wait=None if combined is None else combined.switch_to_other_pass)
    apply_recompute(stage, plan, rng_streams)


def _offload_activations(
    stage: StageModule,
    spec: ModelSpec,
    mesh: ParallelMesh,
    run: RunConfig,
    plan: RecomputePlan,
    *,
    link: HostLink,
    num_stages: int,
) -> None:
    """Applies offload to the layers of one of a rank's stages, around recompute."""
    shape = ActivationShape.from_config(run, device="cuda" if mesh.device.type == "cuda" else "cpu")
    ranks = {"pipeline_rank": mesh.pp.rank, "num_local_stages": num_stages}
    offload = plan_offload(run.memory, shape, spec.stage_layers(stage.stage), plan, **ranks)
    line = apply_activation_offload(stage, offload, link)
    if line is not None:
        _log.info("%s", line)


def _run_without_backward(stage: StageModule, num_layers: int) -> None:
    """Makes the first layers of a stage, below every trainable parameter, run without gradients: they save nothing, and have no autograd
    nodes. As long as nothing they take requires a gradient; called last, around recompute and offload.
    """
    first, run_layers = set(list(stage.layers.values())[:num_layers]), stage.run_layers

    def run(layers: Sequence[nn.Module], x_SBD: Tensor, context: ForwardContext) -> Tensor:
        if torch.is_grad_enabled() and not any(x.requires_grad for x in (x_SBD, *context.tensors.values())):
            count = sum(layer in first for layer in layers)
            with torch.no_grad():
                x_SBD = run_layers(layers[:count], x_SBD, context) if count else x_SBD
            layers = layers[count:]
        return run_layers(layers, x_SBD, context) if layers else x_SBD

    if num_layers:
        stage.run_layers = run


def _freeze(stage: StageModule, params: Mapping[str, ParamSpec], dtype: torch.dtype) -> None:
    """Makes frozen parameters require no gradient; they have the precision of the run, also where others are master weights."""
    for name, parameter in list(stage.named_parameters()):
        if not params[name].trainable:
            module, _, leaf = name.rpartition(".")
            setattr(stage.get_submodule(module), leaf, nn.Parameter(parameter.detach().to(dtype), requires_grad=False))


def _shard_stage(
    stage: StageModule,
    params: Mapping[str, ParamSpec],
    mesh: ParallelMesh,
    run: RunConfig,
    rng_streams: RandomStreams,
) -> dict[str, Placement]:
    sequence = run.parallel.sequence_parallel and mesh.tp.size > 1
    coordinate = ModelParallelCoordinate.from_mesh(mesh, sequence_parallel=sequence)
    placements = tensor_parallel.shard_params(stage, params, coordinate)
    chunked = sequence and run.parallel.tp_comm_overlap and run.precision.fp8_format is None
    tensor_parallel.apply_tensor_parallel(
        stage,
        params,
        mesh.tp,
        sequence_parallel=sequence,
        shared_generator=rng_streams.tp_shared,
        overlap_chunks=run.parallel.tp_comm_overlap_chunks if chunked else None,
        blocks=partial(mesh.blocks, "tp"),
    )
    tensor_parallel.shard_vocabulary(stage, params, mesh.tp, data_axis=row_axis(mesh))
    apply_row_sharding(stage, mesh)
    return placements


def _fp8_weights(
    fp8_gemms: Fp8GemmSet, run: RunConfig, mesh: ParallelMesh, kernel_context: KernelContext
) -> Fp8Weights:
    """Returns the weights with one scale for both orientations, with kernels to quantize them if they are all-gathered in FP8."""
    if not (run.precision.fp8_param_gather and fp8_gemms.fp8_gather_scalings and mesh["shard"].size > 1):
        return Fp8Weights(scalings=fp8_gemms.fp8_gather_scalings)
    choice = choose_kernel("FP8 param gather", kernel_context)
    _log.info("%d weights of this rank are all-gathered in FP8; %s", len(fp8_gemms.fp8_gather_scalings), choice)
    return Fp8Weights(scalings=fp8_gemms.fp8_gather_scalings, kernels=choice.functions)


def _build_flat_groups(
    stages: Mapping[int, StageModule],
    param_plan: _ParamPlan,
    mesh: ParallelMesh,
    run: RunConfig,
    fp8_weights: Fp8Weights,
) -> tuple[Sequence[FlatParamGroup], GradientReducer]:
    """Builds flat buffers with whole weights on every rank; optimizer state may be sharded (ZeRO-1)."""
    parallel = run.parallel
    _materialize(stages, mesh, allocate=param_plan.initial_values is not None)
    _init_weights(_param_tensor_shards(stages, param_plan.placements), param_plan, run.train.seed)
    options = FlatBufferOptions(
        bucket_size=parallel.ddp_bucket_size,
        sharded=parallel.use_distributed_optimizer,
        overlap_param_gather=parallel.overlap_param_gather,
        grad_dtype=torch.bfloat16 if run.optim.main_grads_dtype == "bf16" else None,
        fp8_weights=fp8_weights,
    )
    groups = flatten_parameters(
        list(stages.values()),
        param_plan.placements,
        param_plan.groups,
        mesh,
        options,
        grads_per_micro_batch=_grads_per_micro_batch(stages),
    )
    if parallel.overlap_param_gather:
        wait_for_params_before_use(list(stages.values()), groups)
    return groups, GradientReducer(
        groups, mesh, overlap=parallel.overlap_grad_reduce, reduce_dtype=_grad_reduce_dtype(run)
    )


def _grads_per_micro_batch(stages: Mapping[int, StageModule]) -> Counter[nn.Parameter]:
    """Counts the gradients of each parameter: a tied head adds one to the embedding's, and a layer that runs again one to each of its own.

    Of uses without a target of their gradients there is one for all: autograd has summed them.
    """
    uses = Counter(parameter for stage in stages.values() for parameter in stage.parameters())
    for stage in stages.values():
        submitted = tensor_parallel.params_with_weight_grad_target(stage)
        uses.update(parameter for parameter in stage.reused_params() if parameter in submitted)
    return uses


def _build_fsdp_groups(
    stages: Mapping[int, StageModule],
    param_plan: _ParamPlan,
    mesh: ParallelMesh,
    run: RunConfig,
    dtype: torch.dtype,
    fp8_weights: Fp8Weights,
    num_without_backward: Sequence[int],
) -> tuple[Sequence[FsdpParamGroup], FsdpGradientReducer]:
    """Shards weights and gradients too (ZeRO-2 and 3), from the start: a rank never holds more than its shard."""
    # Importing torch's fully_shard takes longer than this whole package, for every process.
    from petatron.parallel.data.fsdp import fully_shard_stages
    from petatron.parallel.data.fsdp_param_group import FsdpGradientReducer

    groups = fully_shard_stages(
        list(stages.values()),
        param_plan.placements,
        mesh,
        param_plan.groups,
        strategy=run.parallel.data_parallel_sharding_strategy,  # pyright: ignore[reportArgumentType]
        compute_dtype=dtype,
        reduce_dtype=_grad_reduce_dtype(run),
        fp8_weights=fp8_weights,
        num_without_backward=num_without_backward,
    )
    _materialize(stages, mesh)
    if param_plan.initial_values is not None:
        shards = (shard for group in groups for shard in group_tensor_shards(group, group.weights()))
        _init_weights(shards, param_plan, run.train.seed)
        for weight in (weight for group in groups for weight in group.weights()):
            weight.copy_(weight.to(dtype))  # the initial master weights of a run without full sharding
    return groups, FsdpGradientReducer(groups, mesh)


def _build_row_groups(
    stages: Mapping[int, StageModule], param_plan: _ParamPlan, mesh: ParallelMesh, seed: int
) -> list[RowShardedGroup]:
    """Builds a group of each table whose rows are split over data-parallel ranks, and allocates this rank's rows."""
    groups: list[RowShardedGroup] = []
    for stage in stages.values():
        of_stage: list[RowShardedGroup] = []
        for name, table in row_sharded_tables(stage):
            name, parameter = f"{name}.weight", table.weight
            placement = param_plan.placements[name]
            parameter.data = torch.zeros(placement.shape, dtype=parameter.dtype, device=parameter.device)
            sum_rows = table.kernels.embedding_grad
            group = RowShardedGroup(parameter, placement, mesh.tp, param_plan.groups[name], sum_rows=sum_rows)
            _init_weights(group_tensor_shards(group, group.weights()), param_plan, seed)
            of_stage.append(group)
        set_row_grad_targets(stage, of_stage)
        groups += of_stage
    return groups


def _grad_reduce_dtype(run: RunConfig) -> torch.dtype | None:
    return torch.bfloat16 if run.parallel.grad_reduce_in_bf16 else None


def _tie_params(stages: Mapping[int, StageModule], spec: ModelSpec) -> None:
    """Makes tied parameters the same where one rank has both, in two stages."""
    params = {name: parameter for stage in stages.values() for name, parameter in stage.named_parameters()}
    for name, original in spec.tied_params.items():
        for stage in stages.values():
            module_name, _, leaf = name.rpartition(".")
            if name in dict(stage.named_parameters()) and original in params:
                setattr(stage.get_submodule(module_name), leaf, params[original])


def _materialize(stages: Mapping[int, StageModule], mesh: ParallelMesh, *, allocate: bool = True) -> None:
    """Moves parameters and buffers to the device, all zero; parameters shared between stages stay shared.

    Without `allocate` the elements of a parameter are one zero, until they are in a flat buffer: weights take their memory once.
    """
    materialized: dict[Tensor, nn.Parameter] = {}
    for stage in stages.values():
        for module in stage.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and parameter.device != mesh.device:
                    if parameter not in materialized:
                        shape = parameter.shape if allocate else ()
                        zeros = torch.zeros(shape, dtype=parameter.dtype, device=mesh.device)
                        zeros = zeros.expand(parameter.shape)
                        materialized[parameter] = nn.Parameter(zeros, requires_grad=parameter.requires_grad)
                    module._parameters[name] = materialized[parameter]
            for name, buffer in list(module._buffers.items()):
                if (
                    buffer is not None
                ):  # `zeros_like` of a meta tensor imports sympy, which takes a second in every rank
                    module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=mesh.device)


def _param_tensor_shards(
    stages: Mapping[int, StageModule], placements: Mapping[str, Placement]
) -> Iterable[tuple[TensorShard, Tensor]]:
    """Yields the shards of all parameters; one that two stages share has its name in the first."""
    seen: set[nn.Parameter] = set()
    for stage in stages.values():
        for name, parameter in stage.named_parameters():
            if parameter not in seen:
                seen.add(parameter)
                for shard in placements[name].tensor_shards:
                    yield shard, parameter[shard.local_slices()]


@torch.no_grad()
def _init_new_heads(
    groups: Sequence[ParameterGroup],
    params: Mapping[str, ParamSpec],
    placements: Mapping[str, Placement],
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Draws the weights that the model which is loaded next may lack."""
    fresh = {
        shard.name: params[name].init
        for name, placement in placements.items()
        if params[name].fresh_if_missing
        for shard in placement.tensor_shards
    }
    for group in groups if fresh else ():
        for shard, view in group_tensor_shards(group, group.weights(), wanted=lambda shard: shard.name in fresh):
            fresh[shard.name].fill(view, shard, seed=seed)
            view.copy_(view.to(dtype))


@torch.no_grad()
def _init_weights(shards: Iterable[tuple[TensorShard, Tensor]], param_plan: _ParamPlan, seed: int) -> None:
    """Initializes weights by logical tensor: the same in every layout."""
    if param_plan.initial_values is None:
        return
    for shard, view in shards:
        if view.device.type == "meta":
            return
        param_plan.initial_values[shard.name].fill(view, shard, seed=seed)
