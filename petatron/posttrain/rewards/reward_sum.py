"""`RewardSum`: the weighted sum of a run's rewards for an answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from petatron.posttrain.rewards.code_rewards import CodeRewards
from petatron.posttrain.rewards.code_sandbox import SandboxLimits
from petatron.posttrain.rewards.function_pool import FunctionPool, RewardFailure
from petatron.posttrain.rewards.http_rewards import HttpRewards
from petatron.posttrain.rewards.reward_spec import RewardSpec


class RewardedAnswer(NamedTuple):
    """The reward, NaN if one of its parts failed, for the reason `failure`; and the parts by the text of `--rewards`."""

    reward: float
    failure: str | None
    parts: Mapping[str, float]


class RewardPool(Protocol):
    """What computes the rewards of answers elsewhere: of jobs with an `answer` and a `record`, in their order."""

    def rewards(self, jobs: Sequence[Mapping[str, Any]]) -> list[float | RewardFailure]: ...

    def close(self) -> None: ...


class RewardSum:
    """Rewards answers. A failure of one part leaves an answer without a reward, and no other answer.

    >>> from petatron.posttrain.rewards.reward_spec import parse_rewards
    >>> rewards = RewardSum(parse_rewards(["exact", "0.5*regex:[0-9]+"]), workers=1, timeout_s=1.0)
    >>> [answer.reward for answer in rewards.of([("19", {"answer": "19"}), ("20", {"answer": "19"}), ("x", {})])]
    [1.5, 0.5, nan]
    """

    def __init__(
        self, specs: Sequence[RewardSpec], *, workers: int, timeout_s: float, sandbox: SandboxLimits | None = None
    ) -> None:
        self._specs = [spec for spec in specs if not spec.folder]  # models are in the layout of the run
        self._pools: dict[str, RewardPool] = {}
        for spec in specs:
            if spec.file is not None:
                self._pools[spec.text] = FunctionPool(spec.file, spec.function, workers=workers, timeout_s=timeout_s)
            elif spec.url:
                self._pools[spec.text] = HttpRewards(spec.url, workers=workers, timeout_s=timeout_s)
            elif spec.tests_key:
                limits = sandbox or SandboxLimits()
                self._pools[spec.text] = CodeRewards(spec.tests_key, limits, workers=workers, timeout_s=timeout_s)

    def of(self, answers: Sequence[tuple[str, Mapping[str, Any]]]) -> list[RewardedAnswer]:
        """Returns the reward of each answer to the prompt of a record."""
        totals, parts = [0.0] * len(answers), [dict[str, float]() for _ in answers]
        failures: list[str | None] = [None] * len(answers)
        for spec in self._specs:
            for place, value in enumerate(self._part(spec, answers)):
                if isinstance(value, RewardFailure):
                    failures[place] = failures[place] or f"{spec.text}: {value}"
                else:
                    totals[place] += spec.weight * value
                    parts[place][spec.text] = value
        return [
            RewardedAnswer(total if failure is None else math.nan, failure, part)
            for total, failure, part in zip(totals, failures, parts)
        ]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    def _part(self, spec: RewardSpec, answers: Sequence[tuple[str, Mapping[str, Any]]]) -> list[float | RewardFailure]:
        if spec.rule is None:
            return self._pools[spec.text].rewards([{"answer": text, "record": record} for text, record in answers])
        results: list[float | RewardFailure] = []
        for text, record in answers:
            try:
                results.append(spec.rule.reward(text, record))
            except ValueError as error:
                results.append(RewardFailure(str(error)))
        return results
