"""`RolloutRewards`: the reward of rollouts, which rank 0 computes: a function of a user's may answer differently every time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from petatron.mesh.json_collectives import broadcast_json
from petatron.mesh.mesh import ParallelMesh
from petatron.posttrain.prompts import PromptSet
from petatron.posttrain.rewards.model_rewards import RewardModel
from petatron.posttrain.rewards.reward_sum import RewardSum
from petatron.posttrain.rollout import Rollout


class RolloutRewards:
    """Every rank calls `of`. The reward of a rollout is what its environment gave, what its last answer is rewarded for, and the scores
    of `models`, with their weights, for the whole of it.
    """

    def __init__(
        self, mesh: ParallelMesh, rewards: RewardSum, models: Sequence[tuple[float, RewardModel]] = ()
    ) -> None:
        self._mesh, self._rewards, self._models = mesh, rewards, models

    def of(self, groups: Sequence[Sequence[Rollout]], prompts: PromptSet) -> list[list[Rollout]]:
        """Returns rollouts with their rewards; those whose environment failed have none."""
        rollouts = [rollout for group in groups for rollout in group]
        scores = self._scores(rollouts)
        results: list[tuple[float | None, str | None]] = []
        if self._mesh.world.rank == 0:
            results = self._results(rollouts, scores, [prompts.prompts[rollout.prompt].record for rollout in rollouts])
        rewarded = iter(
            replace(rollout, reward=math.nan if reward is None else reward, failure=failure)
            for rollout, (reward, failure) in zip(rollouts, broadcast_json(results, self._mesh.control), strict=True)
        )
        return [[next(rewarded) for _ in group] for group in groups]

    def close(self) -> None:
        self._rewards.close()

    def _scores(self, rollouts: Sequence[Rollout]) -> list[float]:
        totals = [0.0] * len(rollouts)
        for weight, model in self._models:
            scores = model.scores([(*rollout.prompt_ids, *rollout.ids) for rollout in rollouts])
            totals = [total + weight * score for total, score in zip(totals, scores, strict=True)]
        return totals

    def _results(
        self, rollouts: Sequence[Rollout], scores: Sequence[float], records: Sequence[Mapping[str, Any]]
    ) -> list[tuple[float | None, str | None]]:
        valid = [place for place, rollout in enumerate(rollouts) if rollout.failure is None]
        answers = self._rewards.of([(rollouts[place].text, records[place]) for place in valid])
        results: list[tuple[float | None, str | None]] = [(None, rollout.failure) for rollout in rollouts]
        for place, answer in zip(valid, answers, strict=True):
            total = answer.reward + sum(rollouts[place].turn_rewards) + scores[place]
            results[place] = (None if math.isnan(total) else total, answer.failure)
        return results
