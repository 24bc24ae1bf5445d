"""Reads the settings of a run with the origin of each value, from its `config.yaml` and from what its last start has recorded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from petatron.base.untrusted_files import read_limited_bytes
from petatron.config.format_config import format_value
from petatron.config.schema.fields import FieldInfo, FieldValue, fields_by_name, fields_by_path
from petatron.config.yaml_file import MAX_YAML_BYTES, read_yaml_text

CONFIG_FILE = "config.yaml"
# A derived value is a comment with its reason, as `config.yaml_file.dump_yaml` writes it.
_DERIVED = re.compile(r"  # ([a-z0-9_]{1,80}): (.{0,4000}?)  \((.{1,4000})\)")


@dataclass(frozen=True, slots=True)
class SettingWithOrigin:
    """One setting as text; `is_default` where nobody chose or derived another value."""

    path: str
    value: FieldValue
    origin: str
    is_default: bool

    @property
    def text(self) -> str:
        return format_value(self.value)


@dataclass(frozen=True, slots=True)
class RunSettings:
    """All settings by path; `problems` are lines of the file that this version does not understand."""

    values: Mapping[str, SettingWithOrigin] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def get(self, path: str) -> FieldValue:
        setting = self.values.get(path)
        return None if setting is None else setting.value

    def section(self, name: str) -> dict[str, FieldValue]:
        return {path.partition(".")[2]: s.value for path, s in self.values.items() if path.startswith(f"{name}.")}


def read_settings(path: Path, recorded_origins: Mapping[str, Any]) -> RunSettings:
    """Reads `config.yaml`; OSError or ValueError if it is no text file.

    recorded_origins: what the start of the run has recorded, by path.
    """
    text = read_limited_bytes(path, MAX_YAML_BYTES, follow_links=False).decode()
    parsed = read_yaml_text(text, source=CONFIG_FILE, kind="file")
    values: dict[str, SettingWithOrigin] = {}
    for setting in parsed.settings:
        info = fields_by_path()[setting.path]
        is_default = setting.value == info.default
        recorded = recorded_origins.get(setting.path)
        origin = recorded if isinstance(recorded, str) and recorded else "default" if is_default else "set"
        values[setting.path] = SettingWithOrigin(setting.path, setting.value, origin, is_default)
    for line in text.splitlines():
        if (match := _DERIVED.fullmatch(line)) is not None and (info := fields_by_name().get(match[1])) is not None:
            value = _derived_value(info, match[2])
            values.setdefault(info.path, SettingWithOrigin(info.path, value, match[3], False))
    ordered = {path: values[path] for path in fields_by_path() if path in values}
    return RunSettings(ordered, tuple(map(str, parsed.problems)))


def _derived_value(info: FieldInfo, text: str) -> FieldValue:
    """Parses a derived value; text that cannot be parsed stays text, which is enough to show and to compare it."""
    if info.is_list:
        return tuple(text.strip("[]").split(", "))
    try:
        return info.parse(text.strip("'"))
    except ValueError:
        return text
