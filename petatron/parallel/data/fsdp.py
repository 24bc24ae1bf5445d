"""ZeRO-2 and ZeRO-3 through torch's `fully_shard`, as parameter groups like any other.

Every block of a stage, the experts inside it, the embedding, and what is left of the stage (position embedding, last norm,
head; a tied embedding too, since the head computes with it) are units of their own. A rank keeps its part of each
parameter of a unit in at least fp32: these are the master weights. Around a unit's forward and backward pass its
parameters are gathered in the precision of the run, and after its backward pass their gradients are reduce-scattered, for
every micro-batch anew, and added to the part that this rank keeps.

    optim_grads         (ZeRO-2)  gathered once per step; let go when the weights have changed
    optim_grads_params  (ZeRO-3)  let go after every forward and backward pass. The embedding's backward pass needs no
                                  weights, and what is left of the stage stays between the two, so both are gathered once
                                  per micro-batch, blocks and experts twice

Dense parameters are shared over `shard`, experts over `edp_shard`. Hybrid sharding (Zhao et al., PyTorch FSDP) adds one sum
over `dp_outer` at the end of a step.

A parameter is cut along its first dimension, the last parts being shorter or empty; messages are padded to equal parts. One
with fewer rows than ranks (few experts per rank, on many ranks) is cut along the first dimension that divides evenly.

Weights that are multiplied in eight bits may be gathered so (`fsdp_collectives.py`): a rank casts its rows of what it would send.

A backward pass in two halves (zero-bubble schedules) cannot work: fully_shard scatters a unit's gradients when the gradient
of its input is there, before those of the weights would be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from petatron.mesh import collectives
from petatron.mesh.mesh import Axis, ParallelMesh
from petatron.models.decoder import Decoder
from petatron.parallel.data.fsdp_collectives import (
    Fp8AllGather,
    MessageSegment,
    RecordedAllGather,
    RecordedReduceScatter,
    device_mesh,
)
from petatron.parallel.data.gradient_reduction import all_reduce_partial_grads
from petatron.sharding.flat_shard import FlatShard, OwnedRange, ParamRange, rank_share
from petatron.sharding.fp8_gather import Fp8Weights, ScaledMatrix
from petatron.sharding.parameter_groups import GroupSpec
from petatron.sharding.shard_spec import Placement, Shape

ShardingStrategy = Literal["optim_grads", "optim_grads_params"]


def shard_dim(shape: Shape, ranks: int) -> int:
    """The dimension a parameter is cut along.

    >>> shard_dim((7, 6), 2), shard_dim((1, 7, 6), 2), shard_dim((1, 7), 2)
    (0, 2, 0)
    """
    if shape[0] >= ranks:
        return 0
    return next((dim for dim, size in enumerate(shape) if size % ranks == 0), 0)


def owned_flat_shard(placement: Placement, axis: Axis, replica_axis: Axis) -> FlatShard:
    """The part of a parameter that this rank keeps, as it lies in memory."""
    parts, length = [], 0
    for begin, end in _rank_ranges(placement.shape, axis.size, axis.rank):
        parts.append(ParamRange(placement, begin, end, length))
        length += end - begin
    return FlatShard(length, tuple(parts), rank_share(length, replica_axis))


def _rank_ranges(shape: Shape, num_ranks: int, rank: int) -> Iterator[tuple[int, int]]:
    """The elements of a parameter that a rank keeps."""
    dim = shard_dim(shape, num_ranks)
    inner, size = math.prod(shape[dim + 1 :]), shape[dim]
    most = -(-size // num_ranks)
    begin, end = (min(at * most, size) * inner for at in (rank, rank + 1))
    if begin < end:
        for outer in range(math.prod(shape[:dim])):
            yield outer * size * inner + begin, outer * size * inner + end


class FsdpParamGroup:
    """Parameters of one stage with one update rule, as far as this rank keeps them; one stretch per parameter.

    Gradients lie in one buffer that fully_shard adds to: it is handed out as the parameters' `grad`. `shard_axes` are the ranks that
    share dense parameters, and those that share experts.
    """

    def __init__(
        self,
        parameters: Sequence[DTensor],
        placements: Sequence[Placement],
        flat_shards: Sequence[FlatShard],
        replica_axis: Axis,
        *,
        shard_axes: tuple[Axis, Axis],
        spec: GroupSpec,
        stage: FSDPModule,
        reduce_dtype: torch.dtype | None,
        fp8_gathers: Sequence[Fp8AllGather] = (),
    ) -> None:
        self.spec = spec
        self._fp8_gathers = fp8_gathers
        self.flat_shards = flat_shards
        self.replica_axis = replica_axis
        self.placements = placements
        self._shard_axes = shard_axes
        self.stage = stage
        self.reduce_dtype = reduce_dtype
        self._parameters = parameters
        first = parameters[0].to_local()
        wide = torch.promote_types(first.dtype, torch.float32)
        self.flat_grads = torch.zeros(sum(s.length for s in flat_shards), dtype=wide, device=first.device)
        self._grads = [self._as_dtensor(parameter, grad) for parameter, grad in zip(parameters, self.grads())]

    @staticmethod
    def _as_dtensor(parameter: DTensor, grad: Tensor) -> DTensor:
        local = grad.view(parameter.to_local().shape)
        spec = {"shape": parameter.shape, "stride": parameter.stride()}
        return DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False, **spec)

    @torch.no_grad()
    def weights(self) -> list[Tensor]:
        return [parameter.to_local().detach().view(-1) for parameter in self._parameters]

    def grads(self) -> list[Tensor]:
        return list(self.flat_grads.split([stretch.length for stretch in self.flat_shards]))

    def shard_axis(self, placement: Placement) -> Axis:
        """The ranks that share a parameter."""
        return self._shard_axes[placement.expert]

    def owned_ranges(self, placement: Placement) -> list[OwnedRange]:
        """Who of `shard_axis` updates which elements of a parameter."""
        size = self.shard_axis(placement).size
        return [
            OwnedRange(rank, begin, end)
            for rank in range(size)
            for begin, end in _rank_ranges(placement.shape, size, rank)
        ]

    def sync_fp8_scales(self) -> None:
        """Nothing: scales are agreed on where a block is gathered."""

    def all_gather_params(self) -> None:
        """Let go of gathered parameters, so that the next forward pass gathers the new ones."""
        for unit in _fsdp_units(self.stage):
            unit.reshard()
        for gather in self._fp8_gathers:
            gather.weights_changed()

    def reset_grads(self) -> None:
        """Gradients start from zero, in this group's buffer."""
        self.flat_grads.zero_()
        for parameter, grad in zip(self._parameters, self._grads):
            parameter.grad = grad


class FsdpGradientReducer:
    """What is left to do about gradients that fully_shard reduces: the start, the outer sum, the end."""

    def __init__(self, param_groups: Sequence[FsdpParamGroup], mesh: ParallelMesh) -> None:
        self._param_groups = param_groups
        self._mesh = mesh
        self._stages = list(dict.fromkeys(group.stage for group in param_groups))

    def start_step(self, micro_batches: int) -> None:
        """Forget the last step's gradients. The number of micro-batches does not matter: each is reduced by itself."""
        for group in self._param_groups:
            group.reset_grads()
        for stage in self._stages:
            stage.set_is_last_backward(False)

    @torch.no_grad()
    def finish_grad_sync(self) -> None:
        """Wait for the reductions under way, then add up over the replicas of the shards and inside a replica."""
        for stage in self._stages:
            stage.set_is_last_backward(True)
            # Nothing public waits outside of a backward pass; torch's own pipeline stages call this one too.
            stage._get_fsdp_state()._root_post_backward_final_callback()
        if self._mesh["dp_outer"].size > 1:
            self._all_reduce_over_replicas()
        all_reduce_partial_grads(self._param_groups, self._mesh)

    def _all_reduce_over_replicas(self) -> None:
        started = []
        for group in self._param_groups:
            grads = group.flat_grads
            wire = grads if group.reduce_dtype is None else grads.to(group.reduce_dtype)
            started.append((grads, wire, collectives.start_all_reduce(wire, group.replica_axis)))
        for grads, wire, handle in started:
            handle.wait()
            if wire is not grads:
                grads.copy_(wire)


@dataclass(frozen=True, slots=True)
class _FsdpUnitWrapper:
    """The ranks that share units of one kind, and how."""

    axis: Axis
    device_mesh: DeviceMesh
    mp_policy: MixedPrecisionPolicy
    strategy: ShardingStrategy

    def wrap(self, module: nn.Module, *, reshard_after_forward: bool = True) -> None:
        """Make a module a unit. `reshard_after_forward`: it is let go after its forward pass, to be gathered for the backward pass."""
        whole = self.strategy == "optim_grads"
        fully_shard(
            module,
            mesh=self.device_mesh,
            reshard_after_forward=reshard_after_forward and not whole,
            shard_placement_fn=partial(_shard_placement, axis=self.axis),
            mp_policy=self.mp_policy,
        )
        assert isinstance(module, FSDPModule)
        module.set_reshard_after_backward(not whole, recurse=False)
        module.set_custom_all_gather(RecordedAllGather(self.axis))
        module.set_custom_reduce_scatter(RecordedReduceScatter(self.axis))
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _shard_placement(parameter: nn.Parameter, axis: Axis) -> Shard:
    return Shard(shard_dim(tuple(parameter.shape), axis.size))


def fully_shard_stages(
    stages: Sequence[Decoder],
    placements: Mapping[str, Placement],
    mesh: ParallelMesh,
    group_spec: Callable[[str, nn.Parameter], GroupSpec],
    *,
    strategy: ShardingStrategy,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype | None,
    fp8_weights: Fp8Weights | None = None,
) -> list[FsdpParamGroup]:
    """Share the parameters of a rank's stages, and give this rank's part of them memory, all zero.

    The stages are still on the meta device, in at least fp32, with all other kinds of parallelism applied. `reduce_dtype` is
    the precision gradients are reduced in; None means at least fp32. `fp8_weights` says which weights may be gathered so.
    """
    wide = torch.promote_types(compute_dtype, torch.float32)
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=reduce_dtype or wide, cast_forward_inputs=False
    )
    dense, expert = (
        _FsdpUnitWrapper(mesh[name], device_mesh(mesh[name], mesh), precision, strategy)
        for name in ("shard", "edp_shard")
    )
    groups: list[FsdpParamGroup] = []
    every = [parameter for stage in stages for parameter in stage.parameters()]
    assert len(every) == len(set(every)), "a parameter of two stages cannot be fully sharded"
    for stage in stages:
        specs = {name: group_spec(name, parameter) for name, parameter in stage.named_parameters()}
        for module in _expert_modules(stage, placements):
            expert.wrap(module)
        for block in stage.layers.values():
            dense.wrap(block)
        if stage.embedding is not None and not _has_tied_head(stage):
            dense.wrap(stage.embedding)
            assert isinstance(stage.embedding, FSDPModule)
            stage.embedding.set_unshard_in_backward(False)
        dense.wrap(stage, reshard_after_forward=False)
        _set_backward_prefetch(stage)
        register_fsdp_forward_method(stage, "logits")
        _CallerDicts().register_hooks(stage)
        gathers = _use_fp8_all_gather(stage, placements, dense.axis, fp8_weights, compute_dtype)
        if mesh.device.type != "meta":
            stage.to_empty(device=mesh.device)
        for spec in sorted(dict.fromkeys(specs.values()), key=lambda spec: -spec.weight_decay):
            chosen = {name: p for name, p in stage.named_parameters() if specs[name] == spec}
            group = _build_param_group(
                stage,
                chosen,
                placements,
                mesh,
                spec=spec,
                reduce_dtype=reduce_dtype,
                fp8_gathers=gathers,
            )
            groups.append(group)
    return groups


def _use_fp8_all_gather(
    stage: Decoder,
    placements: Mapping[str, Placement],
    axis: Axis,
    fp8_weights: Fp8Weights | None,
    dtype: torch.dtype,
) -> list[Fp8AllGather]:
    """Let units that have weights for it send these in eight bits; who does so."""
    if fp8_weights is None or fp8_weights.kernels is None or axis.size == 1:
        return []
    names = {parameter: name for name, parameter in stage.named_parameters()}
    found = []
    for unit in _fsdp_units(stage):
        # Nothing public tells the order of parameters in a message.
        inside = unit._get_fsdp_state()._fsdp_param_group
        members = [] if inside is None else [names[member.sharded_param] for member in inside.fsdp_params]
        segments, count = [], 0
        for name in members:
            shape = placements[name].shape
            dim, scaling = shard_dim(shape, axis.size), fp8_weights.scalings.get(name)
            # In parts along another dimension, what a rank has is no stretch of the matrix.
            matrix = (
                ScaledMatrix.from_shape(shape, scaling, first_scale=count) if scaling is not None and dim == 0 else None
            )
            count += 0 if matrix is None else matrix.num_scales
            segments.append(MessageSegment(-(-shape[dim] // axis.size) * (math.prod(shape) // shape[dim]), matrix))
        if count:
            found.append(Fp8AllGather(axis, segments, itemsize=dtype.itemsize, kernels=fp8_weights.kernels))
            unit.set_custom_all_gather(found[-1])
    return found


def _build_param_group(
    stage: Decoder,
    parameters: Mapping[str, nn.Parameter],
    placements: Mapping[str, Placement],
    mesh: ParallelMesh,
    *,
    spec: GroupSpec,
    reduce_dtype: torch.dtype | None,
    fp8_gathers: Sequence[Fp8AllGather],
) -> FsdpParamGroup:
    copies, axes, sharded, stretches = mesh["dp_outer"], (mesh["shard"], mesh["edp_shard"]), [], []
    for name, parameter in parameters.items():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        sharded.append(parameter)
        stretches.append(owned_flat_shard(placements[name], axes[placements[name].expert], copies))
    assert isinstance(stage, FSDPModule)
    group = FsdpParamGroup(
        sharded,
        [placements[name] for name in parameters],
        stretches,
        copies,
        shard_axes=axes,
        spec=spec,
        stage=stage,
        reduce_dtype=reduce_dtype,
        fp8_gathers=fp8_gathers,
    )
    for weight in group.weights():
        weight.zero_()
    return group


def _has_tied_head(stage: Decoder) -> bool:
    """Whether the head computes with the embedding's weights."""
    return stage.head is not None and stage.head.weight is None


def _expert_modules(module: nn.Module, placements: Mapping[str, Placement], prefix: str = "") -> Iterator[nn.Module]:
    """The largest modules that hold nothing but expert parameters."""
    names = [name for name, _ in module.named_parameters(prefix=prefix)]
    if names and all(placements[name].expert for name in names):
        yield module
        return
    for name, child in module.named_children():
        yield from _expert_modules(child, placements, f"{prefix}.{name}" if prefix else name)


def _set_backward_prefetch(stage: Decoder) -> None:
    """In the backward pass, every unit begins to gather the one whose turn is next.

    By itself fully_shard takes the unit that was left before this one, which is of another micro-batch when it is a
    stage's first; that one would be gathered for nothing. The first unit names itself, which is here already.
    """
    # A module comes behind its own children in every list of modules turned round, as it does in the forward pass.
    forward = [[] if stage.embedding is None else _fsdp_units(stage.embedding)]
    forward += [reversed(list(_fsdp_units(block))) for block in stage.layers.values()]
    forward.append([stage] if isinstance(stage, FSDPModule) else [])
    order = [unit for units in forward for unit in units]
    for unit, following in zip(order, [order[0], *order]):
        unit.set_modules_to_backward_prefetch([following])


def _fsdp_units(stage: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in stage.modules() if isinstance(module, FSDPModule))


class _CallerDicts:
    """Gives a stage the caller's own dicts, which layers write their reports into.

    fully_shard replaces tensors among the arguments, and in torch 2.11 it hands over copies of the dicts around them.
    """

    def __init__(self) -> None:
        self._dicts: dict[str, dict[Any, Any]] = {}

    def register_hooks(self, stage: nn.Module) -> None:
        stage.register_forward_pre_hook(self._remember, prepend=True, with_kwargs=True)
        stage.register_forward_pre_hook(self._restore, with_kwargs=True)

    def _remember(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._dicts = {name: value for name, value in kwargs.items() if isinstance(value, dict)}

    def _restore(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dicts, self._dicts = self._dicts, {}
        return args, {**kwargs, **dicts}
