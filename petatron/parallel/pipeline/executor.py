"""Executes a schedule: the only code that calls forward and backward of a model in training.

A rank performs its list of actions in order. Transfers are started at their position in the list, adjacent ones in one batch, and
waited for where their result is used, so they overlap the computations between. An activation is freed once sent: backward needs
its graph, not its values. A forward and a backward of one entry of the list run combined (`combined_forward_backward.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from petatron.mesh import collectives
from petatron.mesh.collectives import Handle
from petatron.mesh.mesh import Axis
from petatron.models.batch import Batch
from petatron.parallel.pipeline.combined_forward_backward import CombinedForwardBackward
from petatron.parallel.pipeline.weight_grad_queue import WeightGradQueue
from petatron.schedule import RankSchedule
from petatron.schedule.actions import COMPUTE_KINDS, SEND_KINDS, Action, ActionKind, TimedAction

FORWARD_SEND_RECV = (ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD)
StageMicroBatch = tuple[int, int]
"""stage, micro-batch"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScales:
    """The factors on losses before backward: on the sum of token losses, and on the layers' auxiliary losses."""

    token_loss: Tensor
    aux_loss: Tensor


@dataclass(slots=True)
class StepResult:
    """The result of one step: the sum of this rank's token losses, router statistics, and when actions ran if timed."""

    loss_sum: Tensor
    router_statistics: dict[int, Tensor] = field(default_factory=dict)
    timed_actions: list[TimedAction] = field(default_factory=list)


class PipelineExecutor:
    """A rank's stages of the model, and the pipeline axis."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        axis: Axis,
        *,
        empty_stage_input: Callable[[Batch], Tensor],
        weight_grad_queue: WeightGradQueue,
        combined_passes: CombinedForwardBackward | None = None,
    ) -> None:
        """`empty_stage_input` allocates a stage input (or its gradient) to receive."""
        self._stages = stages
        self._axis = axis
        self._empty_stage_input = empty_stage_input
        self._weight_grad_queue = weight_grad_queue
        self._combined_passes = combined_passes

    def run(
        self,
        schedule: RankSchedule,
        batches: Sequence[Batch],
        scales: LossScales | None = None,
        *,
        clock: Callable[[], float] | None = None,
    ) -> StepResult:
        """Performs this rank's actions; without scales there is no backward."""
        execution = _ScheduleExecution(self, schedule, batches, scales)
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


class _ScheduleExecution:
    """One step's activations and gradients, computed or in transfer."""

    def __init__(
        self, pipeline: PipelineExecutor, schedule: RankSchedule, batches: Sequence[Batch], scales: LossScales | None
    ) -> None:
        self._pipeline, self._schedule, self._batches, self._scales = pipeline, schedule, batches, scales
        self._inputs: dict[StageMicroBatch, Tensor] = {}  # stage inputs, until their backward
        self._backward_roots: dict[StageMicroBatch, Tensor | GradientEdge] = {}
        self._outputs: dict[StageMicroBatch, Tensor] = {}  # to be sent
        self._output_grads: dict[StageMicroBatch, Tensor] = {}
        self._input_grads: dict[StageMicroBatch, Tensor] = {}  # to be sent
        self._receiving: dict[tuple[ActionKind, StageMicroBatch], Handle] = {}
        self._sending: deque[Handle] = deque()
        self.result = StepResult(torch.zeros((), dtype=torch.float64, device=batches[0].tokens.device))

    def wait_for_input(self, action: Action) -> None:
        """Waits until the action's input from another rank has been received."""
        key = (action.stage, action.micro_batch)
        kind = ActionKind.RECEIVE_FORWARD if action.kind is ActionKind.FORWARD else ActionKind.RECEIVE_BACKWARD
        if action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRAD):
            handle = self._receiving.pop((kind, key), None)
            if handle is not None:
                handle.wait()

    def compute(self, actions: Sequence[Action]) -> None:
        """Runs one computation, or a forward and a backward combined."""
        if len(actions) == 1:
            self._compute(actions[0])
            return
        assert self._pipeline._combined_passes is not None, "the model was not built to run two passes combined"
        self._pipeline._combined_passes.run(*(partial(self._compute, action) for action in actions))

    def _compute(self, action: Action) -> None:
        key = (action.stage, action.micro_batch)
        match action.kind:
            case ActionKind.FORWARD:
                self._forward(key)
            case ActionKind.BACKWARD:
                self._backward(key)
            case ActionKind.INPUT_GRAD:
                with self._pipeline._weight_grad_queue.deferring(key):
                    self._backward(key)
            case ActionKind.WEIGHT_GRAD:
                self._pipeline._weight_grad_queue.compute_deferred(key)

    def start_send_recv(self, actions: Sequence[Action]) -> None:
        """Starts transfers as one batch."""
        sends, receives, receive_keys = [], [], []
        for action in actions:
            key, forward = (action.stage, action.micro_batch), action.kind in FORWARD_SEND_RECV
            if action.kind in SEND_KINDS:
                x = (self._outputs if forward else self._input_grads).pop(key)
                sends.append((x, self._schedule.rank_of(action.stage + (1 if forward else -1))))
            else:
                out = self._pipeline._empty_stage_input(self._batches[action.micro_batch])
                (self._inputs if forward else self._output_grads)[key] = out
                receives.append((out, self._schedule.rank_of(action.stage + (-1 if forward else 1))))
                receive_keys.append((action.kind, key))
        while self._sending and self._sending[0].done():
            self._sending.popleft()
        sent, received = collectives.start_send_recv(self._pipeline._axis, sends=sends, receives=receives)
        self._sending += sent
        self._receiving |= zip(receive_keys, received, strict=True)

    def finish(self) -> None:
        for handle in self._sending:
            handle.wait()
        unfinished = (self._backward_roots, self._outputs, self._output_grads, self._input_grads, self._receiving)
        assert not any(unfinished), f"the schedule {self._schedule.name} left work undone"

    def _forward(self, key: StageMicroBatch) -> None:
        stage, micro_batch = key
        batch, scales = self._batches[micro_batch], self._scales
        x = self._inputs.get(key)
        if x is not None and scales is not None:
            x.requires_grad_()
        statistics: dict[int, Tensor] = {}
        with torch.set_grad_enabled(scales is not None):
            aux_loss_scale = None if scales is None else scales.aux_loss
            weights = None if scales is None else batch.loss_mask.t().double() * scales.token_loss
            run = self._pipeline._stages[stage]
            y = run(batch, x, aux_loss_scale=aux_loss_scale, router_statistics=statistics, loss_weights_SB=weights)
            if stage == self._schedule.stages - 1:
                self.result.loss_sum += (y.detach() * batch.loss_mask.t()).sum()
                y = y if weights is None else (y * weights).sum()
        if stage < self._schedule.stages - 1:
            self._pass_to_stage(stage + 1, micro_batch, y.detach(), self._inputs, self._outputs, key)
        if scales is not None:
            self._backward_roots[key] = get_gradient_edge(y)
        else:
            self._inputs.pop(key, None)
        for layer, layer_statistics in statistics.items():
            total = self.result.router_statistics.get(layer)
            self.result.router_statistics[layer] = layer_statistics if total is None else total + layer_statistics

    def _backward(self, key: StageMicroBatch) -> None:
        stage, micro_batch = key
        root, grad = self._backward_roots.pop(key), self._output_grads.pop(key, None)
        torch.autograd.backward(root, grad)
        x = self._inputs.pop(key, None)
        if x is not None:
            assert x.grad is not None
            self._pass_to_stage(stage - 1, micro_batch, x.grad, self._output_grads, self._input_grads, key)

    def _pass_to_stage(
        self,
        stage: int,
        micro_batch: int,
        value: Tensor,
        local: dict[StageMicroBatch, Tensor],
        to_send: dict[StageMicroBatch, Tensor],
        key: StageMicroBatch,
    ) -> None:
        """Passes a tensor to a stage of this rank, or holds it for the send to another rank."""
        if self._schedule.rank_of(stage) == self._pipeline._axis.rank:
            local[stage, micro_batch] = value
        else:
            to_send[key] = value
