"""What a rank does that draws while others train: what they order, until they end it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from petatron.posttrain.drawing_ranks.messages import Drawn, MessageAxis
from petatron.posttrain.handover.drawing_model import ReceivedModel
from petatron.posttrain.rollout_loader import RolloutLoader
from petatron.posttrain.rollout_sampler import PromptGroup, RolloutSampler
from petatron.posttrain.rollout_state import RolloutState


def draw_for_others(
    axis: MessageAxis,
    model: ReceivedModel,
    loader: RolloutLoader,
    sampler: RolloutSampler,
    state: RolloutState,
    *,
    held_out: Sequence[PromptGroup] = (),
) -> None:
    """Every rank that draws calls it. `state` is that of the loader."""
    while (order := axis.order()).kind != "end":
        if order.kind == "receive":
            model.receive()
        elif order.kind == "evaluate":
            axis.evaluated(sampler.evaluate(held_out))
        else:
            state.groups = order.groups
            state.waiting = [[]] * order.waiting  # they count: files are named by iterations
            for _ in range(order.rounds):
                began, before = time.perf_counter(), sampler.seconds
                steps = loader.draw(order.answers, order.iteration)
                total_s, spent = time.perf_counter() - began, sampler.seconds.since(before)
                state.put(steps)
                axis.drawn(Drawn(steps, state.groups, spent.draw, total_s - spent.draw))
