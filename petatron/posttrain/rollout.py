"""`Rollout`: an answer that the model drew, with the log-probabilities at its drawing and its reward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from petatron.data.packed_segments import PackedSegment
from petatron.models.policy_gradient import ADVANTAGES, DRAWN_LOG_PROBS, REWARDS, TRUNCATED


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """prompt: its number in the order of files. group: its number in the order of drawing; sample: of the group's answers.

    ids: the answer's, with the id that ended it; of an episode of several turns, all that follows the prompt. observed_spans: those that
    the environment wrote. log_probs: of each of the others, by the model of iteration `version`. text: of the last answer; transcript: of
    an episode. turn_rewards: those that the environment gave. reward: NaN if it could not be computed, for the reason `failure`. of_ids:
    further numbers of each id by their names in the batch, which come before `advantage`.
    """

    prompt: int
    group: int
    sample: int
    version: int
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    text: str
    finished: bool
    observed_spans: tuple[tuple[int, int], ...] = ()
    turn_rewards: tuple[float, ...] = ()
    transcript: str = ""
    reward: float = math.nan
    failure: str | None = None
    advantage: float = 0.0
    of_ids: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def num_turns(self) -> int:
        return max(1, len(self.turn_rewards))

    def drawn_mask(self) -> NDArray[np.bool_]:
        """Returns which of `ids` the model drew.

        >>> values = dict(prompt=0, group=0, sample=0, version=0, prompt_ids=(5,), text="", finished=True)
        >>> Rollout(**values, ids=(8, 1, 2, 9), log_probs=(-0.5, -0.5), observed_spans=((1, 3),)).drawn_mask().tolist()
        [True, False, False, True]
        """
        drawn = np.ones(len(self.ids), np.bool_)
        for begin, end in self.observed_spans:
            drawn[begin:end] = False
        return drawn

    def to_json(self) -> dict[str, Any]:
        """Returns plain values: numbers that JSON does not have are None."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {**values, "reward": None if math.isnan(self.reward) else self.reward}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Rollout:
        """Returns what `to_json` made of a rollout.

        >>> drawn = Rollout(
        ...     prompt=3, group=7, sample=0, version=2, prompt_ids=(5,), ids=(8, 1), log_probs=(-0.5, -0.25), text="x", finished=True,
        ...     reward=1.0,
        ... )
        >>> Rollout.from_json(drawn.to_json()) == drawn
        True
        """
        lists: dict[str, Any] = {
            name: tuple(values[name]) for name in ("prompt_ids", "ids", "log_probs", "turn_rewards")
        }
        lists["observed_spans"] = tuple((begin, end) for begin, end in values["observed_spans"])
        reward = math.nan if values["reward"] is None else float(values["reward"])
        of_ids = {name: tuple(numbers) for name, numbers in values.get("of_ids", {}).items()}
        return cls(**{**values, **lists, "reward": reward, "of_ids": of_ids})

    def segment(self) -> PackedSegment:
        """Returns what is learned of it: the tokens that were drawn, with their advantage; nothing if it has no reward."""
        has_reward = not math.isnan(self.reward)
        before, mask = np.zeros(len(self.prompt_ids), np.float32), self.drawn_mask()
        learned = np.concatenate([before, mask.astype(np.float32) * np.float32(has_reward)])
        log_probs = np.zeros(len(self.ids), np.float32)
        log_probs[mask] = self.log_probs
        drawn = np.concatenate([before, log_probs])
        of_ids = {ADVANTAGES: np.float32(self.advantage) * learned, DRAWN_LOG_PROBS: drawn}
        of_ids |= {
            name: np.concatenate([before, np.array(numbers, np.float32)]) for name, numbers in self.of_ids.items()
        }
        ids = np.array([*self.prompt_ids, *self.ids], np.int64)
        of_answer = {REWARDS: self.reward if has_reward else 0.0, TRUNCATED: float(not self.finished)}
        return PackedSegment(ids, learned, of_ids, of_answer, has_reward)
