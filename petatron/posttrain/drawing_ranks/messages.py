"""What ranks that train and ranks that draw tell each other, as JSON over control axes of all ranks.

Orders come from the first rank, and all ranks receive them. Ranks that draw send answers only where an order asks for them, so nobody sends
what the other side does not wait for. A thread of theirs receives orders, and they look for them where they may follow one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any, Literal

import torch

from petatron.mesh import collectives
from petatron.mesh.json_collectives import broadcast_json
from petatron.mesh.mesh import ParallelMesh
from petatron.posttrain.rollout import Rollout
from petatron.posttrain.rollout_state import steps_from_json, steps_to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What ranks that draw are to do.

    receive: take weights over. draw: draw a round. deliver: send the answers of the next round, when it is drawn. evaluate: answer the
    held-out prompts. end: end.
    iteration: that of the weights. answers: of a step. groups: that were drawn before the run began. waiting: steps whose answers are drawn
    before, and are not trained on yet.
    """

    kind: Literal["receive", "draw", "deliver", "evaluate", "end"]
    iteration: int = 0
    answers: int = 0
    groups: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class Drawn:
    """The answers of a round of drawing, step by step; the groups that were drawn so far; and what drawing and rewarding took."""

    steps: list[list[Rollout]]
    groups: int
    draw_s: float
    reward_s: float


class MessageAxis:
    """All ranks, of which those from `first_drawing` on draw. Every rank calls its methods, at the same points.

    folder: that of the run, as the first rank names it.
    """

    def __init__(self, everyone: ParallelMesh, first_drawing: int, folder: str) -> None:
        self.everyone, self._first_drawing = everyone, first_drawing
        self.folder = broadcast_json(folder, everyone.control)
        self._orders = everyone.background_control_axis()

    def order(self, order: Order | None = None) -> Order:
        """Returns the order of the first rank, which alone gives one."""
        return Order(**broadcast_json(None if order is None else asdict(order), self._orders))

    def meet(self) -> None:
        """Returns when every rank is here: devices should not wait for ranks that still compute rewards."""
        collectives.barrier(self.everyone.control)

    def drawn(self, drawn: Drawn | None = None) -> Drawn:
        """Returns what the first rank that draws has drawn."""
        content = None
        if drawn is not None:
            content = [*steps_to_json(drawn.steps), drawn.groups, drawn.draw_s, drawn.reward_s]
        answers, places, *counts = self._from_drawing(content)
        return Drawn(steps_from_json(answers, places), *counts)

    def evaluated(self, groups: list[list[Rollout]] | None = None) -> list[list[Rollout]]:
        """Returns the answers to held-out prompts."""
        content = None if groups is None else [[rollout.to_json() for rollout in group] for group in groups]
        return [[Rollout.from_json(rollout) for rollout in group] for group in self._from_drawing(content)]

    def _from_drawing(self, content: Any) -> Any:
        return broadcast_json(content, self.everyone.control, source=self._first_drawing)


class OrderQueue:
    """The orders that arrive at a rank that draws. Every such rank calls its methods, and gets the same orders at the same points."""

    def __init__(self, axis: MessageAxis, mesh: ParallelMesh) -> None:
        """`mesh` is that of the ranks that draw."""
        self._axis, self._mesh = axis, mesh
        self._arrived: SimpleQueue[Order | BaseException] = SimpleQueue()
        Thread(target=self._listen, name="orders", daemon=True).start()

    def next(self) -> Order:
        """Returns the next order, and waits for it."""
        order = self._arrived.get()
        if isinstance(order, BaseException):
            raise order
        return order

    def arrived(self) -> list[Order]:
        """Returns the orders that have arrived at the first of these ranks; others may have to wait for theirs."""
        count = collectives.broadcast(torch.tensor([self._arrived.qsize()]), self._mesh.control)
        return [self.next() for _ in range(int(count))]

    def _listen(self) -> None:
        try:
            while True:
                order = self._axis.order()
                self._arrived.put(order)
                if order.kind == "end":
                    return
        except BaseException as error:  # whoever waits for an order raises it
            self._arrived.put(error)
