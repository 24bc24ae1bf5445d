"""YAML files: the same settings as flags, grouped by section or not, every problem with its file and line.

A file is a mapping whose keys are section names with mappings (`model: {num_layers: 4}`) or field names directly
(`num_layers: 4`). It is read as a node tree, not as Python values: nodes have their line, and the text of a scalar goes
through the same parser as a flag's value. `yaml` is imported where it is used so that help and completion stay fast.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from petatron.base.errors import ConfigError, Problem
from petatron.base.terminal_escape import printable
from petatron.base.untrusted_files import read_limited_bytes, reading_untrusted
from petatron.config.flags.flag_names_of_other_trainers import (
    absent_feature,
    alternative,
    suggested_flags,
    suggestion,
    without_section,
)
from petatron.config.flags.megatron_flags import ALIASES, FORMER_SECTIONS, SECTION_ALIASES, UNSUPPORTED_VALUES
from petatron.config.flags.parse_command_line import FILE_FLAG, FROM_FLAG, PRESET_FLAG, check_supported, value_problem
from petatron.config.schema.fields import (
    FieldInfo,
    FieldValue,
    all_fields,
    closest_matches,
    fields_by_name,
    flag_name,
    flatten_config,
    sections,
)
from petatron.config.schema.run import RawRunConfig
from petatron.config.value_origins import Setting, ValueOrigin, read_origin_comments
from petatron.config.yaml_limits import limited_loader

_Node = Any  # a yaml.Node: `id` is scalar, sequence or mapping, and `style` is the quote around a scalar
_NULL = "tag:yaml.org,2002:null"
_UNWRITABLE = re.compile("[\0\ud800-\udfff]")
MAX_YAML_BYTES = 1 << 18
"""A config has a few kilobytes, and a megabyte of YAML takes some fifteen seconds to parse."""
MAX_PROBLEMS = 100
# Keys that name a source of settings, which a file cannot do -> what to write on the command line instead.
_COMMAND_LINE_KEYS = {
    "preset": f"A preset is chosen on the command line: {PRESET_FLAG} NAME.",
    "config": f"Files are given on the command line: {FILE_FLAG} FILE, as often as needed.",
    "from": f"The folder of a model is given on the command line: {FROM_FLAG} FOLDER.",
}


@dataclass(slots=True)
class ParsedYaml:
    """The settings of a file; `doubtful_flags` are flags of fields whose value is in doubt."""

    settings: list[Setting] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    doubtful_flags: set[str] = field(default_factory=set)


def unreadable_source(problem: Problem) -> ParsedYaml:
    """A source that could not be read at all: every value is in doubt, so only this problem is reported."""
    return ParsedYaml(problems=[problem], doubtful_flags={info.flag for info in all_fields()})


def read_yaml_file(path: str | Path) -> ParsedYaml:
    """Reads a user's file, which may be untrusted; origins are `file:line`."""
    try:
        text = read_limited_bytes(Path(path), MAX_YAML_BYTES).decode()
        fix = "Write plain `field: value` lines."
        with reading_untrusted(Path(path), lambda file, why: ConfigError([Problem("--config", str(file), why, fix)])):
            return read_yaml_text(text, source=str(path), kind="file")
    except (OSError, ValueError) as error:  # ValueError: a path that cannot be one, or bytes that are no text
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        return unreadable_source(Problem("--config", str(path), f"cannot be read: {reason}", "Check the path."))
    except ConfigError as error:
        return unreadable_source(error.problems[0])


def read_yaml_text(text: str, *, source: str, kind: Literal["file", "preset"]) -> ParsedYaml:
    """Reads the settings of a YAML text; `source` is the file's or the preset's name."""
    import yaml

    reader = _YamlReader(source, kind, text)
    try:
        root = yaml.compose(text, Loader=limited_loader())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark else source
        what = getattr(error, "problem", None) or "it cannot be parsed"
        return unreadable_source(Problem(where, "", f"is not valid YAML: {what}", "Correct that line."))
    if root is not None:
        with contextlib.suppress(_TooManyProblems):
            reader.read_root(root)
    return reader.parsed


def dump_yaml(
    config: RawRunConfig,
    *,
    origins: Mapping[str, ValueOrigin] | None = None,
    commented_out: Mapping[str, str] | None = None,
    changed_only: bool = False,
) -> str:
    """Serializes a config to text that loads back to the same config.

    With `origins`, derived values are written as comments, so that the file pins only what was chosen and can be
    started again on another number of ranks. `commented_out` are paths that become comments too, each with the reason.
    `changed_only` omits defaults and derived values.
    """
    values = flatten_config(config)
    derived = {path: str(origin) for path, origin in (origins or {}).items() if origin.kind == "derived"}
    reasons = {**derived, **(commented_out or {})}
    lines: list[str] = []
    for section in sections():
        fields = [info for info in all_fields() if info.section == section]
        if changed_only:
            fields = [info for info in fields if values[info.path] != info.default and info.path not in derived]
        if not fields:
            continue
        lines.append(f"{section}:")
        for info in fields:
            text = f"{info.name}: {yaml_value(values[info.path])}"
            reason = reasons.get(info.path)
            lines.append(f"  {text}" if reason is None else f"  # {text}  ({reason})")
        lines.append("")
    return "\n".join(lines)


def yaml_value(value: FieldValue) -> str:
    """Returns a value as one line of YAML."""
    return _dump_value(value, repr(value))


@functools.lru_cache(maxsize=1024)
def _dump_value(value: FieldValue, written: str) -> str:
    """Returns a value as one line of YAML. Most are defaults, the same in every config; `written` tells 1 from True and 1.0."""
    import yaml

    plain: Any = list(value) if isinstance(value, tuple) else value
    # Dumped as the only item of a list, a value of any type is one line between brackets.
    text = yaml.safe_dump([plain], default_flow_style=True, width=10**6, allow_unicode=True).strip()[1:-1]
    # Line breaks and other controls: JSON's form is one line, valid YAML, and can be printed.
    return text if printable(text) == text else printable(json.dumps(plain, ensure_ascii=False))


MADE_OF = "# Made of "
"""Begins a file that is made of another, which messages name in its place, with the lines that comments of settings tell: `(line 5)`."""
_LINE_OF_OTHER, _MAX_SOURCE = re.compile(r"#.*\(line (\d{1,9})\)"), 300


class _TooManyProblems(Exception):
    """A file with more than `MAX_PROBLEMS` problems was not meant for us; suggesting what each key could mean would take minutes."""


class _YamlReader:
    """Reads the node tree of one file."""

    def __init__(self, source: str, kind: Literal["file", "preset"], text: str) -> None:
        title, _, _ = text.partition("\n")
        is_made = title.startswith(MADE_OF)
        self.source = printable(title.removeprefix(MADE_OF))[:_MAX_SOURCE] if is_made else source
        self.lines = text.splitlines() if is_made else None
        self.kind, self.first_origins = kind, read_origin_comments(text)
        self.parsed = ParsedYaml()
        self.seen: dict[str, int] = {}

    def where(self, node: _Node) -> str:
        index = node.start_mark.line
        if self.lines is None:
            return f"{self.source}:{index + 1}"
        line = _LINE_OF_OTHER.search("".join(self.lines[index : index + 1]))
        return f"{self.source}:{line[1]}" if line is not None else self.source

    def add_problem(self, node: _Node, value: str, rule: str, fix: str) -> None:
        self.parsed.problems.append(Problem(self.where(node), value, rule, fix))
        if len(self.parsed.problems) >= MAX_PROBLEMS:
            self.parsed.doubtful_flags.update(info.flag for info in all_fields())
            raise _TooManyProblems

    def read_root(self, root: _Node) -> None:
        if root.id != "mapping":
            self.add_problem(root, "", "is not a mapping", "Write `section:` and indented `field: value` lines.")
            return
        for key, node in root.value:
            name = key.value if key.id == "scalar" else ""
            if name in sections():
                self.read_section(node, name)
            elif node.id == "mapping" and name in FORMER_SECTIONS:
                self.read_section(node, FORMER_SECTIONS[name])
            elif node.id == "mapping" and name in SECTION_ALIASES:
                section = SECTION_ALIASES[name]
                self.add_problem(key, name, "is not a section", f"The section is called {section}.")
                self.read_section(node, section)  # its content was given, and must not be reported as missing
            else:
                self.read_field(key, node, section=None)

    def read_section(self, node: _Node, section: str) -> None:
        if node.id == "scalar" and node.tag == _NULL:
            return
        if node.id != "mapping":
            self.add_problem(node, section, "is a section and needs a mapping", "Write its fields on indented lines.")
            return
        for inner_key, inner in node.value:
            self.read_field(inner_key, inner, section=section)

    def read_field(self, key: _Node, node: _Node, *, section: str | None) -> None:
        if key.id != "scalar":
            self.add_problem(key, "", "has a list or a mapping for a key", "Write `field: value` lines.")
            return
        name = key.value
        info = fields_by_name().get(ALIASES.get(flag_name(name), name.replace("-", "_")))
        if info is None:
            self.unknown_key(key, name, section)
            return
        if section is not None and section != info.section:
            self.add_problem(key, name, f"is not in section {section}", f"Move it to {info.section}.")
        if (line := self.seen.get(info.name)) is not None:
            self.add_problem(key, name, f"was already set on line {line}", "Keep one of them.")
        self.seen[info.name] = key.start_mark.line + 1
        self.read_value(info, key, node)

    def unknown_key(self, key: _Node, name: str, section: str | None) -> None:
        if name in _COMMAND_LINE_KEYS:
            # What that preset or file would have set is unknown, so every value is in doubt.
            self.parsed.doubtful_flags.update(info.flag for info in all_fields())
            self.add_problem(key, name, "cannot be set in a file", _COMMAND_LINE_KEYS[name])
            return
        if (feature := absent_feature(without_section(flag_name(name)))) is not None:
            self.add_problem(key, name, f"needs {feature}, which is not in this version", f"{alternative(feature)}.")
            return
        foreign = suggested_flags(suggestion(flag_name(name)) or "")
        known = [flag[2:].removeprefix("no-").replace("-", "_") for flag in foreign]
        close = [word for word in known if word in fields_by_name()]
        close = close or closest_matches(name, [*fields_by_name(), *([] if section else sections())])
        self.parsed.doubtful_flags.update(fields_by_name()[word].flag for word in close if word in fields_by_name())
        fix = f"Did you mean {' or '.join(close)}?" if close else "See `petatron config reference` for all fields."
        self.add_problem(key, name, "is not a known field" if section else "is not a known section or field", fix)

    def read_value(self, info: FieldInfo, key: _Node, node: _Node) -> None:
        if info.is_list:
            items = node.value if node.id == "sequence" else [node]
        elif node.id != "scalar":
            items = []
            self.add_problem(node, info.name, "takes one value", info.meaning)
        else:
            items = [node]
        values = [self.read_scalar(info, item) for item in items]
        if (items or info.is_list) and all(read for read, _ in values):
            parsed = [value for _, value in values]
            value = tuple(parsed) if info.is_list else parsed[0]
            self.parsed.settings.append(Setting(info.path, value, self.origin(info, value, key)))  # type: ignore[arg-type]
        else:
            self.parsed.doubtful_flags.add(info.flag)

    def origin(self, info: FieldInfo, value: Any, key: _Node) -> ValueOrigin:
        if self.kind == "preset":
            return ValueOrigin("preset", self.source)
        return ValueOrigin("file", self.where(key), self.first_origins.of(info.path, value, yaml_value(value)))

    def read_scalar(self, info: FieldInfo, node: _Node) -> tuple[bool, FieldValue]:
        """Returns (read, value); a quoted scalar is text, so it fits only text fields."""
        if node.id != "scalar":
            self.add_problem(node, info.name, "needs plain values", info.meaning)
            return False, None
        if node.tag == _NULL and node.style is None:
            if not info.optional:
                self.add_problem(node, info.name, "cannot be unset", f"Leave the line out to get {info.default!r}.")
            return info.optional, None
        if info.kind == "str" and node.value not in UNSUPPORTED_VALUES.get(info.name, {}):
            if (strange := _UNWRITABLE.search(node.value)) is not None:
                rule = f"holds the character {printable(strange[0])}, which no path and no name can have"
                self.add_problem(node, info.name, rule, "Write it without.")
            return strange is None, node.value
        try:
            if node.style in ("'", '"') and info.kind != "choice":
                raise ValueError(f"is quoted text, where {info.kind} is wanted")
            check_supported(info, node.value)
            return True, info.parse(node.value)
        except ValueError as error:
            self.parsed.problems.append(value_problem(info, f"{self.where(node)} {info.name}", node.value, str(error)))
            return False, None
