"""Formats a config and the differences of two for `petatron config show` and `petatron config diff`."""

from __future__ import annotations

from collections.abc import Iterable

from petatron.base.terminal_escape import printable
from petatron.config.read_config_sources import RawLoadedConfig
from petatron.config.schema.fields import FieldInfo, FieldValue, all_fields, flatten_config, sections
from petatron.config.schema.run import RawRunConfig

_WIDEST_VALUE = 40


def format_config(loaded: RawLoadedConfig, *, changed_only: bool = False) -> str:
    """Formats every value with its origin, by section; `changed_only` omits defaults, also those that a model's folder repeats."""
    values = flatten_config(loaded.config)
    rows: list[tuple[FieldInfo, str, str]] = []
    for info in all_fields():
        origin = loaded.origins[info.path]
        repeated = origin.kind == "checkpoint" and values[info.path] == info.default
        if not (changed_only and (origin.is_default or repeated)):
            rows.append((info, format_value(values[info.path]), str(origin)))
    name_width = _width(info.name for info, _, _ in rows)
    value_width = min(_WIDEST_VALUE, _width(value for _, value, _ in rows))
    lines: list[str] = []
    for section in sections():
        section_rows = [row for row in rows if row[0].section == section]
        if section_rows:
            lines += [
                section,
                *(f"  {info.name:{name_width}}  {v:{value_width}}  {o}" for info, v, o in section_rows),
                "",
            ]
    return "\n".join(lines).rstrip("\n")


def format_config_diff(before: RawRunConfig, after: RawRunConfig) -> str:
    """Formats one line per field that differs; empty when none does."""
    old, new = flatten_config(before), flatten_config(after)
    paths = [info.path for info in all_fields() if old[info.path] != new[info.path]]
    path_width = _width(paths)
    old_width = min(_WIDEST_VALUE, _width(format_value(old[path]) for path in paths))
    return "\n".join(
        f"{path:{path_width}}  {format_value(old[path]):{old_width}}  ->  {format_value(new[path])}" for path in paths
    )


def format_value(value: FieldValue) -> str:
    """Formats a value as a user would type it; an unset one as `unset`, an empty list as `-`."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        # Twelve digits show every default exactly and hide binary noise; what they cannot represent is shown in full.
        return f"{value:.12g}" if float(f"{value:.12g}") == value else repr(value)
    if isinstance(value, tuple):
        return " ".join(printable(str(item)) for item in value) or "-"
    return printable(str(value))


def _width(texts: Iterable[str]) -> int:
    return max((len(text) for text in texts), default=0)
