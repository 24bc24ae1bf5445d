"""`DistantDrawing`: ranks that draw, as ranks that train see them.

At each step weights are handed over, and answers of a later step are asked for; what was asked for at former steps is there or is waited
for. So `--rollout-staleness` alone says which weights draw which answers, as where the same ranks draw and train, however long each takes:
losses are the same, and a run that is resumed has the answers that it would have had.

With `--rollout-in-flight` weights are handed over without that wait: the staleness is the most that a token may have, and answers of later
steps are drawn while earlier ones are trained on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from petatron.posttrain.drawing_ranks.messages import MessageAxis, Order
from petatron.posttrain.handover.weight_handover import WeightHandover
from petatron.posttrain.rollout import Rollout
from petatron.posttrain.rollout_loader import RolloutLoader
from petatron.posttrain.rollout_sampler import PromptGroup
from petatron.posttrain.rollout_state import RolloutState


class DistantDrawing:
    """Every rank that trains calls its methods. `iteration` returns that of the weights now."""

    def __init__(
        self,
        axis: MessageAxis,
        handover: WeightHandover,
        state: RolloutState,
        *,
        iteration: Callable[[], int],
        in_flight: bool = False,
    ) -> None:
        self._axis, self._handover, self._state = axis, handover, state
        self._iteration, self._in_flight = iteration, in_flight
        self._due, self._handed_over = 0, -1
        self._seconds: dict[str, float] = {"draw s": 0.0, "reward s": 0.0, "hand-over s": 0.0, "wait s": 0.0}
        state.before_save = self.receive_all

    def draw_ahead(self, steps_ahead: int, *, steps_per_round: int, answers_per_step: int) -> None:
        """Asks for answers, so that there are those of more than `steps_ahead` steps in all; waits until the next step's are there."""
        missing = steps_ahead + 1 - len(self._state.waiting) - self._due * steps_per_round
        if missing > 0 and not self._in_flight:
            self.receive_all()
        if missing > 0 or self._in_flight:
            self._hand_over()
        for _ in range(-(-missing // steps_per_round)):
            waiting = len(self._state.waiting) + self._due * steps_per_round
            self._order("draw", answers=answers_per_step, waiting=waiting)
            self._due += 1
        while not self._state.waiting:
            self._receive()

    def receive_all(self) -> None:
        """Waits for all that was asked for."""
        while self._due:
            self._receive()

    def evaluate(self) -> list[list[Rollout]]:
        """Returns answers to the held-out prompts by the weights of now."""
        self.receive_all()
        self._hand_over()
        self._order("evaluate")
        return self._axis.evaluated()

    def take_seconds(self) -> Mapping[str, float]:
        """Returns what the answers that were received since the last call took, and how long training waited for them."""
        seconds, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return seconds

    def close(self) -> None:
        """Ends the ranks that draw."""
        self.receive_all()
        self._order("end")

    def _receive(self) -> None:
        began = time.perf_counter()
        self._order("deliver")
        drawn = self._axis.drawn()
        self._due -= 1
        self._state.put(drawn.steps)
        self._state.groups = drawn.groups
        spent = {"draw s": drawn.draw_s, "reward s": drawn.reward_s, "wait s": time.perf_counter() - began}
        self._count(spent)

    def _hand_over(self) -> None:
        iteration = self._iteration()
        if self._handed_over == iteration:
            return
        began = time.perf_counter()
        self._order("receive")
        self._axis.meet()
        self._count({"wait s": time.perf_counter() - began})
        began = self._clock()
        self._handover.run()
        self._handed_over = iteration
        self._count({"hand-over s": self._clock() - began})

    def _order(self, kind: str, **content: int) -> None:
        order = Order(
            kind=kind,  # pyright: ignore[reportArgumentType]
            iteration=self._iteration(),
            groups=self._state.groups,
            **content,
        )
        self._axis.order(order)

    def _count(self, seconds: Mapping[str, float]) -> None:
        self._seconds = {name: total + seconds.get(name, 0.0) for name, total in self._seconds.items()}

    def _clock(self) -> float:
        device = self._axis.everyone.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()


class DistantSampler:
    """Answers held-out prompts on the ranks that draw, which have the same prompts."""

    def __init__(self, drawing: DistantDrawing) -> None:
        self._drawing = drawing

    def evaluate(self, groups: Sequence[PromptGroup]) -> list[list[Rollout]]:
        return self._drawing.evaluate()


class DistantLoader(RolloutLoader):
    """The loader of ranks that train, whose answers come from ranks that draw."""

    def __init__(self, *arguments: Any, drawing: DistantDrawing, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._drawing = drawing

    def draw_ahead(self, answers_per_step: int) -> Mapping[str, float]:
        settings = self._settings
        self._drawing.draw_ahead(
            settings.rollout_staleness,
            steps_per_round=settings.updates_per_rollout * settings.rollout_epochs,
            answers_per_step=answers_per_step,
        )
        return self._drawing.take_seconds()

    def close(self) -> None:
        self._rewards.close()
        if sys.exc_info()[0] is None:  # else the launcher ends them, and what failed may be what would be waited for
            self._drawing.close()
