"""Environments of a server, which keeps the state of each episode under a name of its choice.

    GET  URL           -> {"tools": [...], "stop": [...]}, either may be left out
    POST URL/reset     {"record": {...}, "seed": 7}                      -> {"episode": "a1", "observation": null}
    POST URL/step      {"episode": "a1", "turn": 1, "answer": "12"}      -> {"observation": " more", "reward": 0.0, "done": false}
    POST URL/close     {"episode": "a1"}                                 -> anything

A step that is asked for twice, because its first answer was lost, has the same turn.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from petatron.base.errors import TrainError
from petatron.posttrain.environments.environment import (
    EnvironmentProperties,
    Observation,
    TurnResult,
    read_observation,
    read_result,
)
from petatron.posttrain.http_client import post_json
from petatron.posttrain.rewards.function_pool import RewardFailure

_CLOSE_TIMEOUT_S = 5.0


class HttpEnvironments:
    """An `EnvironmentBackend`."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._url, self._timeout_s = url.rstrip("/"), timeout_s
        self._properties: EnvironmentProperties | None = None

    @property
    def properties(self) -> EnvironmentProperties:
        if self._properties is None:
            try:
                with urllib.request.urlopen(self._url, timeout=self._timeout_s) as response:
                    values = json.loads(response.read())
                self._properties = EnvironmentProperties.from_json(values)
            except (OSError, ValueError, AttributeError) as error:
                why = getattr(error, "reason", error)
                fix = "It answers GET with a JSON object, {} if there are neither tools nor stop texts."
                raise TrainError(f"--environment {self._url} cannot be used: {why}. {fix}") from error
        return self._properties

    def open(self) -> HttpEpisode:
        return HttpEpisode(self._url, self._timeout_s)

    def close(self) -> None:
        pass


class HttpEpisode:
    """An `EpisodeSession`."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url, self._timeout_s = url, timeout_s
        self._episode: Any = None
        self._turn = 0

    def reset(self, record: Mapping[str, Any], seed: int) -> Observation | None:
        values = self._post("reset", {"record": dict(record), "seed": seed})
        if values.get("episode") is None:
            raise RewardFailure("the server named no episode")
        self._episode = values["episode"]
        return _checked(lambda: read_observation(values.get("observation")))

    def step(self, answer: str) -> TurnResult:
        self._turn += 1
        values = self._post("step", {"episode": self._episode, "turn": self._turn, "answer": answer})
        result = (values.get("observation"), values.get("reward", 0.0), values.get("done", False))
        return _checked(lambda: read_result(result))

    def close(self) -> None:
        if self._episode is not None:
            with suppress(RewardFailure):
                post_json(f"{self._url}/close", {"episode": self._episode}, timeout_s=_CLOSE_TIMEOUT_S)

    def _post(self, action: str, value: Mapping[str, Any]) -> Mapping[str, Any]:
        answer = post_json(f"{self._url}/{action}", value, timeout_s=self._timeout_s)
        if not isinstance(answer, Mapping):
            raise RewardFailure("the server did not answer with a JSON object")
        if "error" in answer:
            raise RewardFailure(str(answer["error"]))
        return answer


def _checked(read: Any) -> Any:
    try:
        return read()
    except ValueError as error:
        raise RewardFailure(str(error)) from error
