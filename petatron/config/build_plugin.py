"""Builds plugins that user code registers (objectives, kinds of datasets): found by name, and built with their settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from petatron.base.errors import ConfigError, Problem
from petatron.config.import_user_modules import IMPORT_FLAG, import_installed_plugins
from petatron.config.parse_name_value import parse_named_settings
from petatron.config.schema.fields import closest_matches

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

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Smoothing:
    ...     width: float = 0.1
    >>> build_plugin(Smoothing, ["width=0.5"], flag="--objective", settings_flag="--objective-settings", name="smoothing")
    Smoothing(width=0.5)
    """
    return kind(**parse_named_settings(kind, settings, settings_flag, f"{flag} {name}"))
