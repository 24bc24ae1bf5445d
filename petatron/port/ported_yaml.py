"""Writes the YAML file of `petatron port`: settings with the flag and line that each comes from, and all other flags as comments."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

from petatron.base.terminal_escape import printable
from petatron.config.schema.fields import all_fields, sections
from petatron.config.value_origins import Setting
from petatron.config.yaml_file import yaml_value
from petatron.port.port_flags import PortedFlag

_TITLE = "# Written by petatron port, checksum "
_MAX_COMMENT = 500


def settings_yaml(settings: Iterable[tuple[Setting, PortedFlag | None]]) -> str:
    """Returns settings by section in the order of the schema."""
    by_path = {setting.path: (setting, ported) for setting, ported in settings}
    lines: list[str] = []
    for section in sections():
        rows = [by_path[info.path] for info in all_fields() if info.section == section and info.path in by_path]
        if not rows:
            continue
        lines += [f"{section}:"] if not lines else ["", f"{section}:"]
        for setting, ported in rows:
            text = f"  {setting.path.partition('.')[2]}: {yaml_value(setting.value)}"
            lines.append(text if ported is None else f"{text}  # {_comment(_origin(ported))}")
    return "\n".join([*lines, ""])


def ported_yaml(
    title: str,
    settings: Iterable[tuple[Setting, PortedFlag | None]],
    comments: Sequence[tuple[str, Sequence[str]]],
) -> str:
    """Returns the whole file; `comments` are groups of lines, each with its heading."""
    body = "\n".join([f"# {_comment(title)}", "", settings_yaml(settings), *_comment_lines(comments)])
    return f"{_TITLE}{_checksum(body)}\n{body}"


def is_unchanged(text: str) -> bool:
    """Whether a file is as `petatron port` wrote it, so that nothing is lost when it is written again."""
    head, _, body = text.partition("\n")
    return head.startswith(_TITLE) and head == f"{_TITLE}{_checksum(body)}"


def _checksum(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:16]


def _comment_lines(comments: Sequence[tuple[str, Sequence[str]]]) -> Iterator[str]:
    for heading, lines in comments:
        if lines:
            yield f"# {heading}:"
            yield from (f"#   {_comment(line)}" for line in lines)
            yield ""


def _origin(ported: PortedFlag) -> str:
    line = f" (line {ported.flag.line})" if ported.flag.line else ""
    return f"{ported.text}{line}" + (f": {ported.why}" if ported.why else "")


def _comment(text: str) -> str:
    """Foreign text cannot begin a line of its own, nor hide in controls."""
    shown = printable(text)
    return shown if len(shown) <= _MAX_COMMENT else f"{shown[:_MAX_COMMENT]} ..."
