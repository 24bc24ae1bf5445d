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
    EightBitAllGather,
    RecordedAllGather,
    RecordedReduceScatter,
    Segment,
    device_mesh,
)
from petatron.parallel.data.gradient_reduction import sum_inside_replica
from petatron.sharding.flat_shard import Part, Stretch, share_of
from petatron.sharding.fp8_gather import EightBitWeights, Matrix
from petatron.sharding.shard_spec import Placement, Shape

Strategy = Literal["optim_grads", "optim_grads_params"]


def shard_dim(shape: Shape, ranks: int) -> int:
    """The dimension a parameter is cut along.

    >>> shard_dim((7, 6), 2), shard_dim((1, 7, 6), 2), shard_dim((1, 7), 2)
    (0, 2, 0)
    """
    if shape[0] >= ranks:
        return 0
    return next((dim for dim, size in enumerate(shape) if size % ranks == 0), 0)


def owned_stretch(placement: Placement, axis: Axis, copies: Axis) -> Stretch:
    """The part of a parameter that this rank keeps, as it lies in memory."""
    shape, dim = placement.shape, shard_dim(placement.shape, axis.size)
    inner, size = math.prod(shape[dim + 1 :]), shape[dim]
    most = -(-size // axis.size)
    begin, end = (min(at * most, size) * inner for at in (axis.rank, axis.rank + 1))
    parts = tuple(
        Part(placement, outer * size * inner + begin, outer * size * inner + end, outer * (end - begin))
        for outer in range(math.prod(shape[:dim]))
        if begin < end
    )
    length = sum(part.end - part.begin for part in parts)
    return Stretch(length, parts, share_of(length, copies))


class ShardedGroup:
    """Parameters of one stage with one update rule, as far as this rank keeps them; one stretch per parameter.

    Gradients lie in one buffer that fully_shard adds to: it is handed out as the parameters' `grad`.
    """

    def __init__(
        self,
        parameters: Sequence[DTensor],
        stretches: Sequence[Stretch],
        copies: Axis,
        *,
        decay: bool,
        stage: FSDPModule,
        wire_dtype: torch.dtype | None,
        gathers: Sequence[EightBitAllGather] = (),
    ) -> None:
        self.decay = decay
        self._gathers = gathers
        self.stretches = stretches
        self.copies = copies
        self.stage = stage
        self.wire_dtype = wire_dtype
        self._parameters = parameters
        first = parameters[0].to_local()
        wide = torch.promote_types(first.dtype, torch.float32)
        self.flat_grads = torch.zeros(sum(s.length for s in stretches), dtype=wide, device=first.device)
        self._grads = [self._handed_out(parameter, grad) for parameter, grad in zip(parameters, self.grads())]

    @staticmethod
    def _handed_out(parameter: DTensor, grad: Tensor) -> DTensor:
        local = grad.view(parameter.to_local().shape)
        spec = {"shape": parameter.shape, "stride": parameter.stride()}
        return DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False, **spec)

    @torch.no_grad()
    def weights(self) -> list[Tensor]:
        return [parameter.to_local().detach().view(-1) for parameter in self._parameters]

    def grads(self) -> list[Tensor]:
        return list(self.flat_grads.split([stretch.length for stretch in self.stretches]))

    def agree(self) -> None:
        """Nothing: scales are agreed on where a block is gathered."""

    def publish(self) -> None:
        """Let go of gathered parameters, so that the next forward pass gathers the new ones."""
        for unit in _units(self.stage):
            unit.reshard()
        for gather in self._gathers:
            gather.weights_changed()

    def begin(self) -> None:
        """Gradients start from zero, in this group's buffer."""
        self.flat_grads.zero_()
        for parameter, grad in zip(self._parameters, self._grads):
            parameter.grad = grad


class ShardedGradients:
    """What is left to do about gradients that fully_shard reduces: the start, the outer sum, the end."""

    def __init__(self, groups: Sequence[ShardedGroup], mesh: ParallelMesh) -> None:
        self._groups = groups
        self._mesh = mesh
        self._stages = list(dict.fromkeys(group.stage for group in groups))

    def begin(self, micro_batches: int) -> None:
        """Forget the last step's gradients. The number of micro-batches does not matter: each is reduced by itself."""
        for group in self._groups:
            group.begin()
        for stage in self._stages:
            stage.set_is_last_backward(False)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the reductions under way, then add up over the replicas of the shards and inside a replica."""
        for stage in self._stages:
            stage.set_is_last_backward(True)
            # Nothing public waits outside of a backward pass; torch's own pipeline stages call this one too.
            stage._get_fsdp_state()._root_post_backward_final_callback()
        if self._mesh["dp_outer"].size > 1:
            self._sum_over_replicas()
        sum_inside_replica(self._groups, self._mesh)

    def _sum_over_replicas(self) -> None:
        started = []
        for group in self._groups:
            grads = group.flat_grads
            wire = grads if group.wire_dtype is None else grads.to(group.wire_dtype)
            started.append((grads, wire, collectives.start_all_reduce(wire, group.copies)))
        for grads, wire, handle in started:
            handle.wait()
            if wire is not grads:
                grads.copy_(wire)


@dataclass(frozen=True, slots=True)
class _Sharing:
    """The ranks that share units of one kind, and how."""

    axis: Axis
    devices: DeviceMesh
    precision: MixedPrecisionPolicy
    strategy: Strategy

    def wrap(self, module: nn.Module, *, again: bool = True) -> None:
        """Make a module a unit. `again`: it is let go after its forward pass, to be gathered for the backward pass."""
        whole = self.strategy == "optim_grads"
        fully_shard(
            module,
            mesh=self.devices,
            reshard_after_forward=again and not whole,
            shard_placement_fn=partial(_cut, axis=self.axis),
            mp_policy=self.precision,
        )
        assert isinstance(module, FSDPModule)
        module.set_reshard_after_backward(not whole, recurse=False)
        module.set_custom_all_gather(RecordedAllGather(self.axis))
        module.set_custom_reduce_scatter(RecordedReduceScatter(self.axis))
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _cut(parameter: nn.Parameter, axis: Axis) -> Shard:
    return Shard(shard_dim(tuple(parameter.shape), axis.size))


def shard_stages(
    stages: Sequence[Decoder],
    placements: Mapping[str, Placement],
    mesh: ParallelMesh,
    decays: Callable[[str, nn.Parameter], bool],
    *,
    strategy: Strategy,
    compute_dtype: torch.dtype,
    wire_dtype: torch.dtype | None,
    eight_bits: EightBitWeights | None = None,
) -> list[ShardedGroup]:
    """Share the parameters of a rank's stages, and give this rank's part of them memory, all zero.

    The stages are still on the meta device, in at least fp32, with all other kinds of parallelism applied. `wire_dtype` is
    the precision gradients are reduced in; None means at least fp32. `eight_bits` says which weights may be gathered so.
    """
    wide = torch.promote_types(compute_dtype, torch.float32)
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=wire_dtype or wide, cast_forward_inputs=False
    )
    dense, expert = (
        _Sharing(mesh[name], device_mesh(mesh[name], mesh), precision, strategy) for name in ("shard", "edp_shard")
    )
    groups: list[ShardedGroup] = []
    every = [parameter for stage in stages for parameter in stage.parameters()]
    assert len(every) == len(set(every)), "a parameter of two stages cannot be fully sharded"
    for stage in stages:
        decay_of = {name: decays(name, parameter) for name, parameter in stage.named_parameters()}
        for module in _expert_modules(stage, placements):
            expert.wrap(module)
        for block in stage.layers.values():
            dense.wrap(block)
        if stage.embedding is not None and not _borrowed(stage):
            dense.wrap(stage.embedding)
            assert isinstance(stage.embedding, FSDPModule)
            stage.embedding.set_unshard_in_backward(False)
        dense.wrap(stage, again=False)
        _gather_ahead(stage)
        register_fsdp_forward_method(stage, "logits")
        _SameDicts().watch(stage)
        gathers = _gather_in_eight_bits(stage, placements, dense.axis, eight_bits, compute_dtype)
        if mesh.device.type != "meta":
            stage.to_empty(device=mesh.device)
        for decay in (True, False):
            chosen = {name: p for name, p in stage.named_parameters() if decay_of[name] == decay}
            if chosen:
                group = _group(stage, chosen, placements, mesh, decay=decay, wire_dtype=wire_dtype, gathers=gathers)
                groups.append(group)
    return groups


def _gather_in_eight_bits(
    stage: Decoder,
    placements: Mapping[str, Placement],
    axis: Axis,
    eight_bits: EightBitWeights | None,
    dtype: torch.dtype,
) -> list[EightBitAllGather]:
    """Let units that have weights for it send these in eight bits; who does so."""
    if eight_bits is None or eight_bits.kernels is None or axis.size == 1:
        return []
    names = {parameter: name for name, parameter in stage.named_parameters()}
    found = []
    for unit in _units(stage):
        # Nothing public tells the order of parameters in a message.
        inside = unit._get_fsdp_state()._fsdp_param_group
        members = [] if inside is None else [names[member.sharded_param] for member in inside.fsdp_params]
        segments, count = [], 0
        for name in members:
            shape = placements[name].shape
            dim, scaling = shard_dim(shape, axis.size), eight_bits.scalings.get(name)
            # In parts along another dimension, what a rank has is no stretch of the matrix.
            matrix = Matrix.of(shape, scaling, first=count) if scaling is not None and dim == 0 else None
            count += 0 if matrix is None else matrix.scales
            segments.append(Segment(-(-shape[dim] // axis.size) * (math.prod(shape) // shape[dim]), matrix))
        if count:
            found.append(EightBitAllGather(axis, segments, itemsize=dtype.itemsize, kernels=eight_bits.kernels))
            unit.set_custom_all_gather(found[-1])
    return found


def _group(
    stage: Decoder,
    parameters: Mapping[str, nn.Parameter],
    placements: Mapping[str, Placement],
    mesh: ParallelMesh,
    *,
    decay: bool,
    wire_dtype: torch.dtype | None,
    gathers: Sequence[EightBitAllGather],
) -> ShardedGroup:
    copies, sharded, stretches = mesh["dp_outer"], [], []
    for name, parameter in parameters.items():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        axis = mesh["edp_shard" if placements[name].expert else "shard"]
        sharded.append(parameter)
        stretches.append(owned_stretch(placements[name], axis, copies))
    assert isinstance(stage, FSDPModule)
    group = ShardedGroup(sharded, stretches, copies, decay=decay, stage=stage, wire_dtype=wire_dtype, gathers=gathers)
    for weight in group.weights():
        weight.zero_()
    return group


def _borrowed(stage: Decoder) -> bool:
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


def _gather_ahead(stage: Decoder) -> None:
    """In the backward pass, every unit begins to gather the one whose turn is next.

    By itself fully_shard takes the unit that was left before this one, which is of another micro-batch when it is a
    stage's first; that one would be gathered for nothing. The first unit names itself, which is here already.
    """
    # A module comes behind its own children in every list of modules turned round, as it does in the forward pass.
    forward = [[] if stage.embedding is None else _units(stage.embedding)]
    forward += [reversed(list(_units(block))) for block in stage.layers.values()]
    forward.append([stage] if isinstance(stage, FSDPModule) else [])
    order = [unit for units in forward for unit in units]
    for unit, following in zip(order, [order[0], *order]):
        unit.set_modules_to_backward_prefetch([following])


def _units(stage: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in stage.modules() if isinstance(module, FSDPModule))


class _SameDicts:
    """Gives a stage the caller's own dicts, which layers write their reports into.

    fully_shard replaces tensors among the arguments, and in torch 2.11 it hands over copies of the dicts around them.
    """

    def __init__(self) -> None:
        self._dicts: dict[str, dict[Any, Any]] = {}

    def watch(self, stage: nn.Module) -> None:
        stage.register_forward_pre_hook(self._remember, prepend=True, with_kwargs=True)
        stage.register_forward_pre_hook(self._restore, with_kwargs=True)

    def _remember(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._dicts = {name: value for name, value in kwargs.items() if isinstance(value, dict)}

    def _restore(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dicts, self._dicts = self._dicts, {}
        return args, {**kwargs, **dicts}
