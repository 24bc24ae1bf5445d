"""Settings of what a user's code registers (objectives, kinds of datasets): the fields of a dataclass, given as NAME=VALUE."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from petatron.base.errors import ConfigError, Problem
from petatron.config.imports import IMPORT_FLAG, import_installed_plugins
from petatron.config.schema.fields import closest_matches

NOT_A_SETTING = {"setting": False}
"""Metadata of a field that no setting fills."""
_TRUE_AND_FALSE = {"true": True, "false": False}
Plugin = TypeVar("Plugin")


def find_plugin(name: str, registered: Mapping[str, type[Plugin]], *, flag: str, what: str) -> type[Plugin]:
    """Returns a registered class; imports installed packages with plug-ins if the name is not known; else raises `ConfigError`."""
    if name not in registered:
        import_installed_plugins()
    if name not in registered:
        close = closest_matches(name, registered, count=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        known = ", ".join(sorted(registered)) or "none"
        fix = f"{hint}Known: {known}; add {IMPORT_FLAG} MODULE, the file or package that registers it."
        raise ConfigError([Problem(flag, name, f"is not a registered {what}", fix)])
    return registered[name]


def build_plugin(kind: type[Plugin], settings: Sequence[str], *, flag: str, settings_flag: str, name: str) -> Plugin:
    """Builds a dataclass from its settings; raises `ConfigError` with every problem.

    >>> @dataclasses.dataclass
    ... class Smoothing:
    ...     width: float = 0.1
    >>> build_plugin(Smoothing, ["width=0.5"], flag="--objective", settings_flag="--objective-settings", name="smoothing")
    Smoothing(width=0.5)
    """
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in _settings_of(kind)}
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for word in settings:
        key, equals, text = word.partition("=")
        if not equals or key not in fields:
            rule = f"is no setting of {flag} {name}" if equals else "is not NAME=VALUE"
            problems.append(Problem(settings_flag, word, rule, f"It has: {', '.join(fields) or 'none'}."))
            continue
        try:
            values[key] = _parse_value(hints[key], text)
        except (KeyError, ValueError):
            rule = f"is not a value of {key}, which is {getattr(hints[key], '__name__', hints[key])}"
            problems.append(Problem(settings_flag, word, rule, "Give one."))
    given = {word.partition("=")[0] for word in settings}
    for key, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and key not in given:
            rule = f"lacks {key}, which {flag} {name} needs"
            problems.append(Problem(settings_flag, "", rule, f"Add {key}=VALUE."))
    if problems:
        raise ConfigError(problems)
    return kind(**values)


def _settings_of(kind: type) -> Iterator[dataclasses.Field[Any]]:
    fields = dataclasses.fields(typing.cast(Any, kind)) if dataclasses.is_dataclass(kind) else ()
    return (field for field in fields if field.metadata != NOT_A_SETTING)


def _parse_value(hint: Any, text: str) -> Any:
    if hint is bool:
        return _TRUE_AND_FALSE[text]
    return hint(text) if hint in (int, float, str, Path) else text
