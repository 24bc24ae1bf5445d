"""`EnvironmentPool`: the environments of the episodes of a round, several at a time. A failure is that of its episode alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from petatron.posttrain.environments.environment import Observation, TurnResult
from petatron.posttrain.environments.environment_backend import EnvironmentBackend, EpisodeSession
from petatron.posttrain.rewards.function_pool import RewardFailure

ResultT = TypeVar("ResultT")


class EnvironmentPool:
    """Used by rank 0 alone. Episodes have numbers, in the order of `start`."""

    def __init__(self, backend: EnvironmentBackend, *, workers: int) -> None:
        self._backend = backend
        self._threads = ThreadPoolExecutor(workers, "petatron-environments")
        self._sessions: dict[int, EpisodeSession] = {}

    def start(self, episodes: Sequence[tuple[Mapping[str, Any], int]]) -> list[Observation | RewardFailure | None]:
        """Begins an episode for each record and seed; returns what follows their prompts."""
        self.end_all()
        self._sessions = {number: self._backend.open() for number in range(len(episodes))}

        def reset(number: int) -> Observation | None:
            return self._sessions[number].reset(*episodes[number])

        return list(self._threads.map(lambda number: _attempt(lambda: reset(number)), range(len(episodes))))

    def step(self, answers: Sequence[tuple[int, str]]) -> list[TurnResult | RewardFailure]:
        """Gives answers to their episodes, in any order; returns what they lead to."""
        return list(self._threads.map(lambda pair: _attempt(lambda: self._sessions[pair[0]].step(pair[1])), answers))

    def end(self, numbers: Sequence[int]) -> None:
        """Ends episodes: their environments are closed."""
        sessions = [self._sessions.pop(number) for number in numbers if number in self._sessions]
        list(self._threads.map(lambda session: session.close(), sessions))

    def end_all(self) -> None:
        self.end(list(self._sessions))

    def close(self) -> None:
        self.end_all()
        self._threads.shutdown(wait=True)
        self._backend.close()


def _attempt(action: Callable[[], ResultT]) -> ResultT | RewardFailure:
    try:
        return action()
    except RewardFailure as failure:
        return failure
