"""`AnswerJudge`: gives answers their advantages, of their rewards and of what models of the run say of their tokens.

The models compute while the weights are those that drew: the reference and the critic, and the model itself where its own log-probabilities
are wanted beside those of the engine. What they say is kept with each answer, and so is in checkpoints while an answer waits.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from petatron.config.schema.rollout import RolloutConfig
from petatron.data.packed_segments import PackedSegment
from petatron.models.batch import Batch
from petatron.models.policy_gradient import (
    ADVANTAGES,
    DRAWN_LOG_PROBS,
    OLD_LOG_PROBS,
    REFERENCE,
    REFERENCE_LOG_PROBS,
    PolicyGradient,
)
from petatron.models.value_regression import OLD_VALUES, RETURNS
from petatron.parallel.model_beneath_adapters import RoleModel
from petatron.parallel.parallel_model import ParallelModel
from petatron.posttrain.advantages import advantages
from petatron.posttrain.critic import Critic
from petatron.posttrain.rollout import Rollout
from petatron.posttrain.rollout_batches import RolloutPacking
from petatron.posttrain.token_advantages import (
    divergences,
    explained_variance,
    generalized_advantages,
    token_rewards,
    whitened,
)
from petatron.posttrain.token_measurement import measure_tokens

Numbers = NDArray[np.float64]


class AnswerJudge:
    """Every rank calls its methods, and gets the same. `seconds` counts what models took, `uses_models` says whether there are any."""

    def __init__(
        self, settings: RolloutConfig, model: ParallelModel, critic: Critic | None, packing: RolloutPacking
    ) -> None:
        self._settings, self._model, self._critic, self._packing = settings, model, critic, packing
        objective = model.objective
        in_rewards = isinstance(objective, PolicyGradient) and objective.kl_in_reward > 0
        self.uses_models = critic is not None or in_rewards or settings.old_log_probs == "computed"
        self.seconds = 0.0

    def judge(self, groups: Sequence[Sequence[Rollout]]) -> list[Rollout]:
        """Returns the answers of all groups with their advantages, and with what models say of their tokens."""
        began = time.perf_counter()
        judged = self._judged(groups)
        self.seconds += time.perf_counter() - began
        return judged

    def _judged(self, groups: Sequence[Sequence[Rollout]]) -> list[Rollout]:
        rollouts = [rollout for group in groups for rollout in group]
        segments = [rollout.segment() for rollout in rollouts]
        of_ids = self._measured(segments)
        penalties = self._penalties(segments, of_ids)
        if self._critic is not None:
            values = self._critic.values(segments, self._packing)
            of_ids = [
                {**named, **numbers}
                for named, numbers in zip(of_ids, self._of_critic(rollouts, segments, values, penalties), strict=True)
            ]
            return [
                _with_numbers(rollout, segment, named)
                for rollout, segment, named in zip(rollouts, segments, of_ids, strict=True)
            ]
        rewards = np.array([rollout.reward for rollout in rollouts])
        rewards = rewards - np.array([float(penalty.sum()) for penalty in penalties])
        of_groups = rewards.reshape(len(groups), -1)
        kind = self._settings.advantage
        values_of_answers = advantages(of_groups, kind).reshape(-1)
        return [
            _with_numbers(replace(rollout, advantage=float(value)), segment, named)
            for rollout, value, segment, named in zip(rollouts, values_of_answers, segments, of_ids, strict=True)
        ]

    def learn(self, batches: Sequence[Batch], answers: Sequence[Rollout]) -> Mapping[str, float]:
        """Lets the critic learn from the answers of a step; returns what the log says of it."""
        if self._critic is None:
            return {}
        began = time.perf_counter()
        metrics = self._critic.learn(batches, num_answers=len(answers))
        self.seconds += time.perf_counter() - began
        segments = [rollout.segment() for rollout in answers]
        returns, values = (
            np.concatenate([_learned(segment, name) for segment in segments]) for name in (RETURNS, OLD_VALUES)
        )
        return {**metrics, "explained variance": explained_variance(returns, values)}

    def _measured(self, segments: Sequence[PackedSegment]) -> list[dict[str, Numbers]]:
        """Returns the log-probabilities that are wanted besides those of the draw, of all ids of each segment."""
        objective, model = self._model.objective, self._model
        of_ids: list[dict[str, Numbers]] = [{} for _ in segments]
        if not isinstance(objective, PolicyGradient):
            return of_ids
        models: dict[str, RoleModel] = {}
        if self._settings.old_log_probs == "computed":
            models[OLD_LOG_PROBS] = model
        if objective.kl_in_reward:
            models[REFERENCE_LOG_PROBS] = model.role_models[REFERENCE]
        for name, measured in models.items():
            log_probs = measure_tokens(
                measured,
                segments,
                self._packing,
                mesh=model.mesh,
                order=model.io.sequence_order,
                collect=objective.log_prob_outputs,
                read=objective.log_probs,
            )
            for named, numbers in zip(of_ids, log_probs, strict=True):
                named[name] = numbers
        return of_ids

    def _penalties(self, segments: Sequence[PackedSegment], of_ids: Sequence[Mapping[str, Numbers]]) -> list[Numbers]:
        """Returns what the reward of each learned token loses by its divergence from the reference."""
        objective = self._model.objective
        result = []
        for segment, named in zip(segments, of_ids, strict=True):
            learned = segment.learned > 0
            if not isinstance(objective, PolicyGradient) or not objective.kl_in_reward:
                result.append(np.zeros(int(learned.sum())))
                continue
            log_probs = named.get(OLD_LOG_PROBS, segment.of_ids[DRAWN_LOG_PROBS])[learned].astype(np.float64)
            gaps = divergences(log_probs, named[REFERENCE_LOG_PROBS][learned], objective.kl_estimator)
            result.append(objective.kl_in_reward * gaps)
        return result

    def _of_critic(
        self,
        rollouts: Sequence[Rollout],
        segments: Sequence[PackedSegment],
        values: Sequence[Numbers],
        penalties: Sequence[Numbers],
    ) -> list[dict[str, Numbers]]:
        """Returns advantages, returns and values of all ids of each segment."""
        settings, masks = self._settings, [segment.learned > 0 for segment in segments]
        rewards = [
            token_rewards(rollout.drawn_mask(), rollout.reward, rollout.turn_rewards) - penalty
            if len(penalty)
            else penalty
            for rollout, penalty in zip(rollouts, penalties, strict=True)
        ]
        of_states = [numbers[mask] for numbers, mask in zip(values, masks, strict=True)]
        result = generalized_advantages(rewards, of_states, discount=settings.discount, decay=settings.gae_lambda)
        returns = [x + value for x, value in zip(result, of_states, strict=True)]
        result = whitened(result) if settings.whiten_advantages else result
        named = []
        for mask, *numbers in zip(masks, result, returns, of_states, strict=True):
            arrays = {name: np.zeros(len(mask)) for name in (ADVANTAGES, RETURNS, OLD_VALUES)}
            for array, of_tokens in zip(arrays.values(), numbers, strict=True):
                array[mask] = of_tokens
            named.append(arrays)
        return named


def _with_numbers(rollout: Rollout, segment: PackedSegment, named: Mapping[str, Numbers]) -> Rollout:
    """Returns an answer with numbers of its ids, those of the prompt left out."""
    before = len(segment.ids) - len(rollout.ids)
    of_ids = {name: tuple(numbers[before:].tolist()) for name, numbers in named.items()}
    if ADVANTAGES in named and bool((segment.learned > 0).any()):
        mean = float(named[ADVANTAGES][segment.learned > 0].mean())
        return replace(rollout, of_ids=of_ids, advantage=mean)
    return replace(rollout, of_ids=of_ids)


def _learned(segment: PackedSegment, name: str) -> Numbers:
    return segment.of_ids[name][segment.learned > 0].astype(np.float64)
