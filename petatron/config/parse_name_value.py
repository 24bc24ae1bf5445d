"""Parses `NAME=VALUE` settings of user code into the fields of its dataclass."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from petatron.base.errors import Problem, raise_problems

NOT_A_SETTING = {"setting": False}
"""Metadata of a field that no setting fills."""


def parse_named_settings(kind: type, settings: Sequence[str], settings_flag: str, chosen_by: str) -> dict[str, Any]:
    """Returns the values of a dataclass's fields; raises `ConfigError` with every problem. `chosen_by` is the flag and name of its owner.

    >>> @dataclasses.dataclass
    ... class Rule:
    ...     momentum: float = 0.9
    >>> parse_named_settings(Rule, ["momentum=0.5"], "--optimizer-settings", "--optimizer mine")
    {'momentum': 0.5}
    """
    fields = {field.name: field for field in _settings_of(kind)}
    hints = typing.get_type_hints(kind) if fields else {}
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for word in settings:
        key, equals, text = word.partition("=")
        if not equals or key not in fields:
            rule = f"is no setting of {chosen_by}" if equals else "is not NAME=VALUE"
            close = difflib.get_close_matches(key, fields, n=1, cutoff=0.72)
            hint = f"Did you mean {close[0]}? " if close else ""
            problems.append(Problem(settings_flag, word, rule, f"{hint}It has: {', '.join(fields) or 'none'}."))
            continue
        try:
            values[key] = _parse_value(hints[key], text)
        except (KeyError, ValueError):
            choices = _choices(hints[key])
            rule, fix = f"is not a value of {key}, which is {getattr(hints[key], '__name__', hints[key])}", "Give one."
            if choices:
                rule, fix = "is no choice", f"Use one of {', '.join(choices)}."
            problems.append(Problem(settings_flag, word, rule, fix))
    given = {word.partition("=")[0] for word in settings}
    for key, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and key not in given:
            problems.append(Problem(settings_flag, "", f"lacks {key}, which {chosen_by} needs", f"Add {key}=VALUE."))
    raise_problems(problems)
    return values


def format_named_settings(plugin: object, *, changed_alone: bool = False) -> str:
    """Returns the settings of a plug-in in parentheses; nothing if it has none. changed_alone: those that are not the default.

    >>> @dataclasses.dataclass
    ... class Rule:
    ...     momentum: float = 0.9
    ...     steps: int = 2
    >>> format_named_settings(Rule(steps=3))
    ' (momentum 0.9, steps 3)'
    """
    settings = [(field, getattr(plugin, field.name)) for field in _settings_of(type(plugin))]
    texts = [f"{field.name} {value}" for field, value in settings if not changed_alone or value != field.default]
    return f" ({', '.join(texts)})" if texts else ""


def _settings_of(kind: type) -> Iterator[dataclasses.Field[Any]]:
    fields = dataclasses.fields(typing.cast(Any, kind)) if dataclasses.is_dataclass(kind) else ()
    return (field for field in fields if field.metadata != NOT_A_SETTING)


def _parse_value(hint: Any, text: str) -> Any:
    choices = _choices(hint)
    if choices:
        return choices[text]
    return hint(text) if hint in (int, float, str, Path) else text


def _choices(hint: Any) -> Mapping[str, Any]:
    """Returns the values of a type that has few, by their texts."""
    if hint is bool:
        return {"true": True, "false": False}
    return {str(value): value for value in typing.get_args(hint)} if typing.get_origin(hint) is Literal else {}
