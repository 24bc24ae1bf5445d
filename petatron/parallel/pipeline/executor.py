"""Executes a schedule: the only code that calls forward and backward of a model in training.

A rank performs its list of actions in order. Transfers are started at their position in the list, adjacent ones in one batch, and
waited for where their result is used, so they overlap the computations between. An activation is freed once sent: backward needs
its graph, not its values. A forward and a backward of one entry of the list run combined (`combined_forward_backward.py`).

What moves between stages are bundles: the named tensors that a boundary declares (`models/stage_inputs_outputs.py`), in this order, and
on the way back the gradients of those that have one. An empty bundle is not sent, and not waited for. A stage below every trainable
parameter has no backward: its forward saves nothing, and its backward actions do nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from petatron.base.errors import TrainError
from petatron.layers.forward_context import StatisticsKey
from petatron.mesh import collectives
from petatron.mesh.collectives import Handle
from petatron.mesh.mesh import Axis
from petatron.models.batch import Batch
from petatron.models.objective import Objective
from petatron.models.stage_inputs_outputs import BoundaryTensor, ModelIO, StageOutput
from petatron.models.stage_interface import StageModule
from petatron.parallel.pipeline.combined_forward_backward import CombinedForwardBackward
from petatron.parallel.pipeline.objective_losses import ObjectiveTerms
from petatron.parallel.pipeline.weight_grad_queue import WeightGradQueue
from petatron.schedule import RankSchedule
from petatron.schedule.actions import COMPUTE_KINDS, SEND_KINDS, Action, ActionKind, TimedAction

FORWARD_SEND_RECV = (ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD)
StageMicroBatch = tuple[int, int]
"""stage, micro-batch"""
Bundle = dict[str, Tensor]
"""Tensors of a boundary by name."""
Bundles = dict[StageMicroBatch, Bundle]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScales:
    """The factors on losses before backward: on the sum of each loss of the objective [losses], and on auxiliary losses."""

    token_loss: Tensor
    aux_loss: Tensor


@dataclass(slots=True)
class StepResult:
    """The result of one step on this rank: the sums of each loss and metric of the objective [losses + metrics], router statistics,
    when actions ran if timed, and what each micro-batch's forward collected."""

    sums: Tensor
    router_statistics: dict[StatisticsKey, Tensor] = field(default_factory=dict)
    timed_actions: list[TimedAction] = field(default_factory=list)
    collected: list[dict[str, Tensor]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _StageBoundaries:
    """The tensors into and out of a stage, and those of them that have gradients; whether the stage has a backward at all."""

    takes: tuple[BoundaryTensor, ...]
    takes_with_grad: tuple[BoundaryTensor, ...]
    gives: tuple[BoundaryTensor, ...]
    gives_with_grad: tuple[BoundaryTensor, ...]
    has_backward: bool

    @classmethod
    def of(cls, io: ModelIO, stage: int, module: StageModule) -> _StageBoundaries:
        takes, gives = io.boundaries[stage], io.boundaries[stage + 1] if stage + 1 < len(io.boundaries) else ()
        takes_grad, gives_grad = (tuple(x for x in side if x.requires_grad) for side in (takes, gives))
        trains = any(parameter.requires_grad for parameter in module.parameters())
        return cls(takes, takes_grad, gives, gives_grad, bool(takes_grad) or trains)


@dataclass(kw_only=True)
class PipelineExecutor:
    """A rank's stages of the model, and the pipeline axis.

    dtype: that of activations. sequence_shards: the number of shards of sequence parallelism.
    """

    stages: Mapping[int, StageModule]
    axis: Axis
    io: ModelIO
    objective: Objective
    dtype: torch.dtype
    device: torch.device
    sequence_shards: int = 1
    weight_grad_queue: WeightGradQueue
    combined_passes: CombinedForwardBackward | None = None

    def __post_init__(self) -> None:
        self.boundaries = {index: _StageBoundaries.of(self.io, index, stage) for index, stage in self.stages.items()}
        self._checked_stages: set[int] = set()

    def run(
        self,
        schedule: RankSchedule,
        batches: Sequence[Batch],
        scales: LossScales | None = None,
        *,
        collect: Collection[str] = (),
        clock: Callable[[], float] | None = None,
    ) -> StepResult:
        """Performs this rank's actions; without scales there is no backward."""
        execution = _ScheduleExecution(self, schedule, batches, scales, collect)
        for actions in schedule.action_batches():
            for action in actions:
                execution.wait_for_input(action)
            start = clock() if clock else 0.0
            if actions[0].kind in COMPUTE_KINDS:
                execution.compute(actions)
            else:
                execution.start_send_recv(actions)
            if clock:
                end = clock()
                execution.result.timed_actions += [TimedAction(action, start, end) for action in actions]
        execution.finish()
        return execution.result

    def empty_tensor(self, tensor: BoundaryTensor, batch: Batch) -> Tensor:
        """Allocates a boundary tensor, or its gradient, to receive."""
        shape = tensor.shape(batch, sequence_shards=self.sequence_shards)
        return torch.empty(shape, dtype=tensor.dtype or self.dtype, device=self.device)

    def check_output(self, stage: int, given: Bundle, batch: Batch) -> None:
        """Checks the first output of a stage against what is declared: the next stage would wait for other sizes forever."""
        if stage in self._checked_stages:
            return
        self._checked_stages.add(stage)
        for tensor in self.boundaries[stage].gives:
            y = given[tensor.name]
            expected = tensor.shape(batch, sequence_shards=self.sequence_shards), tensor.dtype or self.dtype
            if (tuple(y.shape), y.dtype) != expected:
                raise TrainError(
                    f"Stage {stage} gives {tensor.name!r} as {list(y.shape)} {y.dtype}, and stage {stage + 1} takes "
                    f"{list(expected[0])} {expected[1]}. Correct the stage, or what is declared."
                )


class _BackwardInput(NamedTuple):
    """Where the backward of a stage starts.

    edges: of its losses and outputs. names: of the same outputs, None for a loss. passed_through: names of the inputs that the stage has
    passed to the next one unchanged, whose gradients come from there too.
    """

    edges: list[GradientEdge]
    names: list[str | None]
    passed_through: list[str]


class _ScheduleExecution:
    """One step's activations and gradients, computed or in transfer."""

    def __init__(
        self,
        pipeline: PipelineExecutor,
        schedule: RankSchedule,
        batches: Sequence[Batch],
        scales: LossScales | None,
        collect: Collection[str],
    ) -> None:
        self._pipeline, self._schedule, self._batches, self._scales = pipeline, schedule, batches, scales
        self._inputs: Bundles = {}  # stage inputs, until their backward
        self._backward_inputs: dict[StageMicroBatch, _BackwardInput] = {}
        self._outputs: Bundles = {}  # to be sent
        self._output_grads: Bundles = {}
        self._input_grads: Bundles = {}  # to be sent
        self._receiving: dict[tuple[ActionKind, StageMicroBatch], list[Handle]] = {}
        self._sending: deque[Handle] = deque()
        self._terms = ObjectiveTerms(
            pipeline.objective, None if scales is None else scales.token_loss, device=pipeline.device
        )
        self._collect = collect
        self.result = StepResult(self._terms.sums, collected=[{} for _ in batches] if collect else [])

    def wait_for_input(self, action: Action) -> None:
        """Waits until the action's input from another rank has been received."""
        key = (action.stage, action.micro_batch)
        kind = ActionKind.RECEIVE_FORWARD if action.kind is ActionKind.FORWARD else ActionKind.RECEIVE_BACKWARD
        if action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRAD):
            for handle in self._receiving.pop((kind, key), ()):
                handle.wait()

    def compute(self, actions: Sequence[Action]) -> None:
        """Runs one computation, or a forward and a backward combined."""
        if len(actions) == 1:
            self._compute(actions[0])
            return
        assert self._pipeline.combined_passes is not None, "the model was not built to run two passes combined"
        self._pipeline.combined_passes.run(*(partial(self._compute, action) for action in actions))

    def _compute(self, action: Action) -> None:
        key = (action.stage, action.micro_batch)
        match action.kind:
            case ActionKind.FORWARD:
                self._forward(key)
            case ActionKind.BACKWARD:
                self._backward(key)
            case ActionKind.INPUT_GRAD:
                with self._pipeline.weight_grad_queue.deferring(key):
                    self._backward(key)
            case ActionKind.WEIGHT_GRAD:
                self._pipeline.weight_grad_queue.compute_deferred(key)

    def start_send_recv(self, actions: Sequence[Action]) -> None:
        """Starts transfers as one batch."""
        sends: list[tuple[Tensor, int]] = []
        receives: list[tuple[Tensor, int]] = []
        receive_counts: list[tuple[ActionKind, StageMicroBatch, int]] = []
        for action in actions:
            key, forward = (action.stage, action.micro_batch), action.kind in FORWARD_SEND_RECV
            boundaries = self._pipeline.boundaries[action.stage]
            if action.kind in SEND_KINDS:
                to = self._schedule.rank_of(action.stage + (1 if forward else -1))
                bundle = (self._outputs if forward else self._input_grads).pop(key)
                declared = boundaries.gives if forward else boundaries.takes_with_grad
                sends += [(bundle[tensor.name], to) for tensor in declared]
            else:
                source = self._schedule.rank_of(action.stage + (-1 if forward else 1))
                declared = boundaries.takes if forward else boundaries.gives_with_grad
                batch = self._batches[action.micro_batch]
                bundle = {tensor.name: self._pipeline.empty_tensor(tensor, batch) for tensor in declared}
                (self._inputs if forward else self._output_grads)[key] = bundle
                receives += [(x, source) for x in bundle.values()]
                receive_counts.append((action.kind, key, len(bundle)))
        # What is captured as a CUDA graph has not begun, and cannot be asked.
        captured = self._pipeline.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        while self._sending and not captured and self._sending[0].done():
            self._sending.popleft()
        sent, received = collectives.start_send_recv(self._pipeline.axis, sends=sends, receives=receives)
        self._sending += sent
        handles = iter(received)
        for kind, key, count in receive_counts:
            self._receiving[kind, key] = [next(handles) for _ in range(count)]

    def finish(self) -> None:
        for handle in self._sending:
            handle.wait()
        unfinished = (self._backward_inputs, self._outputs, self._output_grads, self._input_grads, self._receiving)
        assert not any(unfinished), f"the schedule {self._schedule.name} left work undone"

    def _forward(self, key: StageMicroBatch) -> None:
        stage, micro_batch = key
        batch, scales = self._batches[micro_batch], self._scales
        has_backward = scales is not None and self._pipeline.boundaries[stage].has_backward
        inputs = self._inputs.get(key, {}) if has_backward else self._inputs.pop(key, {})
        if scales is not None:
            for tensor in self._pipeline.boundaries[stage].takes_with_grad:
                inputs[tensor.name].requires_grad_()
        statistics: dict[StatisticsKey, Tensor] = {}
        edges: list[GradientEdge] = []
        with torch.set_grad_enabled(has_backward):
            weights = self._terms.known_gradients(batch)
            # `fully_shard` must see the inputs as a positional argument (`parallel/data/fsdp.py`).
            output = self._pipeline.stages[stage](
                batch,
                inputs,
                aux_loss_scale=None if scales is None else scales.aux_loss,
                router_statistics=statistics,
                loss_weights=weights if self._pipeline.objective.uses_model_losses else None,
                collect=self._collect or self._terms.outputs,
            )
            if not self._collect:
                edges = self._terms.add(output, batch, weights, stage=stage)
        self._pass_output(key, output, inputs, _BackwardInput(edges, [None] * len(edges), []))
        for layer, layer_statistics in statistics.items():
            total = self.result.router_statistics.get(layer)
            self.result.router_statistics[layer] = layer_statistics if total is None else total + layer_statistics

    def _pass_output(
        self, key: StageMicroBatch, output: StageOutput, inputs: Bundle, backward_input: _BackwardInput
    ) -> None:
        """Passes what the next stage takes: from this stage's output, else from its input."""
        stage, micro_batch = key
        given: Bundle = {}
        for tensor in self._pipeline.boundaries[stage].gives:
            name, y = tensor.name, output.tensors.get(tensor.name)
            if y is None:
                y = inputs.get(name)
                backward_input.passed_through.append(name)
            elif self._scales is not None and tensor.requires_grad and y.requires_grad:
                backward_input.edges.append(get_gradient_edge(y))
                backward_input.names.append(name)
            if y is None:
                raise TrainError(
                    f"Stage {stage + 1} takes {name!r}, and stage {stage} neither returns nor takes it. It returns: "
                    f"{', '.join(output.tensors) or 'nothing'}; it takes: {', '.join(inputs) or 'nothing'}."
                )
            given[name] = y.detach()
        self._pipeline.check_output(stage, given, self._batches[micro_batch])
        if stage < self._schedule.stages - 1:
            self._pass_bundle(key, stage + 1, given, self._inputs, self._outputs)
        if self._collect:
            self.result.collected[micro_batch].update(output.collected)
        if self._scales is not None:
            self._backward_inputs[key] = backward_input

    def _backward(self, key: StageMicroBatch) -> None:
        stage, _ = key
        edges, names, passed_through = self._backward_inputs.pop(key)
        output_grads = self._output_grads.pop(key, {})
        if edges:
            torch.autograd.backward(edges, [None if name is None else output_grads[name] for name in names])
        inputs = self._inputs.pop(key, {})
        if stage == 0:
            return
        input_grads: Bundle = {}
        for tensor in self._pipeline.boundaries[stage].takes_with_grad:
            x = inputs[tensor.name]
            grad, later = x.grad, output_grads.get(tensor.name) if tensor.name in passed_through else None
            if grad is None:
                grad = torch.zeros_like(x) if later is None else later
            elif later is not None:
                grad = grad + later
            input_grads[tensor.name] = grad
        self._pass_bundle(key, stage - 1, input_grads, self._output_grads, self._input_grads)

    def _pass_bundle(self, key: StageMicroBatch, stage: int, bundle: Bundle, local: Bundles, to_send: Bundles) -> None:
        """Passes tensors to a stage of this rank, or holds them for the send to another rank."""
        if self._schedule.rank_of(stage) == self._pipeline.axis.rank:
            local[stage, key[1]] = bundle
        else:
            to_send[key] = bundle
