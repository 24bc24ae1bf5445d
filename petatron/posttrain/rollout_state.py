"""`RolloutState`: what a checkpoint has of rollouts, so that a run resumes with the answers it would have trained on.

That is how many prompts were used, and the answers that were drawn and not trained on yet, once each, also where several steps learn from
them. With --updates-per-rollout 1 and without staleness there are none: the next ones are drawn by the weights that are saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from petatron.checkpoint.stateful_components import SavedState, Stateful
from petatron.posttrain.rollout import Rollout


class RolloutState(Stateful):
    """groups: how many groups of answers were drawn, also those that were left out. waiting: those of later steps, in their order."""

    name, title = "rollouts", "answers that were drawn"

    def __init__(self) -> None:
        self.groups = 0
        self.waiting: list[list[Rollout]] = []
        self.before_save: Callable[[], None] | None = None
        """Called by every rank before a checkpoint: what other ranks are drawing is waited for."""

    def values(self) -> dict[str, object]:
        if self.before_save is not None:
            self.before_save()
        answers, places = steps_to_json(self.waiting)
        return {"groups": self.groups, "answers": answers, "waiting": places}

    def restore(self, saved: SavedState) -> None:
        values = saved.values
        if not isinstance(values, dict) or not isinstance(values.get("groups"), int):
            raise ValueError("the state of its rollouts is damaged")
        self.groups = values["groups"]
        self.waiting = steps_from_json(values["answers"], values["waiting"])

    def take(self) -> list[Rollout]:
        """Returns the answers of the next step, which wait no longer."""
        return self.waiting.pop(0)

    def put(self, steps: Sequence[list[Rollout]]) -> None:
        self.waiting += steps


def steps_to_json(steps: Sequence[Sequence[Rollout]]) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Returns the answers of steps, once each, and the places among them of those of each step."""
    answers = {id(rollout): rollout for of_step in steps for rollout in of_step}
    places = {key: place for place, key in enumerate(answers)}
    values = [rollout.to_json() for rollout in answers.values()]
    return values, [[places[id(rollout)] for rollout in of_step] for of_step in steps]


def steps_from_json(answers: Sequence[Mapping[str, Any]], steps: Sequence[Sequence[int]]) -> list[list[Rollout]]:
    """Returns the answers of each step."""
    rollouts = [Rollout.from_json(answer) for answer in answers]
    return [[rollouts[place] for place in of_step] for of_step in steps]
