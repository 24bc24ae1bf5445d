"""ZeRO-2 and ZeRO-3 through torch's `fully_shard`, as parameter groups like any other.

Every block of a stage, the experts inside it, the embedding, and what is left of the stage (position embedding, last norm,
head; a tied embedding too, since the head computes with it) are units of their own. A rank has its shard of each
parameter of a unit in at least fp32: these are the master weights. For a unit's forward and backward pass its
parameters are all-gathered in the precision of the run, and after its backward pass their gradients are reduce-scattered, in
every micro-batch, and accumulated in this rank's shard.

    optim_grads         (ZeRO-2)  gathered once per step; freed when the weights have changed
    optim_grads_params  (ZeRO-3)  freed after every forward and backward pass. The embedding's backward pass needs no
                                  weights, and what is left of the stage stays between the two, so both are gathered once
                                  per micro-batch, blocks and experts twice

Dense parameters are sharded over `shard`, experts over `edp_shard`. Hybrid sharding (Zhao et al., PyTorch FSDP) adds one
all-reduce over `dp_outer` at the end of a step.

Tables whose rows are split over the ranks already are in no unit (`sharding/row_sharded_group.py`).

How a parameter is sharded, and a rank's shards as a parameter group, are in `fsdp_param_group.py`; messages are padded to equal shards.

Weights of FP8 GEMMs may be all-gathered in FP8 (`fsdp_all_gather_reduce_scatter.py`): a rank quantizes its rows of them.

A backward pass in two halves (zero-bubble schedules) cannot work: fully_shard scatters a unit's gradients when the gradient
of its input is there, before those of the weights would be.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from petatron.mesh.mesh import Axis, ParallelMesh
from petatron.models.stage_interface import StageModule
from petatron.parallel.data.fsdp_all_gather_reduce_scatter import (
    Fp8AllGather,
    MessageSegment,
    RecordedAllGather,
    RecordedReduceScatter,
    device_mesh,
)
from petatron.parallel.data.fsdp_param_group import FsdpParamGroup, fsdp_units, owned_flat_shard, shard_dim
from petatron.sharding.fp8_gather import Fp8Weights, ScaledMatrix
from petatron.sharding.optimizer_group_spec import GroupSpec
from petatron.sharding.shard_spec import Placement

ShardingStrategy = Literal["optim_grads", "optim_grads_params"]


def _make_unit(
    module: nn.Module,
    axis: Axis,
    device_mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    strategy: ShardingStrategy,
    *,
    reshard_after_forward: bool = True,
    ignored: AbstractSet[nn.Parameter] = frozenset(),
) -> None:
    """Makes a module a unit. `reshard_after_forward`: it is freed after its forward pass, and gathered again for backward.

    `ignored` parameters are not sharded here.
    """
    stays_gathered = strategy == "optim_grads"
    # Layers return views, which torch warns about for in-place operations; there are none.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    fully_shard(
        module,
        mesh=device_mesh,
        reshard_after_forward=reshard_after_forward and not stays_gathered,
        shard_placement_fn=lambda parameter: Shard(shard_dim(tuple(parameter.shape), axis.size)),
        mp_policy=mp_policy,
        ignored_params=set(ignored),
    )
    assert isinstance(module, FSDPModule)
    module.set_reshard_after_backward(not stays_gathered, recurse=False)
    module.set_custom_all_gather(RecordedAllGather(axis))
    module.set_custom_reduce_scatter(RecordedReduceScatter(axis))
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def fully_shard_stages(
    stages: Sequence[StageModule],
    placements: Mapping[str, Placement],
    mesh: ParallelMesh,
    group_specs: Mapping[str, GroupSpec],
    *,
    strategy: ShardingStrategy,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype | None,
    fp8_weights: Fp8Weights | None = None,
    num_without_backward: Sequence[int] | None = None,
) -> list[FsdpParamGroup]:
    """Shards the parameters of a rank's stages, and allocates this rank's shards, all zero.

    The stages are still on the meta device, in at least fp32, with all other kinds of parallelism applied. `reduce_dtype` is
    the precision gradients are reduced in; None means at least fp32. `fp8_weights` says which weights may be all-gathered in FP8.
    `num_without_backward`: of each stage, how many of its first layers have no backward, so that nothing is gathered for it.
    """
    wide = torch.promote_types(compute_dtype, torch.float32)
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=reduce_dtype or wide, cast_forward_inputs=False
    )
    dense_axis, expert_axis = mesh["shard"], mesh["edp_shard"]
    make_dense_unit, make_expert_unit = (
        partial(_make_unit, axis=axis, device_mesh=device_mesh(axis, mesh), mp_policy=precision, strategy=strategy)
        for axis in (dense_axis, expert_axis)
    )
    groups: list[FsdpParamGroup] = []
    every = [parameter for stage in stages for parameter in stage.parameters()]
    assert len(every) == len(set(every)), "a parameter of two stages cannot be fully sharded"
    for stage, without_backward in zip(stages, num_without_backward or [0] * len(stages), strict=True):
        for module in _expert_modules(stage, placements):
            make_expert_unit(module)
        for block in stage.layers.values():
            make_dense_unit(block)
        rows = {p for name, p in stage.named_parameters() if placements[name].row_sharded}
        embedding = _separate_embedding(stage, rows)
        if embedding is not None:
            make_dense_unit(embedding)
            assert isinstance(embedding, FSDPModule)
            embedding.set_unshard_in_backward(False)
        make_dense_unit(stage, reshard_after_forward=False, ignored=rows)
        _set_backward_prefetch(stage, without_backward)
        register_fsdp_forward_method(stage, "logits")
        register_fsdp_forward_method(stage, "generation_step")
        _pass_dicts_of_caller(stage)
        gathers = _use_fp8_all_gather(stage, placements, dense_axis, fp8_weights, compute_dtype)
        if mesh.device.type != "meta":
            stage.to_empty(device=mesh.device)
        sharded = {name: p for name, p in stage.named_parameters() if not placements[name].row_sharded}
        present = dict.fromkeys(group_specs[name] for name in sharded)
        for spec in sorted(present, key=lambda spec: -spec.weight_decay):
            chosen = {name: p for name, p in sharded.items() if group_specs[name] == spec}
            groups.append(_build_param_group(stage, chosen, placements, mesh, spec, reduce_dtype, gathers))
    return groups


def _use_fp8_all_gather(
    stage: StageModule,
    placements: Mapping[str, Placement],
    axis: Axis,
    fp8_weights: Fp8Weights | None,
    dtype: torch.dtype,
) -> list[Fp8AllGather]:
    """Makes units all-gather their FP8 weights in FP8; returns the all-gathers of those that do."""
    if fp8_weights is None or fp8_weights.kernels is None or axis.size == 1:
        return []
    names = {parameter: name for name, parameter in stage.named_parameters()}
    gathers = []
    for unit in fsdp_units(stage):
        # Nothing public tells the order of parameters in a message.
        inside = unit._get_fsdp_state()._fsdp_param_group
        members = [] if inside is None else [names[member.sharded_param] for member in inside.fsdp_params]
        segments, count = [], 0
        for name in members:
            shape = placements[name].shape
            dim, scaling = shard_dim(shape, axis.size), fp8_weights.scalings.get(name)
            # Sharded along another dimension, what a rank has is no contiguous range of the matrix.
            matrix = None
            if scaling is not None and dim == 0:
                matrix = ScaledMatrix.from_shape(shape, scaling, first_scale=count)
                count += matrix.num_scales
            segments.append(MessageSegment(-(-shape[dim] // axis.size) * (math.prod(shape) // shape[dim]), matrix))
        if count:
            gathers.append(Fp8AllGather(axis, segments, itemsize=dtype.itemsize, kernels=fp8_weights.kernels))
            unit.set_custom_all_gather(gathers[-1])
    return gathers


def _build_param_group(
    stage: StageModule,
    parameters: Mapping[str, nn.Parameter],
    placements: Mapping[str, Placement],
    mesh: ParallelMesh,
    spec: GroupSpec,
    reduce_dtype: torch.dtype | None,
    fp8_gathers: Sequence[Fp8AllGather],
) -> FsdpParamGroup:
    replicas, axes, sharded, flat_shards = mesh["dp_outer"], (mesh["shard"], mesh["edp_shard"]), [], []
    for name, parameter in parameters.items():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        sharded.append(parameter)
        flat_shards.append(owned_flat_shard(placements[name], axes[placements[name].expert], replicas))
    assert isinstance(stage, FSDPModule)
    group = FsdpParamGroup(
        parameters=sharded,
        placements=[placements[name] for name in parameters],
        flat_shards=flat_shards,
        replica_axis=replicas,
        shard_axes=axes,
        spec=spec,
        stage=stage,
        reduce_dtype=reduce_dtype,
        fp8_gathers=fp8_gathers,
    )
    for weight in group.weights():
        weight.zero_()
    return group


def _separate_embedding(stage: StageModule, ignored: AbstractSet[nn.Parameter]) -> nn.Module | None:
    """Returns the stage's first module if it is a unit of its own: if no other module computes with its weights.

    `ignored` parameters belong to no unit.
    """
    if not stage.stage.has_embedding:
        return None
    [first, *_] = stage.outer_modules()[0]
    apart = {*stage.reused_params(), *ignored}
    return first if apart.isdisjoint(first.parameters()) else None


def _expert_modules(module: nn.Module, placements: Mapping[str, Placement], prefix: str = "") -> Iterator[nn.Module]:
    """Yields the largest modules that have expert parameters only."""
    names = [name for name, _ in module.named_parameters(prefix=prefix)]
    if names and all(placements[name].expert for name in names):
        yield module
        return
    for name, child in module.named_children():
        yield from _expert_modules(child, placements, f"{prefix}.{name}" if prefix else name)


def _set_backward_prefetch(stage: StageModule, num_without_backward: int) -> None:
    """Makes every unit prefetch the next one of the backward pass.

    By default fully_shard prefetches the unit whose forward ran before this one's, which is of another micro-batch when this one is a
    stage's first; that one would be gathered for nothing. The first unit names itself, which is gathered already. Units whose layers
    have no backward are not named.
    """
    # In the reversed list of modules, a module comes after its own children, as it does in the forward pass.
    forward: list[Iterable[FSDPModule]] = [
        fsdp_units(module)
        for modules in stage.outer_modules()
        for module in modules
        if num_without_backward == 0 or any(parameter.requires_grad for parameter in module.parameters())
    ]
    blocks = list(stage.layers.values())[num_without_backward:]
    forward += [reversed(list(fsdp_units(block))) for block in blocks]
    forward.append([stage] if isinstance(stage, FSDPModule) else [])
    order = [unit for units in forward for unit in units]
    for unit, following in zip(order, [order[0], *order]):
        unit.set_modules_to_backward_prefetch([following])


def _pass_dicts_of_caller(stage: nn.Module) -> None:
    """Gives a stage the caller's own dicts, which layers write their reports into.

    fully_shard replaces tensors among the arguments, and in torch 2.11 it hands over copies of the dicts around them.
    """
    dicts: dict[str, dict[Any, Any]] = {}

    def remember(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        dicts.update({name: value for name, value in kwargs.items() if isinstance(value, dict)})

    def restore(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        kwargs = {**kwargs, **dicts}
        dicts.clear()
        return args, kwargs

    stage.register_forward_pre_hook(remember, prepend=True, with_kwargs=True)
    stage.register_forward_pre_hook(restore, with_kwargs=True)
