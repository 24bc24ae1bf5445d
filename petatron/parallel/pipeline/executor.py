"""Executes a schedule: the only code that calls forward and backward of a model in training.

A rank walks through its list of actions. Transfers are started where they stand in the list, those of one moment in one
batch, and waited for where their result is used, so they overlap with the computations between. An activation that has been
sent is not kept: the backward pass needs the graph behind it, not its values. A forward and a backward that stand together
in the list run combined (`combined_forward_backward.py`).
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
from petatron.parallel.pipeline.combined_forward_backward import CombinedPasses
from petatron.parallel.pipeline.weight_grad_queue import WeightGradQueue
from petatron.schedule import RankSchedule
from petatron.schedule.actions import COMPUTE, SENDS, Action, Kind, TimedAction

FORWARD_TRANSFERS = (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)
Key = tuple[int, int]
"""stage, micro-batch"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """What losses are multiplied by before the backward pass: the sum of token losses, and what layers add of their own."""

    loss: Tensor
    extra: Tensor


@dataclass(slots=True)
class Outcome:
    """Of one walk: the sum of the token losses seen here, what layers reported, and when actions ran if that was asked."""

    total: Tensor
    reports: dict[int, Tensor] = field(default_factory=dict)
    timed: list[TimedAction] = field(default_factory=list)


class Pipeline:
    """A rank's stages of the model, and the axis to the ranks that hold the others."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        axis: Axis,
        *,
        activation: Callable[[Batch], Tensor],
        weight_grads: WeightGradQueue,
        combined: CombinedPasses | None = None,
    ) -> None:
        """`activation` makes an empty tensor like those that pass between stages."""
        self._stages = stages
        self._axis = axis
        self._activation = activation
        self._weight_grads = weight_grads
        self._combined = combined

    def run(
        self,
        schedule: RankSchedule,
        batches: Sequence[Batch],
        scales: Scales | None = None,
        *,
        clock: Callable[[], float] | None = None,
    ) -> Outcome:
        """Perform this rank's actions; without scales there is no backward pass."""
        walk = _Walk(self, schedule, batches, scales)
        for together in schedule.batches():
            for action in together:
                walk.wait_for(action)
            start = clock() if clock else 0.0
            if together[0].kind in COMPUTE:
                walk.compute(together)
            else:
                walk.transfer(together)
            if clock:
                end = clock()
                walk.outcome.timed += [TimedAction(action, start, end) for action in together]
        walk.finish()
        return walk.outcome


class _Walk:
    """One step's activations and gradients on their way."""

    def __init__(
        self, pipeline: Pipeline, schedule: RankSchedule, batches: Sequence[Batch], scales: Scales | None
    ) -> None:
        self._pipeline, self._schedule, self._batches, self._scales = pipeline, schedule, batches, scales
        self._inputs: dict[Key, Tensor] = {}  # activations that a stage takes or has taken
        self._roots: dict[Key, Tensor | GradientEdge] = {}  # where a stage's backward pass begins
        self._outputs: dict[Key, Tensor] = {}  # to be sent
        self._output_grads: dict[Key, Tensor] = {}  # what a backward pass begins with
        self._input_grads: dict[Key, Tensor] = {}  # to be sent
        self._receiving: dict[tuple[Kind, Key], Handle] = {}
        self._sending: deque[Handle] = deque()
        self.outcome = Outcome(torch.zeros((), dtype=torch.float64, device=batches[0].tokens.device))

    def wait_for(self, action: Action) -> None:
        """Until what an action takes from another rank is here."""
        key = (action.stage, action.micro_batch)
        kind = Kind.RECEIVE_FORWARD if action.kind is Kind.FORWARD else Kind.RECEIVE_BACKWARD
        if action.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD):
            handle = self._receiving.pop((kind, key), None)
            if handle is not None:
                handle.wait()

    def compute(self, actions: Sequence[Action]) -> None:
        """One computation, or a forward and a backward combined."""
        if len(actions) == 1:
            self._compute(actions[0])
            return
        assert self._pipeline._combined is not None, "the model was not built to run two passes combined"
        self._pipeline._combined.run(*(partial(self._compute, action) for action in actions))

    def _compute(self, action: Action) -> None:
        key = (action.stage, action.micro_batch)
        match action.kind:
            case Kind.FORWARD:
                self._forward(key)
            case Kind.BACKWARD:
                self._backward(key)
            case Kind.INPUT_GRAD:
                with self._pipeline._weight_grads.collecting(key):
                    self._backward(key)
            case Kind.WEIGHT_GRAD:
                self._pipeline._weight_grads.compute(key)

    def transfer(self, actions: Sequence[Action]) -> None:
        """Start transfers as one batch."""
        sends, receives, awaited = [], [], []
        for action in actions:
            key, forward = (action.stage, action.micro_batch), action.kind in FORWARD_TRANSFERS
            if action.kind in SENDS:
                x = (self._outputs if forward else self._input_grads).pop(key)
                sends.append((x, self._schedule.rank_of(action.stage + (1 if forward else -1))))
            else:
                out = self._pipeline._activation(self._batches[action.micro_batch])
                (self._inputs if forward else self._output_grads)[key] = out
                receives.append((out, self._schedule.rank_of(action.stage + (-1 if forward else 1))))
                awaited.append((action.kind, key))
        while self._sending and self._sending[0].done():
            self._sending.popleft()
        sent, received = collectives.start_transfers(self._pipeline._axis, sends=sends, receives=receives)
        self._sending += sent
        self._receiving |= zip(awaited, received, strict=True)

    def finish(self) -> None:
        for handle in self._sending:
            handle.wait()
        left = (self._roots, self._outputs, self._output_grads, self._input_grads, self._receiving)
        assert not any(left), f"the schedule {self._schedule.name} left work undone"

    def _forward(self, key: Key) -> None:
        stage, number = key
        batch, scales = self._batches[number], self._scales
        x = self._inputs.get(key)
        if x is not None and scales is not None:
            x.requires_grad_()
        reports: dict[int, Tensor] = {}
        with torch.set_grad_enabled(scales is not None):
            extra = None if scales is None else scales.extra
            weights = None if scales is None else batch.loss_mask.t().double() * scales.loss
            run = self._pipeline._stages[stage]
            y = run(batch, x, extra_loss_scale=extra, reports=reports, loss_weights_SB=weights)
            if stage == self._schedule.stages - 1:
                self.outcome.total += (y.detach() * batch.loss_mask.t()).sum()
                y = y if weights is None else (y * weights).sum()
        if stage < self._schedule.stages - 1:
            self._hand_on(stage + 1, number, y.detach(), self._inputs, self._outputs, key)
        if scales is not None:
            self._roots[key] = get_gradient_edge(y)
        else:
            self._inputs.pop(key, None)
        for layer, report in reports.items():
            total = self.outcome.reports.get(layer)
            self.outcome.reports[layer] = report if total is None else total + report

    def _backward(self, key: Key) -> None:
        stage, number = key
        root, grad = self._roots.pop(key), self._output_grads.pop(key, None)
        torch.autograd.backward(root, grad)
        x = self._inputs.pop(key, None)
        if x is not None:
            assert x.grad is not None
            self._hand_on(stage - 1, number, x.grad, self._output_grads, self._input_grads, key)

    def _hand_on(
        self, stage: int, number: int, value: Tensor, here: dict[Key, Tensor], away: dict[Key, Tensor], key: Key
    ) -> None:
        """To a stage of this rank at once; for another rank it lies ready to be sent."""
        if self._schedule.rank_of(stage) == self._pipeline._axis.rank:
            here[stage, number] = value
        else:
            away[key] = value
