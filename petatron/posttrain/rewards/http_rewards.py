"""Rewards of a server: it gets answers with their prompts' lines, and answers with as many numbers.

    POST [{"answer": "19", "record": {"prompt": "12 + 7 =", "answer": "19"}}, ...]        -> [1.0, ...]

null in the place of a number leaves that answer without a reward. Answers are sent in batches, several at a time; a batch without an
answer from the server costs its answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from petatron.posttrain.http_client import post_json
from petatron.posttrain.rewards.function_pool import RewardFailure

_BATCH_SIZE = 64


class HttpRewards:
    """workers: batches that are sent at a time."""

    def __init__(self, url: str, *, workers: int, timeout_s: float) -> None:
        self._url, self._timeout_s = url, timeout_s
        self._threads = ThreadPoolExecutor(workers, "petatron-rewards")

    def rewards(self, jobs: Sequence[Mapping[str, Any]]) -> list[float | RewardFailure]:
        """Returns the reward of each answer, or why it has none, in their order."""
        batches = [jobs[at : at + _BATCH_SIZE] for at in range(0, len(jobs), _BATCH_SIZE)]
        return [reward for rewards in self._threads.map(self._batch, batches) for reward in rewards]

    def close(self) -> None:
        self._threads.shutdown(wait=True)

    def _batch(self, jobs: Sequence[Mapping[str, Any]]) -> list[float | RewardFailure]:
        try:
            values = post_json(self._url, list(jobs), timeout_s=self._timeout_s)
            if not isinstance(values, list) or len(values) != len(jobs):
                raise RewardFailure(f"the server did not answer with a list of {len(jobs)} numbers")
        except RewardFailure as failure:
            return [failure] * len(jobs)
        return [_reward(value) for value in values]


def _reward(value: object) -> float | RewardFailure:
    if value is None:
        return RewardFailure("the server has no reward for it")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return RewardFailure(f"the reward is {str(value)[:40]!r}, which is no number")
    return float(value)
