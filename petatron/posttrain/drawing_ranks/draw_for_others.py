"""`DrawingForOthers`: what a rank does that draws while others train, which is what they order.

Rounds of drawing are done one after another, and orders are followed between them. With `--rollout-in-flight` they are followed between two
tokens, too: the next tokens of answers that have begun are drawn by the new weights, with keys and values of the former ones. In any case
the log-probability of a token is that of its draw, so importance weights are right for each token.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from petatron.posttrain.drawing_ranks.messages import Drawn, MessageAxis, Order, OrderQueue
from petatron.posttrain.handover.drawing_model import ReceivedModel
from petatron.posttrain.rollout_engine import RolloutEngine
from petatron.posttrain.rollout_loader import RolloutLoader
from petatron.posttrain.rollout_sampler import PromptGroup, RolloutSampler
from petatron.posttrain.rollout_state import RolloutState


class DrawingForOthers:
    """Every rank that draws calls `serve`. `state` is that of the loader."""

    def __init__(
        self,
        axis: MessageAxis,
        orders: OrderQueue,
        model: ReceivedModel,
        engine: RolloutEngine,
        loader: RolloutLoader,
        sampler: RolloutSampler,
        state: RolloutState,
        *,
        held_out: Sequence[PromptGroup] = (),
        in_flight: bool = False,
    ) -> None:
        self._axis, self._orders, self._model, self._engine = axis, orders, model, engine
        self._loader, self._sampler, self._state, self._held_out = loader, sampler, state, held_out
        self._rounds: deque[Order] = deque()
        self._drawn: deque[Drawn] = deque()
        self._promised, self._has_groups, self._ended = 0, False, False
        if in_flight:
            engine.between_steps = self._follow_arrived

    def serve(self) -> None:
        """Follows orders until they say that it is the end."""
        while not self._ended:
            if not self._rounds:
                self._follow(self._orders.next())
            else:
                self._follow_arrived()
                self._draw(self._rounds.popleft())

    def _follow_arrived(self) -> None:
        for order in self._orders.arrived():
            self._follow(order)

    def _follow(self, order: Order) -> None:
        if order.kind == "receive":
            self._axis.meet()
            self._model.receive()
            self._engine.weights_changed()
        elif order.kind == "draw":
            if not self._has_groups:
                self._state.groups, self._has_groups = order.groups, True
            self._rounds.append(order)
        elif order.kind == "deliver":
            self._promised += 1
            self._deliver()
        elif order.kind == "evaluate":
            self._axis.evaluated(self._sampler.evaluate(self._held_out))
        else:
            self._ended = True

    def _draw(self, order: Order) -> None:
        began, before = time.perf_counter(), self._sampler.seconds
        self._state.waiting = [[]] * order.waiting  # they count: files are named by iterations
        steps = self._loader.draw(order.answers, order.iteration)
        total_s, spent = time.perf_counter() - began, self._sampler.seconds.since(before)
        self._drawn.append(Drawn(steps, self._state.groups, spent.draw, total_s - spent.draw))
        self._deliver()

    def _deliver(self) -> None:
        while self._promised and self._drawn:
            self._promised -= 1
            self._axis.drawn(self._drawn.popleft())
