"""Plans activation offload of a stage: whose activations wait in host memory between the forward and the backward pass.

By layer (`--cpu-offloading-num-layers`) some layers offload all they save. They are spread evenly over the stage, so that the host link is
always busy: the tensors of one of them have the time of all layers up to the next one for offload, and in backward for reload.

By module (`--offload-modules`) every layer offloads what the chosen modules save. A group is what one module of one layer saves. In the
order of the forward pass,

- groups of a pipeline rank stay until it keeps its number times `--delta-offload-bytes-across-pp-ranks` on the device;
- of the rest, the first `--activation-offload-fraction` are offloaded, since these are needed last;
- a stage that holds one micro-batch at a time keeps its last layer, with which backward begins.

A group that has fewer elements than `--min-offloaded-tensor-size` is counted as one that stays; of others each tensor is compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from petatron.config.schema.memory import MemoryConfig
from petatron.estimate.activation_bytes import layer_bytes, region_bytes
from petatron.estimate.recompute_plan import RecomputePlan
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.branch_spec import FULL
from petatron.layers.transformer_layer import LayerSpec

IN_TRANSIT = 1
"""Offloaded layers behind the one that runs whose copies may be under way."""
_NOTHING = (
    "offload: nothing: no layer has a tensor to offload by --offload-modules, --min-offloaded-tensor-size and "
    "--activation-offload-fraction"
)
_CONTAINED: Mapping[str, tuple[str, ...]] = {"experts": ("expert_fc1", "moe_act")}


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """What the layers of one stage offload.

    modules: the offloaded modules of every layer, {full} for all it saves. sizes: their bytes of one micro-batch.
    layers_on_device: how many offloaded layers have activations on the device: the one that runs and those in transfer.
    min_elements: tensors with fewer stay; None: where whole layers are offloaded, tensors of few bytes do.
    """

    modules: tuple[frozenset[str], ...]
    sizes: tuple[int, ...]
    layers_on_device: int = 1 + IN_TRANSIT
    min_elements: int | None = None

    @property
    def total_bytes(self) -> int:
        """The bytes of one micro-batch in host memory."""
        return sum(self.sizes)

    def freed_bytes(self, in_flight: int) -> int:
        """Returns the bytes that offload frees from a stage's peak: all that is offloaded, less what is in transfer at a time."""
        return max(0, in_flight * self.total_bytes - self.layers_on_device * max(self.sizes, default=0))

    def describe(self) -> str | None:
        """Describes the plan in one line, for the log; None if no offload is asked for."""
        count, names = sum(map(bool, self.modules)), frozenset[str]().union(*self.modules)
        if not count:
            return None if self.min_elements is None else _NOTHING
        what = "activations" if FULL in names else f"activations of {', '.join(sorted(names))}"
        return f"offload: {what} in {count} of {len(self.modules)} layers wait in host memory"


def offloaded_modules(memory: MemoryConfig) -> frozenset[str]:
    """Returns the modules that are offloaded, parts instead of those that contain them; none if offload is not by module."""
    if not memory.fine_grained_activation_offloading:
        return frozenset()
    return frozenset(part for name in memory.offload_modules for part in _CONTAINED.get(name, (name,)))


def offloaded_layers(num_layers: int, num_offloaded: int, *, num_without_backward: int = 0) -> tuple[int, ...]:
    """Returns the positions of the offloaded layers in a stage; a stage of fewer than `num_offloaded` layers offloads all.

    Its first `num_without_backward` layers save nothing that could be offloaded.

    >>> offloaded_layers(8, 3), offloaded_layers(2, 3), offloaded_layers(8, 0), offloaded_layers(8, 2, num_without_backward=4)
    ((0, 2, 5), (0, 1), (), (4, 6))
    """
    num_saving = num_layers - num_without_backward
    num_offloaded = min(num_offloaded, num_saving)
    return tuple(num_without_backward + index * num_saving // num_offloaded for index in range(num_offloaded))


def plan_offload(
    memory: MemoryConfig,
    shape: ActivationShape,
    layers: Sequence[LayerSpec],
    plan: RecomputePlan,
    *,
    pipeline_rank: int = 0,
    num_local_stages: int = 1,
) -> OffloadPlan:
    """Returns what a stage of these layers offloads while it recomputes what `plan` says.

    `num_local_stages` is the number of stages of this rank, which share what the rank keeps evenly.
    """
    nothing = OffloadPlan((frozenset(),) * len(layers), (0,) * len(layers))
    if memory.cpu_offloading_num_layers > 0:
        return _whole_layers(memory.cpu_offloading_num_layers, shape, layers, plan)
    asked = offloaded_modules(memory)
    if not asked:
        return nothing
    end = len(layers) - (1 if plan.in_flight == 1 else 0)
    saved = {kind: region_bytes(kind[0], shape, kind[1]) for kind in set(zip(layers, plan.modules, strict=True))}
    groups = [
        (index, name, size)
        for index in range(plan.num_without_backward, end)
        for name, size in saved[layers[index], plan.modules[index]].items()
        if name in asked and size >= max(1, memory.min_offloaded_tensor_size) * shape.element_bytes
    ]
    kept = pipeline_rank * memory.delta_offload_bytes_across_pp_ranks / (num_local_stages * plan.in_flight)
    groups = _without_first(groups, kept)
    count = len(groups) - int(len(groups) * (1.0 - memory.activation_offload_fraction))
    modules, sizes = [set[str]() for _ in layers], [0] * len(layers)
    for index, name, size in groups[:count]:
        modules[index].add(name)
        sizes[index] += size
    in_transit = memory.fine_grained_offloading_max_inflight_offloads
    return OffloadPlan(
        tuple(map(frozenset, modules)),
        tuple(sizes),
        1 + (IN_TRANSIT if in_transit is None else in_transit),
        memory.min_offloaded_tensor_size,
    )


def _whole_layers(number: int, shape: ActivationShape, layers: Sequence[LayerSpec], plan: RecomputePlan) -> OffloadPlan:
    chosen = {*offloaded_layers(len(layers), number, num_without_backward=plan.num_without_backward)}
    kinds = {(layers[index], plan.modules[index]) for index in chosen}
    saved = {kind: layer_bytes(kind[0], shape, kind[1]) for kind in kinds}
    sizes = [saved[layers[at], plan.modules[at]] if at in chosen else 0 for at in range(len(layers))]
    modules = (frozenset((FULL,)) if at in chosen else frozenset[str]() for at in range(len(layers)))
    return OffloadPlan(tuple(modules), tuple(sizes))


def _without_first(groups: list[tuple[int, str, int]], kept_bytes: float) -> list[tuple[int, str, int]]:
    """Drops the first groups until they have `kept_bytes` or more."""
    for number, (_, _, size) in enumerate(groups):
        if kept_bytes <= 0:
            return groups[number:]
        kept_bytes -= size
    return []
