"""`Episode`: a rollout that grows, turn by turn: ids that the model drew, and ids of observations between them.

Ids that are there stay: nothing is decoded and encoded again, so training computes what was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from petatron.infer.engine_outputs import Completion
from petatron.posttrain.prompts import Prompt
from petatron.posttrain.rollout import Rollout


@dataclass(slots=True)
class Episode:
    """prompt_number, group, sample: as in `Rollout`. text: of the last answer. done: the environment said so, or its last answer ended
    where there is none. ended: nothing more is drawn.
    """

    prompt: Prompt
    prompt_number: int
    group: int
    sample: int
    prompt_ids: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    observed_spans: list[tuple[int, int]] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    text: str = ""
    done: bool = False
    ended: bool = False
    failure: str | None = None

    @property
    def context(self) -> list[int]:
        """What the next answer continues."""
        return [*self.prompt_ids, *self.ids]

    def add_answer(self, completion: Completion, text: str) -> None:
        self.ids += completion.ids
        self.log_probs += [logprob.logprob for logprob in completion.logprobs]
        self.text = text

    def apply(self, turn: Turn, *, max_ids: int) -> None:
        """Takes what an answer led to; an observation that leaves no room for another answer ends the episode."""
        if turn.failure is not None:
            self.failure, self.ended = turn.failure, True
            return
        self.turn_rewards.append(turn.reward)
        self.done = turn.done
        self.ended = turn.done or len(self.prompt_ids) + len(self.ids) + len(turn.ids) >= max_ids
        if not self.ended and turn.ids:
            self.observed_spans.append((len(self.ids), len(self.ids) + len(turn.ids)))
            self.ids += turn.ids

    def rollout(self, version: int, *, transcript: str) -> Rollout:
        return Rollout(
            prompt=self.prompt_number,
            group=self.group,
            sample=self.sample,
            version=version,
            prompt_ids=self.prompt_ids,
            ids=tuple(self.ids),
            log_probs=tuple(self.log_probs),
            observed_spans=tuple(self.observed_spans),
            turn_rewards=tuple(self.turn_rewards),
            text=self.text,
            transcript=transcript,
            finished=self.done,
            failure=self.failure,
        )


@dataclass(frozen=True, slots=True)
class Turn:
    """What an answer led to: the ids of the observation, the answer's reward, whether the episode is done; or why it failed."""

    ids: Sequence[int] = ()
    reward: float = 0.0
    done: bool = False
    failure: str | None = None

    def to_json(self) -> list[Any]:
        return [list(self.ids), self.reward, self.done, self.failure]
