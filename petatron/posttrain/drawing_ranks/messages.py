"""What ranks that train and ranks that draw tell each other, as JSON over a control axis of all ranks.

Orders come from the first rank, and all ranks receive them. Answers come from the first rank that draws, once for each round of drawing, in
the order in which they were asked for; ranks that train give no further order before they have received them all. So both sides always know
which message is next, and neither polls.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from petatron.mesh.json_collectives import broadcast_json
from petatron.mesh.mesh import ParallelMesh
from petatron.posttrain.rollout import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What ranks that draw are to do.

    receive: take weights over. draw: draw so many rounds with them. evaluate: answer the held-out prompts. end: end.
    iteration: that of the weights. answers: of a step. groups: that were drawn before. waiting: steps whose answers are not trained on yet.
    """

    kind: Literal["receive", "draw", "evaluate", "end"]
    iteration: int = 0
    rounds: int = 0
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

    def order(self, order: Order | None = None) -> Order:
        """Returns the order of the first rank, which alone gives one."""
        return Order(**broadcast_json(None if order is None else asdict(order), self.everyone.control))

    def drawn(self, drawn: Drawn | None = None) -> Drawn:
        """Returns what the first rank that draws has drawn."""
        content = None
        if drawn is not None:
            steps = [[rollout.to_json() for rollout in step] for step in drawn.steps]
            content = [steps, drawn.groups, drawn.draw_s, drawn.reward_s]
        steps, *counts = self._from_drawing(content)
        return Drawn([[Rollout.from_json(rollout) for rollout in step] for step in steps], *counts)

    def evaluated(self, groups: list[list[Rollout]] | None = None) -> list[list[Rollout]]:
        """Returns the answers to held-out prompts."""
        content = None if groups is None else [[rollout.to_json() for rollout in group] for group in groups]
        return [[Rollout.from_json(rollout) for rollout in group] for group in self._from_drawing(content)]

    def _from_drawing(self, content: Any) -> Any:
        return broadcast_json(content, self.everyone.control, source=self._first_drawing)
