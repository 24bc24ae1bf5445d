"""`Rollout`: an answer that the model drew, with the log-probabilities at its drawing and its reward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from petatron.data.packed_segments import PackedSegment
from petatron.models.policy_gradient import ADVANTAGES, DRAWN_LOG_PROBS, REWARDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """prompt: its number in the order of files. group: its number in the order of drawing; sample: of the group's answers.

    ids: the answer's, with the id that ended it. log_probs: of each, by the model of iteration `version`. reward: NaN if it could not be
    computed, for the reason `failure`.
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
    reward: float = math.nan
    failure: str | None = None
    advantage: float = 0.0

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
        lists = {name: tuple(values[name]) for name in ("prompt_ids", "ids", "log_probs")}
        reward = math.nan if values["reward"] is None else float(values["reward"])
        return cls(**{**values, **lists, "reward": reward})

    def with_reward(self, reward: float, failure: str | None = None) -> Rollout:
        return replace(self, reward=reward, failure=failure)

    def segment(self) -> PackedSegment:
        """Returns what is learned of it: the answer's tokens, with their advantage; nothing if it has no reward."""
        has_reward = not math.isnan(self.reward)
        before = np.zeros(len(self.prompt_ids), np.float32)
        learned = np.concatenate([before, np.full(len(self.ids), np.float32(has_reward))])
        drawn = np.concatenate([before, np.array(self.log_probs, np.float32)])
        of_ids = {ADVANTAGES: np.float32(self.advantage) * learned, DRAWN_LOG_PROBS: drawn}
        ids = np.array([*self.prompt_ids, *self.ids], np.int64)
        return PackedSegment(ids, learned, of_ids, {REWARDS: self.reward if has_reward else 0.0}, has_reward)
