"""YAML files: the same settings as flags, grouped by section or not, every mistake with its file and line.

A file is a mapping whose keys are section names holding mappings (`model: {num_layers: 4}`) or field names directly
(`num_layers: 4`). It is read as a node tree, not as Python values: nodes know their line, and the text of a scalar goes
through the same parser as a flag's value. `yaml` is imported where it is used so that help and completion stay fast.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from petatron.base.errors import ConfigError, Problem
from petatron.base.terminal_escape import printable
from petatron.base.untrusted_files import read_bytes, reading
from petatron.config.flags.megatron_flags import SECTIONS
from petatron.config.flags.parse import FILE_FLAG, PRESET_FLAG, value_problem
from petatron.config.schema.fields import FieldInfo, Value, all_fields, by_name, flatten, nearest, sections
from petatron.config.schema.run import RunConfig
from petatron.config.value_origins import Origin, Setting
from petatron.config.yaml_depth_limit import shallow_loader

_Node = Any  # a yaml.Node: `id` says scalar, sequence or mapping, and `style` is the quote around a scalar
_NULL = "tag:yaml.org,2002:null"
_UNWRITABLE = re.compile("[\0\ud800-\udfff]")
MOST_BYTES = 1 << 18
"""A config has a few kilobytes, and a megabyte of YAML takes some fifteen seconds to parse."""
MOST_PROBLEMS = 100
# Keys that name a source of settings, which a file cannot do -> what to write on the command line instead.
_SOURCES = {
    "preset": f"A preset is chosen on the command line: {PRESET_FLAG} NAME.",
    "config": f"Files are given on the command line: {FILE_FLAG} FILE, as often as needed.",
}


@dataclass(slots=True)
class Document:
    """What a file said; `suspects` are flags of fields whose value is in doubt."""

    settings: list[Setting] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    suspects: set[str] = field(default_factory=set)


def unusable(problem: Problem) -> Document:
    """A source that could not be read at all: every value is in doubt, so only this problem is worth telling."""
    return Document(problems=[problem], suspects={info.flag for info in all_fields()})


def read_file(path: str | Path) -> Document:
    """A user's file, or one that others gave to the user; origins are `file:line`."""
    try:
        text = read_bytes(Path(path), MOST_BYTES).decode()
        with reading(Path(path), _unusable_yaml):
            return read_text(text, source=str(path), kind="file")
    except (OSError, ValueError) as error:  # ValueError: a path that cannot be one, or bytes that are no text
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        return unusable(Problem("--config", str(path), f"cannot be read: {reason}", "Check the path."))
    except ConfigError as error:
        return unusable(error.problems[0])


def _unusable_yaml(path: Path, why: str) -> ConfigError:
    return ConfigError([Problem("--config", str(path), why, "Write plain `field: value` lines.")])


def read_text(text: str, *, source: str, kind: Literal["file", "preset"]) -> Document:
    """Settings of a YAML text; `source` is the file's or the preset's name."""
    import yaml

    reader = _Reader(source, kind)
    try:
        root = yaml.compose(text, Loader=shallow_loader())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark else source
        what = getattr(error, "problem", None) or "it cannot be parsed"
        return unusable(Problem(where, "", f"is not valid YAML: {what}", "Correct that line."))
    if root is not None:
        with contextlib.suppress(_TooMany):
            reader.read_root(root)
    return reader.document


def dump_yaml(
    config: RunConfig,
    *,
    origins: Mapping[str, Origin] | None = None,
    left_out: Mapping[str, str] | None = None,
) -> str:
    """Text that loads back to the same config.

    With `origins`, derived values are written as comments, so that the file pins only what was chosen and can be
    started again on another number of ranks. `left_out` are paths that become comments too, each with the reason.
    """
    import yaml

    values = flatten(config)
    lines: list[str] = []
    for section in sections():
        lines.append(f"{section}:")
        for info in (info for info in all_fields() if info.section == section):
            value = values[info.path]
            plain: Any = list(value) if isinstance(value, tuple) else value
            # Dumped as the only item of a list, a value of any type comes out on one line between brackets.
            text = yaml.safe_dump([plain], default_flow_style=True, width=10**6, allow_unicode=True).strip()[1:-1]
            if (
                printable(text) != text
            ):  # line breaks and other controls: JSON's form is one line, valid YAML, and can be printed
                text = printable(json.dumps(plain, ensure_ascii=False))
            text = f"{info.name}: {text}"
            origin = origins.get(info.path) if origins else None
            reason = str(origin) if origin is not None and origin.kind == "derived" else None
            reason = (left_out or {}).get(info.path, reason)
            lines.append(f"  {text}" if reason is None else f"  # {text}  ({reason})")
        lines.append("")
    return "\n".join(lines)


class _TooMany(Exception):
    """What a file says is so strange that it was not meant for us; to look for what each key could mean would take minutes."""


class _Reader:
    """Walks the node tree of one file."""

    def __init__(self, source: str, kind: Literal["file", "preset"]) -> None:
        self.source, self.kind = source, kind
        self.document = Document()
        self.seen: dict[str, int] = {}

    def where(self, node: _Node) -> str:
        return f"{self.source}:{node.start_mark.line + 1}"

    def problem(self, node: _Node, found: str, rule: str, fix: str) -> None:
        self.document.problems.append(Problem(self.where(node), found, rule, fix))
        if len(self.document.problems) >= MOST_PROBLEMS:
            self.document.suspects.update(info.flag for info in all_fields())
            raise _TooMany

    def read_root(self, root: _Node) -> None:
        if root.id != "mapping":
            self.problem(root, "", "is not a mapping", "Write `section:` and indented `field: value` lines.")
            return
        for key, node in root.value:
            name = key.value if key.id == "scalar" else ""
            if name in sections():
                self.read_section(node, name)
            elif node.id == "mapping" and name in SECTIONS:
                section = SECTIONS[name]
                self.problem(key, name, "is not a section", f"The section is called {section}.")
                self.read_section(node, section)  # what it holds was said, and must not be reported as missing
            else:
                self.read_field(key, node, section=None)

    def read_section(self, node: _Node, section: str) -> None:
        if node.id == "scalar" and node.tag == _NULL:
            return
        if node.id != "mapping":
            self.problem(node, section, "is a section and needs a mapping", "Write its fields on indented lines.")
            return
        for inner_key, inner in node.value:
            self.read_field(inner_key, inner, section=section)

    def read_field(self, key: _Node, node: _Node, *, section: str | None) -> None:
        if key.id != "scalar":
            self.problem(key, "", "has a list or a mapping for a key", "Write `field: value` lines.")
            return
        name = key.value
        info = by_name().get(name.replace("-", "_"))
        if info is None:
            self.unknown_key(key, name, section)
            return
        if section is not None and section != info.section:
            self.problem(key, name, f"is not in section {section}", f"Move it to {info.section}.")
        if (line := self.seen.get(info.name)) is not None:
            self.problem(key, name, f"was already set on line {line}", "Keep one of them.")
        self.seen[info.name] = key.start_mark.line + 1
        self.read_value(info, key, node)

    def unknown_key(self, key: _Node, name: str, section: str | None) -> None:
        if name in _SOURCES:
            # Nobody knows what that preset or file would have set, so every value is in doubt.
            self.document.suspects.update(info.flag for info in all_fields())
            self.problem(key, name, "cannot be set in a file", _SOURCES[name])
            return
        close = nearest(name, [*by_name(), *([] if section else sections())])
        self.document.suspects.update(by_name()[word].flag for word in close if word in by_name())
        fix = f"Did you mean {' or '.join(close)}?" if close else "See `petatron config reference` for all fields."
        self.problem(key, name, "is not a known field" if section else "is not a known section or field", fix)

    def read_value(self, info: FieldInfo, key: _Node, node: _Node) -> None:
        if info.many:
            items = node.value if node.id == "sequence" else [node]
        elif node.id != "scalar":
            items = []
            self.problem(node, info.name, "takes one value", f"It is: {info.doc.removesuffix('.')}.")
        else:
            items = [node]
        values = [self.read_scalar(info, item) for item in items]
        if (items or info.many) and all(read for read, _ in values):
            parsed = [value for _, value in values]
            value = tuple(parsed) if info.many else parsed[0]
            origin = Origin("preset", self.source) if self.kind == "preset" else Origin("file", self.where(key))
            self.document.settings.append(Setting(info.path, value, origin))  # type: ignore[arg-type]
        else:
            self.document.suspects.add(info.flag)

    def read_scalar(self, info: FieldInfo, node: _Node) -> tuple[bool, Value]:
        """(read, value); a quoted scalar is text, so it fits only fields that hold text."""
        if node.id != "scalar":
            self.problem(node, info.name, "needs plain values", f"It is: {info.doc.removesuffix('.')}.")
            return False, None
        if node.tag == _NULL and node.style is None:
            if not info.optional:
                self.problem(node, info.name, "cannot be unset", f"Leave the line out to get {info.default!r}.")
            return info.optional, None
        if info.kind == "str":
            if (strange := _UNWRITABLE.search(node.value)) is not None:
                rule = f"holds the character {printable(strange[0])}, which no path and no name can have"
                self.problem(node, info.name, rule, "Write it without.")
            return strange is None, node.value
        try:
            if node.style in ("'", '"') and info.kind != "choice":
                raise ValueError(f"is quoted text, where {info.kind} is wanted")
            return True, info.parse(node.value)
        except ValueError as error:
            self.document.problems.append(
                value_problem(info, f"{self.where(node)} {info.name}", node.value, str(error))
            )
            return False, None
