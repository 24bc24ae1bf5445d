"""What runs environments for rank 0: a process for each episode, or a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from petatron.posttrain.environments.environment import EnvironmentProperties, Observation, TurnResult


class EpisodeSession(Protocol):
    """One episode. Its methods raise `RewardFailure` where the environment fails, or takes longer than a step may."""

    def reset(self, record: Mapping[str, Any], seed: int) -> Observation | None: ...

    def step(self, answer: str) -> TurnResult: ...

    def close(self) -> None: ...


class EnvironmentBackend(Protocol):
    """`open` is called by several threads."""

    @property
    def properties(self) -> EnvironmentProperties: ...

    def open(self) -> EpisodeSession: ...

    def close(self) -> None: ...
