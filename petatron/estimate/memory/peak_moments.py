"""The moments of a training step at which a rank's memory may peak.

Weights and optimizer state are there throughout. Beside them are activations, gradients and what a moment needs by itself:

    the loss                activations of all layers, and a chunk of logits
    a branch in backward    activations of the layers before it and its own, which may be recomputed, and its workspace
    the update              gradients alone
    a layer that saves nothing, being below every trainable parameter: its input and what a branch of it computes

A step of one micro-batch has the gradients of those layers alone that backward has been through (`parallel/data/gradient_reduction.py`),
and of the output head, which are computed with the loss. Other steps have all gradients at any time, and so has one that is
replayed as a CUDA graph. Activations fall from the loss to the update while gradients grow, so that in a row of equal layers the peak
is at one of its ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from petatron.config import RunConfig
from petatron.config.pipeline_stages import PipelineStage, pipeline_stages
from petatron.config.schema.parallel import FSDP_STRATEGIES
from petatron.estimate.activation_bytes import branch_bytes, layer_bytes, layer_input_bytes
from petatron.estimate.offload_plan import OffloadPlan, plan_offload
from petatron.estimate.recompute_plan import RecomputePlan
from petatron.estimate.state_bytes import count_parameters
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.branch_spec import FULL
from petatron.layers.transformer_layer import LayerSpec
from petatron.mesh.rank_layout import Layout
from petatron.models.frozen_params import frozen_params, without_names
from petatron.models.model_spec import ModelSpec
from petatron.models.registry import model_spec
from petatron.schedule.pipeline_plan import num_micro_batches, pipeline_plan
from petatron.sharding.shard_spec import ModelParallelCoordinate


@dataclass(frozen=True, slots=True)
class PeakMoment:
    """Bytes at a moment besides weights and optimizer state, and the share of all gradients that exist then.

    logits: what is saved outside layers. workspace: what nothing saves.
    """

    activations: int
    logits: int
    workspace: int
    grad_share: float

    def bytes_with(self, gradients: int) -> int:
        """Returns all bytes of the moment, of all gradients `gradients`."""
        return self.activations + self.logits + self.workspace + int(self.grad_share * gradients)


def frees_gradients(run: RunConfig) -> bool:
    """Whether the memory of gradients is free while activations are most."""
    sharded = run.parallel.data_parallel_sharding_strategy in FSDP_STRATEGIES and run.parallel.world_size > 1
    return num_micro_batches(run) == 1 and not sharded and run.train.cuda_graphs != "on"


def peak_moments(
    run: RunConfig, plans: Sequence[RecomputePlan], stages: Sequence[int], shape: ActivationShape
) -> list[PeakMoment]:
    """Returns the moments of a rank with these stages of the model at which it may need most; `plans` are those of all stages."""
    spec, all_stages = model_spec(run), pipeline_stages(run)
    offloads = [offload_plan(run, plans, index, shape) for index in stages]
    if len(stages) == 1 and frees_gradients(run):
        return [*_OneMicroBatch(run, spec, shape, all_stages[stages[0]], plans[stages[0]], offloads[0]).moments()]
    local = [(all_stages[index], plans[index]) for index in stages]
    return [*_moments_with_all_gradients(run, spec, shape, local, offloads)]


def offload_plan(run: RunConfig, plans: Sequence[RecomputePlan], index: int, shape: ActivationShape) -> OffloadPlan:
    """Returns what one stage of a run offloads; `plans` are those of all stages."""
    pipeline, layers = pipeline_plan(run), model_spec(run).stage_layers(pipeline_stages(run)[index])
    ranks = {"pipeline_rank": pipeline.rank_of(index), "num_local_stages": pipeline.virtual}
    return plan_offload(run.memory, shape, layers, plans[index], **ranks)


def _moments_with_all_gradients(
    run: RunConfig,
    spec: ModelSpec,
    shape: ActivationShape,
    stages: Sequence[tuple[PipelineStage, RecomputePlan]],
    offloads: Sequence[OffloadPlan],
) -> Iterator[PeakMoment]:
    """Yields the loss and the most that backward needs."""
    logits = sum(plan.in_flight * min(plan.saved_bytes, spec.outer_saved_bytes(shape, stage)) for stage, plan in stages)
    saved = sum(
        plan.in_flight * plan.saved_bytes - offload.freed_bytes(plan.in_flight)
        for (_, plan), offload in zip(stages, offloads, strict=True)
    )
    recomputed = sum(plan.peak_bytes - plan.in_flight * plan.saved_bytes for _, plan in stages)
    kinds = {layer for stage, plan in stages for layer in spec.stage_layers(stage)[plan.num_without_backward :]}
    workspace = max(
        (
            moment.workspace
            for layer in kinds
            for branch in layer.branches
            for moment in branch.backward_moments(layer.shape_of(shape))
        ),
        default=0,
    )
    yield PeakMoment(saved - logits + recomputed, logits, workspace, 1.0)
    forward = max((_forward_workspace(spec.stage_layers(stage), plan, shape) for stage, plan in stages), default=0)
    if forward:  # of the last micro-batch in flight
        earlier = max(1.0 - 1.0 / plan.in_flight for _, plan in stages)
        yield PeakMoment(int(earlier * (saved - logits)), int(earlier * logits), forward, 1.0)
    if any(stage.has_loss for stage, _ in stages):
        yield PeakMoment(saved - logits, logits, spec.loss_workspace_bytes(shape), 1.0)


def _forward_workspace(layers: Sequence[LayerSpec], plan: RecomputePlan, shape: ActivationShape) -> int:
    """Returns what the forward of a layer that saves nothing needs: its input, and what its largest branch would save."""
    first = dict.fromkeys(layers[: plan.num_without_backward])
    return max(
        (
            layer_input_bytes(layer, shape) + max(branch_bytes(layer, branch, shape) for branch in layer.branches)
            for layer in first
        ),
        default=0,
    )


class _OneMicroBatch:
    """A step of one micro-batch on a rank with one stage."""

    def __init__(
        self,
        run: RunConfig,
        spec: ModelSpec,
        shape: ActivationShape,
        stage: PipelineStage,
        plan: RecomputePlan,
        offload: OffloadPlan,
    ) -> None:
        self._spec, self._shape, self._stage, self._plan = spec, shape, stage, plan
        self._layers, self._frozen = spec.stage_layers(stage), frozen_params(run)
        self._offload, self._first = offload, plan.num_without_backward
        layout = Layout.from_config(run.parallel)
        self._coordinate = ModelParallelCoordinate(
            tp_size=layout.tp, ep_size=layout.ep, etp_size=layout.etp, data_size=layout.dp * layout.cp
        )
        starts = accumulate((count for count, _ in plan.groups), initial=0)
        self._group_start = [start for start, (count, _) in zip(starts, plan.groups) for _ in range(count)]
        self._saved = [self._saved_bytes(index) for index in range(len(self._layers))]

    def _saved_bytes(self, index: int) -> int:
        """Returns what a layer saves; of a recomputed group that is the first one's input, and without a backward nothing."""
        if index < self._first:
            return 0
        layer, modules = self._layers[index], self._plan.modules[index]
        if FULL in modules:
            return layer_input_bytes(layer, self._shape) if self._group_start[index] == index else 0
        return layer_bytes(layer, self._shape, modules)

    def _on_device(self, end: int) -> int:
        """Returns the bytes that the layers before `end` have on the device; of what is offloaded, those of few layers at a time."""
        away = [min(saved, size) for saved, size in zip(self._saved[:end], self._offload.sizes)]
        return sum(self._saved[:end]) - sum(sorted(away)[: -self._offload.layers_on_device])

    def _elements(self, stage: PipelineStage) -> int:
        """Returns the trained elements of a stage outside its layers."""
        return count_parameters(self._frozen.trained(self._spec.outer_params(stage)), self._coordinate)

    def _trained(self, index: int, prefix: str = "") -> int:
        """Returns the trained elements of a layer, or of those of its parameters whose names begin so."""
        layer, number = self._layers[index], self._stage.layer_indices[index]
        frozen = self._frozen.layer_names[number] if self._frozen else frozenset()
        params = {name: param for name, param in layer.params().items() if name.startswith(prefix)}
        return count_parameters(without_names(params, frozen), self._coordinate)

    def moments(self) -> Iterator[PeakMoment]:
        stage, spec, shape, count = self._stage, self._spec, self._shape, len(self._layers)
        head = self._elements(PipelineStage((), has_embedding=False, has_loss=True)) if stage.has_loss else 0
        layers = self._trained_by_layer()
        total = max(1, self._elements(stage) + sum(layers))
        if stage.has_loss:
            logits = spec.outer_saved_bytes(shape, stage)
            yield PeakMoment(self._on_device(count), logits, spec.loss_workspace_bytes(shape), head / total)
        before_loss = spec.outer_saved_bytes(shape, replace(stage, has_loss=False))
        written = head
        for index in reversed(range(self._first, count)):
            if not self._is_between_equals(index):
                yield from self._layer_moments(index, before_loss, written, total)
            written += layers[index]
        if self._first:
            yield PeakMoment(0, 0, _forward_workspace(self._layers, self._plan, shape), 0.0)
        yield PeakMoment(0, 0, 0, 1.0)

    def _trained_by_layer(self) -> list[int]:
        """Returns the trained elements of every layer; equal ones are counted once."""
        keys = [
            (layer, self._frozen.layer_names[number] if self._frozen else frozenset[str]())
            for layer, number in zip(self._layers, self._stage.layer_indices, strict=True)
        ]
        counts = {key: self._trained(keys.index(key)) for key in set(keys)}
        return [counts[key] for key in keys]

    def _is_between_equals(self, index: int) -> bool:
        """Whether a layer's neighbors on both sides are such layers too: the peak is at an end of the row."""
        kinds = {
            (self._layers[at], self._plan.modules[at], self._saved[at], self._offload.modules[at])
            for at in range(index - 1, index + 2)
            if self._first <= at < len(self._layers)
        }
        return self._first < index < len(self._layers) - 1 and len(kinds) == 1 and not self._frozen

    def _layer_moments(self, index: int, logits: int, written: int, total: int) -> Iterator[PeakMoment]:
        """Yields the moments of one layer's backward; `written` elements have their gradients."""
        layer, modules, shape = self._layers[index], self._plan.modules[index], self._shape
        start = self._group_start[index]
        # A recomputed group has all of its layers before this one again.
        before = self._on_device(start) + sum(layer_bytes(self._layers[at], shape) for at in range(start, index))
        before += layer.extra_saved_bytes(layer.shape_of(shape))
        for at in reversed(range(len(layer.branches))):
            branch = layer.branches[at]
            earlier = sum(
                branch_bytes(layer, previous, shape, () if FULL in modules else modules)
                for previous in layer.branches[:at]
            )
            activations = before + earlier + branch_bytes(layer, branch, shape)
            elements = self._trained(index, f"{branch.name}.")
            for moment in branch.backward_moments(layer.shape_of(shape)):
                share = (written + moment.grad_share * elements) / total
                yield PeakMoment(activations, logits, moment.workspace, share)
            written += elements
