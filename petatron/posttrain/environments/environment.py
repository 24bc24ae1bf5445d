"""`Environment`: what a file of a user's has, whose answers a model gets to its answers. Nothing of it has to be imported.

    class Guess:
        def reset(self, record):                      # the line of the prompt
            self.number = int(record["number"])
            return None                               # or what follows the prompt

        def step(self, answer):                       # the text of an answer
            guess = int(answer)                       # an exception costs this episode alone
            if guess == self.number:
                return None, 1.0, True                # observation, reward, done
            return " more\\n" if guess < self.number else " less\\n", 0.0, False

An observation is a text, which is appended as it is, or a list of messages, which the chat template writes; None is nothing. An object is
one episode. It has a process to itself, in which `random` was seeded with a function of the run's seed and the episode, so that a
run that resumes meets the same environment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Message = Mapping[str, Any]
Observation = str | Sequence[Message]


@dataclass(frozen=True, slots=True)
class TurnResult:
    """What an answer leads to; `step` may return it as a tuple. reward: of this answer; those of an episode are added up."""

    observation: Observation | None
    reward: float = 0.0
    done: bool = False


class Environment(Protocol):
    """Of one episode. A class may also have `tools`, JSON schemas of functions for the chat template, `stop`, texts that end an answer
    besides the end of a turn, and `close()`, called at the end.
    """

    def reset(self, record: Mapping[str, Any]) -> Observation | None: ...

    def step(self, answer: str) -> TurnResult | tuple[Observation | None, float, bool]: ...


@dataclass(frozen=True, slots=True)
class EnvironmentProperties:
    """What prompts and draws need to know of an environment beforehand."""

    tools: tuple[Mapping[str, Any], ...] = ()
    stop: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"tools": list(self.tools), "stop": list(self.stop)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> EnvironmentProperties:
        """
        >>> EnvironmentProperties.from_json({"stop": ["x"]})
        EnvironmentProperties(tools=(), stop=('x',))
        >>> EnvironmentProperties.from_json({"stop": "x"})
        Traceback (most recent call last):
        ValueError: its stop is no list of texts
        """
        tools, stop = values.get("tools") or (), values.get("stop") or ()
        if isinstance(tools, str) or not all(isinstance(tool, Mapping) for tool in tools):
            raise ValueError("its tools are no list of JSON schemas")
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise ValueError("its stop is no list of texts")
        return cls(tuple(tools), tuple(stop))


def read_observation(value: object) -> Observation | None:
    """Returns an observation that user code or a server gave; raises `ValueError` if it is none.

    >>> read_observation([{"role": "user"}])
    Traceback (most recent call last):
    ValueError: the observation is neither a text nor a list of messages with "role" and "content"
    """
    if value is None or isinstance(value, str):
        return value or None
    if isinstance(value, list | tuple) and all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message
        for message in value
    ):
        return [dict(message) for message in value] or None
    raise ValueError('the observation is neither a text nor a list of messages with "role" and "content"')


def read_result(value: object) -> TurnResult:
    """Returns the result of a step that user code gave; raises `ValueError` if it is none.

    >>> read_result((None, 1, True))
    TurnResult(observation=None, reward=1.0, done=True)
    >>> read_result(1.0)
    Traceback (most recent call last):
    ValueError: a step returned a float, not (observation, reward, done)
    """
    if isinstance(value, TurnResult):
        value = (value.observation, value.reward, value.done)
    if not isinstance(value, tuple | list) or len(value) != 3:
        raise ValueError(f"a step returned a {type(value).__name__}, not (observation, reward, done)")
    observation, reward, done = value
    try:
        number = float(reward)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the reward of a step is a {type(reward).__name__}, not a number") from error
    if not math.isfinite(number):
        raise ValueError(f"the reward of a step is {number}")
    return TurnResult(read_observation(observation), number, bool(done))
