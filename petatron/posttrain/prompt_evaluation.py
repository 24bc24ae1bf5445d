"""Evaluates held-out prompts during training: the mean reward, the share of right answers, and pass@k, with intervals."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Protocol

from petatron.config.schema.rollout import RolloutConfig
from petatron.evaluate.confidence_interval import Estimate, ratio_estimate
from petatron.evaluate.eval_task import TaskResult
from petatron.posttrain.prompts import PromptSet
from petatron.posttrain.rewards.rollout_rewards import RolloutRewards
from petatron.posttrain.rollout import Rollout
from petatron.posttrain.rollout_sampler import PromptGroup
from petatron.train.report.task_evaluation import TaskEvaluation
from petatron.train.stop_monitor import EvaluationStopCheck

LABEL = "held-out prompts"


class HeldOutSampler(Protocol):
    """What answers held-out prompts; every rank calls it."""

    def evaluate(self, groups: Sequence[PromptGroup]) -> list[list[Rollout]]: ...


class PromptEvaluator:
    """Answers and rewards the prompts of `--eval-prompts` with the model as it is now."""

    def __init__(
        self,
        settings: RolloutConfig,
        prompts: PromptSet,
        sampler: HeldOutSampler,
        rewards: RolloutRewards,
        *,
        interval: int | None,
    ) -> None:
        self._settings, self._prompts = settings, prompts
        self._sampler, self._rewards, self._interval = sampler, rewards, interval
        self._done: int | None = None

    def due(self, iteration: int, *, last: bool = False) -> list[str]:
        due = last or (self._interval is not None and iteration % self._interval == 0)
        return [LABEL] if due and self._done != iteration else []

    def evaluate(
        self, iteration: int, stop_check: EvaluationStopCheck | None = None, *, last: bool = False
    ) -> TaskEvaluation:
        reason = None if stop_check is None else stop_check.stop_reason(0)
        if reason is not None:
            return TaskEvaluation(interrupted=LABEL, stop_reason=reason)
        began = time.perf_counter()
        answers = self._rewards.of(self._sampler.evaluate(prompt_groups(self._prompts)), self._prompts)
        rewards = [
            [None if math.isnan(answer.reward) else answer.reward for answer in of_prompt] for of_prompt in answers
        ]
        self._done = iteration
        metrics, counts = summarize(rewards, correct_reward=self._settings.correct_reward)
        result = TaskResult(metrics=metrics, counts=counts, seconds=time.perf_counter() - began)
        return TaskEvaluation({LABEL: result})


def prompt_groups(prompts: PromptSet) -> list[PromptGroup]:
    """Returns all prompts in their order, each as a group of its number."""
    return [PromptGroup(prompt, number, number) for number, prompt in enumerate(prompts.prompts)]


def summarize(
    rewards: Sequence[Sequence[float | None]], *, correct_reward: float
) -> tuple[dict[str, Estimate], dict[str, int]]:
    """Returns metrics and counts of the rewards of each prompt's answers. Without a reward an answer is wrong, and in no mean.

    >>> metrics, counts = summarize([[1.0, 0.0], [0.0, 0.0]], correct_reward=1.0)
    >>> {name: estimate.value for name, estimate in metrics.items()}, counts
    ({'reward': 0.25, 'correct': 0.25, 'pass@2': 0.5}, {'prompts': 2, 'answers': 4})
    """
    valid = [[reward for reward in answers if reward is not None] for answers in rewards]
    right = [sum(reward >= correct_reward for reward in answers) for answers in valid]
    sizes = [float(len(answers)) for answers in rewards]
    metrics: dict[str, Estimate] = {}
    if any(valid):
        metrics["reward"] = ratio_estimate([sum(answers) for answers in valid], [float(len(x)) for x in valid])
    metrics["correct"] = ratio_estimate(right, sizes)
    count, k = int(min(sizes)), 2
    while k <= count:
        passed = [_pass_at(k, int(size), number) for size, number in zip(sizes, right)]
        metrics[f"pass@{k}"] = ratio_estimate(passed, [1.0] * len(passed))
        k *= 2
    counts = {"prompts": len(rewards), "answers": int(sum(sizes))}
    missing = counts["answers"] - sum(map(len, valid))
    return metrics, {**counts, **({"without reward": missing} if missing else {})}


def _pass_at(k: int, drawn: int, right: int) -> float:
    """Returns the probability that one of k answers, taken from those drawn, is right (Chen et al., 2021).

    >>> _pass_at(2, 4, 1)
    0.5
    """
    return 1.0 - math.comb(drawn - right, k) / math.comb(drawn, k)
