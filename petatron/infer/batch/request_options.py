"""The options of a request by the names that command lines and files of prompts use."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from petatron.base.errors import ConfigError, Problem, raise_problems
from petatron.infer.sampling_params import Constraint, SamplingParams

DEFAULT_MAX_TOKENS = 128
NUMBER_OPTIONS: Mapping[str, tuple[str, type]] = {
    "min_tokens": ("min_new_tokens", int),
    "temperature": ("temperature", float),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "repetition_penalty": ("repetition_penalty", float),
    "presence_penalty": ("presence_penalty", float),
    "frequency_penalty": ("frequency_penalty", float),
    "seed": ("seed", int),
    "logprobs": ("logprobs", int),
}
"""The field of `SamplingParams` and the type of each option that is a number."""
_OTHER_OPTIONS = ("max_tokens", "n", "stop", "json_schema", "regex")
OPTIONS = (*NUMBER_OPTIONS, *_OTHER_OPTIONS)


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """How prompts are continued. max_tokens: None takes `DEFAULT_MAX_TOKENS`, or what there is room for. n: answers to each prompt."""

    params: SamplingParams
    max_tokens: int | None = None
    n: int = 1

    def samples(self, prompt_ids: list[int], *, max_length: int) -> tuple[SamplingParams, ...]:
        """Returns the parameters of each answer to a prompt."""
        room = max(0, max_length - len(prompt_ids))
        count = min(DEFAULT_MAX_TOKENS, room) if self.max_tokens is None else self.max_tokens
        params = replace(self.params, max_new_tokens=count)
        return tuple(replace(params, sample=number) for number in range(self.n))

    def with_options(self, values: Mapping[str, Any]) -> RequestOptions:
        """Returns the options changed by some, by name; other names are ignored unless they look like one.

        Raises `ConfigError` with all problems, by the same names.
        """
        problems: list[Problem] = []
        for name in (name for name in values if name not in OPTIONS):
            if close := difflib.get_close_matches(name, OPTIONS, n=1, cutoff=0.8):
                problems.append(Problem(name, "", "is not an option", f"Did you mean {close[0]}?"))
        changes: dict[str, Any] = {}
        for name, value in values.items():
            if name in OPTIONS and value is not None:
                try:
                    changes |= _read_option(name, value)
                except ValueError as error:
                    text = json.dumps(value)
                    shown = text if len(text) <= 40 else f"{text[:37]}..."
                    problems.append(Problem(name, shown, str(error), "Change it."))
        if values.get("json_schema") is not None and values.get("regex") is not None:
            problems.append(Problem("json_schema", "", "and regex are two constraints", "Give one."))
        max_tokens, n = changes.pop("max_tokens", self.max_tokens), changes.pop("n", self.n)
        if n < 1:
            problems.append(Problem("n", str(n), "asks for no answer", "Use 1 or more."))
        bound = max_tokens if max_tokens is not None else max(DEFAULT_MAX_TOKENS, changes.get("min_new_tokens", 0))
        params = self.params
        try:
            params = replace(params, max_new_tokens=bound, **changes)
        except ConfigError as error:
            names = {field: name for name, (field, _) in NUMBER_OPTIONS.items()}
            names |= {"max_new_tokens": "max_tokens", "stop_strings": "stop"}
            problems += [replace(problem, where=names.get(problem.where, problem.where)) for problem in error.problems]
        raise_problems(problems)
        return replace(self, params=params, max_tokens=max_tokens, n=n)

    def as_json(self) -> dict[str, Any]:
        """Returns all that decides the answers, for a record of it."""
        return {**asdict(self.params), "max_new_tokens": self.max_tokens, "n": self.n}


def _read_option(name: str, value: Any) -> dict[str, Any]:
    """Returns the fields that an option sets; ValueError, with a predicate, if it is of another type."""
    if name in NUMBER_OPTIONS:
        field, kind = NUMBER_OPTIONS[name]
        return {field: _number(value, kind)}
    if name in ("max_tokens", "n"):
        return {name: _number(value, int)}
    if name == "stop":
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError("is neither a text nor a list of texts")
        return {"stop_strings": tuple(texts)}
    if name == "regex":
        if not isinstance(value, str):
            raise ValueError("is not a text")
        return {"constraint": Constraint(kind="regex", grammar=value)}
    grammar = value if isinstance(value, str) else json.dumps(value)
    return {"constraint": Constraint(kind="json_schema", grammar=grammar)}


def _number(value: Any, kind: type) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise ValueError(f"is not a {'whole ' if kind is int else ''}number")
    return kind(value)
