"""`--rewards`: [WEIGHT*]NAME[:ARGUMENT]; [WEIGHT*]FILE.py:FUNCTION, a function of one's own; [WEIGHT*]http://HOST/PATH, a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from petatron.base.errors import Problem, raise_problems
from petatron.config.schema.fields import closest_matches
from petatron.posttrain.http_client import HTTP_SCHEMES
from petatron.posttrain.rewards.code_rewards import TESTS_KEY
from petatron.posttrain.rewards.text_rewards import TEXT_REWARDS, TextReward

_FLAG = "--rewards"
CODE, MODEL = "code", "model"
REWARD_NAMES = sorted((*TEXT_REWARDS, CODE))


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """A reward and its weight in the sum. Of a function: file and name; of a server: its address; of code: the key of
    its tests; of a model: its folder; else the rule about texts.
    """

    text: str
    weight: float
    rule: TextReward | None = None
    file: Path | None = None
    function: str = ""
    url: str = ""
    tests_key: str = ""
    folder: str = ""


def parse_rewards(texts: Sequence[str]) -> list[RewardSpec]:
    """Returns the rewards of a run; raises `ConfigError` with every problem.

    >>> [spec.weight for spec in parse_rewards(["exact", "0.1*regex:[0-9]+"])]
    [1.0, 0.1]
    >>> parse_rewards(["exakt"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    petatron.base.errors.ConfigError: 1 problem in this configuration:
      --rewards exakt is no reward. Did you mean exact? Known: code, contains, exact, json, math, regex; or give ...
    """
    specs: list[RewardSpec] = []
    problems: list[Problem] = []
    for text in texts:
        result = _parse(text)
        if isinstance(result, Problem):
            problems.append(result)
        else:
            specs.append(result)
    if not texts:
        problems.append(
            Problem(_FLAG, "", "is missing", f"Name what answers are rewarded for: {', '.join(REWARD_NAMES)}.")
        )
    raise_problems(problems)
    return specs


def _parse(text: str) -> RewardSpec | Problem:
    weight_text, star, rest = text.partition("*")
    weight = 1.0
    if star and _is_number(weight_text):
        weight = float(weight_text)
    else:
        rest = text
    if rest.startswith(HTTP_SCHEMES):
        return RewardSpec(text, weight, url=rest)
    name, colon, argument = rest.partition(":")
    if name.endswith(".py"):
        if not argument.isidentifier():
            return Problem(_FLAG, text, "names no function of the file", f"Write {name}:FUNCTION.")
        if not Path(name).is_file():
            return Problem(_FLAG, text, f"names the file {name}, which does not exist", "Correct the path.")
        return RewardSpec(text, weight, file=Path(name).resolve(), function=argument)
    if name == CODE:
        return RewardSpec(text, weight, tests_key=argument or TESTS_KEY)
    if name == MODEL and argument:
        return RewardSpec(text, weight, folder=argument)
    kind = TEXT_REWARDS.get(name)
    if kind is None:
        close = closest_matches(name, REWARD_NAMES, count=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        fix = f"{hint}Known: {', '.join(REWARD_NAMES)}; or give model:FOLDER, FILE.py:FUNCTION or http://HOST/PATH."
        return Problem(_FLAG, text, "is no reward", fix)
    try:
        return RewardSpec(text, weight, rule=kind(argument if colon else None))
    except ValueError as error:
        return Problem(_FLAG, text, str(error), "Correct it.")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
