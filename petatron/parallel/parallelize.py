"""The one ordered recipe that turns a model's stages on the meta device into this rank's shards, with initialised weights.

Order: stage split (the caller builds only this rank's stages) -> precision -> tensor/sequence parallel -> kernels and FP8 ->
context parallel -> expert parallel -> recompute -> activation offload -> materialise -> data parallel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from petatron.base.log import get_logger
from petatron.config.checks.data_parallel import FSDP_STRATEGIES
from petatron.config.schema.run import RunConfig
from petatron.estimate.activation_bytes import ActivationShape
from petatron.kernels.registry import KernelContext, choose_kernel
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rng import RandomStreams
from petatron.models.decoder import Decoder
from petatron.parallel.activation_offload import HostLink, apply_activation_offload
from petatron.parallel.context import apply_context_parallel
from petatron.parallel.data.gradient_reduction import GradientReducer
from petatron.parallel.data.param_gather_wait import wait_for_params_before_use
from petatron.parallel.expert_parallel import apply_expert_parallel
from petatron.parallel.fp8 import Fp8GemmSet, apply_fp8
from petatron.parallel.pipeline.combined_forward_backward import CombinedForwardBackward
from petatron.parallel.pipeline.weight_grad_queue import WeightGradQueue
from petatron.parallel.recompute import apply_recompute
from petatron.parallel.select_kernels import select_kernels
from petatron.parallel.tensor_parallel import (
    apply_tensor_parallel,
    set_weight_grad_sink,
    shard_params,
    shard_vocabulary,
)
from petatron.sharding.flat_buffer import FlatBufferOptions, FlatParamGroup, flatten_parameters
from petatron.sharding.flat_shard import ParameterGroup, group_tensor_shards
from petatron.sharding.fp8_gather import Fp8Weights
from petatron.sharding.initial_values import draw_normal_shard
from petatron.sharding.parameter_groups import GroupSpec
from petatron.sharding.shard_spec import ModelParallelCoordinate, Placement, Shard, TensorShard

if TYPE_CHECKING:
    from petatron.parallel.data.fsdp_param_group import FsdpGradientReducer, FsdpParamGroup

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ParamSpecs:
    """A model's parameter facts: shard specs, initial standard deviation (None: a constant), optimizer group."""

    shard_specs: Mapping[str, Shard]
    initial_std: Callable[[str], float | None]
    initial_constant: Callable[[str], float]
    group_spec: Callable[[str, nn.Parameter], GroupSpec]


@dataclass(frozen=True, slots=True)
class ParallelizeResult:
    """Placements and groups of parameters, and the reducer of their gradients."""

    placements: dict[str, Placement]
    param_groups: Sequence[ParameterGroup]
    gradient_reducer: GradientReducer | FsdpGradientReducer
    weight_grad_queue: WeightGradQueue
    fp8_gemms: Fp8GemmSet
    combined_passes: CombinedForwardBackward | None = None


def parallelize(
    stages: Mapping[int, Decoder],
    param_specs: ParamSpecs,
    mesh: ParallelMesh,
    run: RunConfig,
    *,
    dtype: torch.dtype,
    rng_streams: RandomStreams,
    in_flight: Mapping[int, int],
    init_weights: bool = True,
) -> ParallelizeResult:
    """Applies every kind of parallelism of the mesh.

    `in_flight`: the most micro-batches whose activations each stage holds. Without `init_weights` all weights are zero.
    """
    parallel = run.parallel
    # A single process has no ranks to shard over, and no process group.
    fully_sharded = parallel.data_parallel_sharding_strategy in FSDP_STRATEGIES and mesh.world.size > 1
    weight_grad_queue = WeightGradQueue()
    placements: dict[str, Placement] = {}
    for stage in stages.values():
        # Fully sharded parameters are the master weights; the precision of the run is that of their gathered copies.
        stage.to(torch.promote_types(dtype, torch.float32) if fully_sharded else dtype)
        placements |= _shard_stage(stage, param_specs, mesh, run, rng_streams)
        if not fully_sharded:  # fully_shard gets gradients from autograd
            set_weight_grad_sink(stage, weight_grad_queue)
    _tie_embeddings(stages, run)
    kernel_context = KernelContext.of(mesh.device, dtype, allow_compile=run.train.compile)
    for choice in {str(c) for stage in stages.values() for c in select_kernels(stage, kernel_context)}:
        _log.debug("%s", choice)
    fp8_gemms = apply_fp8(list(stages.values()), run.precision, kernel_context, cache_weights=not fully_sharded)
    shape = ActivationShape.from_config(run, device="cuda" if mesh.device.type == "cuda" else "cpu")
    link = HostLink(mesh.device)
    combined = CombinedForwardBackward(mesh.device) if parallel.overlap_moe_expert_parallel_comm else None
    for stage_index, stage in stages.items():
        apply_context_parallel(
            stage,
            mesh,
            comm_type=parallel.cp_comm_type,
            hierarchical_sizes=parallel.hierarchical_context_parallel_sizes,
        )
        apply_expert_parallel(
            stage, mesh, run.moe, before_wait=None if combined is None else combined.switch_to_other_pass
        )
        apply_recompute(
            stage, run.memory, rng_streams, shape=shape, in_flight=in_flight[stage_index], num_local_stages=len(stages)
        )
        offloaded = apply_activation_offload(stage, run.memory, link)
        if offloaded is not None:
            _log.info("%s", offloaded)
    weights = _fp8_weights(fp8_gemms, run, mesh, kernel_context)
    if fully_sharded:
        groups, gradients = _build_fsdp_groups(
            stages, placements, param_specs, mesh, run, dtype, weights, init_weights=init_weights
        )
    else:
        groups, gradients = _build_flat_groups(
            stages, placements, param_specs, mesh, run, weights, init_weights=init_weights
        )
        weight_grad_queue.accumulate = gradients.write_grad
    length = sum(flat_shard.length for group in groups for flat_shard in group.flat_shards)
    _log.debug(
        "rank %d updates %s elements of parameters, padding included, %s",
        mesh.rank,
        f"{length:,}",
        str(dtype)[6:],
    )
    return ParallelizeResult(placements, groups, gradients, weight_grad_queue, fp8_gemms, combined)


def _shard_stage(
    stage: Decoder,
    param_specs: ParamSpecs,
    mesh: ParallelMesh,
    run: RunConfig,
    rng_streams: RandomStreams,
) -> dict[str, Placement]:
    sequence = run.parallel.sequence_parallel and mesh.tp.size > 1
    coordinate = ModelParallelCoordinate(
        tp_size=mesh.tp.size,
        tp_rank=mesh.tp.rank,
        sequence_parallel=sequence,
        ep_size=mesh.ep.size,
        ep_rank=mesh.ep.rank,
        etp_size=mesh["etp"].size,
        etp_rank=mesh["etp"].rank,
    )
    placements = shard_params(stage, param_specs.shard_specs, coordinate)
    overlap = run.parallel.tp_comm_overlap_chunks if sequence and run.parallel.tp_comm_overlap else None
    apply_tensor_parallel(
        stage,
        param_specs.shard_specs,
        mesh.tp,
        sequence_parallel=sequence,
        shared_generator=rng_streams.tp_shared,
        overlap_chunks=overlap,
    )
    shard_vocabulary(stage, param_specs.shard_specs, mesh.tp)
    return placements


def _fp8_weights(
    fp8_gemms: Fp8GemmSet, run: RunConfig, mesh: ParallelMesh, kernel_context: KernelContext
) -> Fp8Weights:
    """Returns the weights with one scale for both orientations, with kernels to quantise them if they are all-gathered in FP8."""
    if not (run.precision.fp8_param_gather and fp8_gemms.fp8_gather_scalings and mesh["shard"].size > 1):
        return Fp8Weights(scalings=fp8_gemms.fp8_gather_scalings)
    choice = choose_kernel("weights to eight bits", kernel_context)
    _log.info("%d weights of this rank travel in eight bits; %s", len(fp8_gemms.fp8_gather_scalings), choice)
    return Fp8Weights(scalings=fp8_gemms.fp8_gather_scalings, kernels=choice.functions)


def _build_flat_groups(
    stages: Mapping[int, Decoder],
    placements: Mapping[str, Placement],
    param_specs: ParamSpecs,
    mesh: ParallelMesh,
    run: RunConfig,
    fp8_weights: Fp8Weights,
    *,
    init_weights: bool,
) -> tuple[Sequence[FlatParamGroup], GradientReducer]:
    """Builds flat buffers with whole weights on every rank; optimizer state may be sharded (ZeRO-1)."""
    parallel = run.parallel
    _materialise(stages, mesh)
    if init_weights:
        _init_weights(_param_tensor_shards(stages, placements), param_specs, run.train.seed)
    assert parallel.ddp_bucket_size is not None
    options = FlatBufferOptions(
        bucket_size=parallel.ddp_bucket_size,
        sharded=parallel.use_distributed_optimizer,
        overlap_param_gather=parallel.overlap_param_gather,
        grad_dtype=torch.bfloat16 if run.optim.main_grads_dtype == "bf16" else None,
        fp8_weights=fp8_weights,
    )
    groups = flatten_parameters(
        list(stages.values()),
        placements,
        param_specs.group_spec,
        mesh,
        options,
        grads_per_micro_batch=_grads_per_micro_batch(stages),
    )
    if parallel.overlap_param_gather:
        wait_for_params_before_use(list(stages.values()), groups)
    return groups, GradientReducer(
        groups, mesh, overlap=parallel.overlap_grad_reduce, reduce_dtype=_grad_reduce_dtype(run)
    )


def _grads_per_micro_batch(stages: Mapping[int, Decoder]) -> Counter[nn.Parameter]:
    """Counts the gradients of each parameter; a tied head adds one to the embedding's."""
    uses = Counter(parameter for stage in stages.values() for parameter in stage.parameters())
    for stage in stages.values():
        if stage.head is not None and stage.head.weight is None and stage.embedding is not None:
            uses[stage.embedding.weight] += 1
    return uses


def _build_fsdp_groups(
    stages: Mapping[int, Decoder],
    placements: Mapping[str, Placement],
    param_specs: ParamSpecs,
    mesh: ParallelMesh,
    run: RunConfig,
    dtype: torch.dtype,
    fp8_weights: Fp8Weights,
    *,
    init_weights: bool,
) -> tuple[Sequence[FsdpParamGroup], FsdpGradientReducer]:
    """Shards weights and gradients too (ZeRO-2 and 3), from the start: a rank never holds more than its shard."""
    # Importing torch's fully_shard takes longer than this whole package, for every process.
    from petatron.parallel.data.fsdp import fully_shard_stages
    from petatron.parallel.data.fsdp_param_group import FsdpGradientReducer

    groups = fully_shard_stages(
        list(stages.values()),
        placements,
        mesh,
        param_specs.group_spec,
        strategy=run.parallel.data_parallel_sharding_strategy,  # pyright: ignore[reportArgumentType]
        compute_dtype=dtype,
        reduce_dtype=_grad_reduce_dtype(run),
        fp8_weights=fp8_weights,
    )
    _materialise(stages, mesh)
    if init_weights:
        _init_weights(
            (shard for group in groups for shard in group_tensor_shards(group, group.weights())),
            param_specs,
            run.train.seed,
        )
        for weight in (weight for group in groups for weight in group.weights()):
            weight.copy_(weight.to(dtype))  # the initial master weights of a run without full sharding
    return groups, FsdpGradientReducer(groups, mesh)


def _grad_reduce_dtype(run: RunConfig) -> torch.dtype | None:
    return torch.bfloat16 if run.parallel.grad_reduce_in_bf16 else None


def _tie_embeddings(stages: Mapping[int, Decoder], run: RunConfig) -> None:
    """Ties the head's weight to the embedding's where one rank has both, in two stages."""
    first, last = (
        next((s for s in stages.values() if getattr(s.stage, end)), None) for end in ("has_embedding", "has_loss")
    )
    if run.model.untie_embeddings_and_output_weights or first is None or last is None or first is last:
        return
    assert first.embedding is not None and last.head is not None
    last.head.weight = first.embedding.weight


def _materialise(stages: Mapping[int, Decoder], mesh: ParallelMesh) -> None:
    """Allocates parameters and buffers, all zero; parameters shared between stages stay shared."""
    materialised: dict[Tensor, nn.Parameter] = {}
    for stage in stages.values():
        for module in stage.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and parameter.device != mesh.device:
                    if parameter not in materialised:
                        materialised[parameter] = nn.Parameter(torch.zeros_like(parameter, device=mesh.device))
                    module._parameters[name] = materialised[parameter]
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = torch.zeros_like(buffer, device=mesh.device)


def _param_tensor_shards(
    stages: Mapping[int, Decoder], placements: Mapping[str, Placement]
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
def _init_weights(shards: Iterable[tuple[TensorShard, Tensor]], param_specs: ParamSpecs, seed: int) -> None:
    """Initialises weights by logical tensor: the same in every layout."""
    for shard, view in shards:
        if view.device.type == "meta":
            return
        std = param_specs.initial_std(shard.name)
        if std is None:
            view.fill_(param_specs.initial_constant(shard.name))
        else:
            view.copy_(draw_normal_shard(shard, seed=seed, std=std))
