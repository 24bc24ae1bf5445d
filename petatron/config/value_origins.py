"""The origins of values (preset, file, flag), for `petatron config show`; those of a run's first start are comments in its config.yaml.

A run that is resumed from its config.yaml has every value from this file. The comments tell the preset, flag, file or checkpoint of the
first start; nothing else reads them. Each has the value it speaks of, so that a value that somebody edits afterwards is the file's own. A
value that is in the file without a comment had its default.

    # First origins of these values, for `petatron config show`:
    #   model.num_layers: 61  <- preset deepseek-v3
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from petatron.base.terminal_escape import printable
from petatron.config.schema.fields import FieldValue, fields_by_path


@dataclass(frozen=True, slots=True)
class ValueOrigin:
    """`detail` is the preset's name, `file:line`, the flag as typed, the checkpoint's folder, or the reason of a derived value.

    `first` is where a value of a run's config.yaml came from when the run first started.
    `adapted` values are those of another source at another size: a toy of it, or its layers cut to fewer.
    """

    kind: Literal["default", "preset", "file", "flag", "checkpoint", "adapted", "derived"]
    detail: str = ""
    first: str = ""

    def __str__(self) -> str:
        if self.first:
            return f"{self.first} ({self.detail})"
        if self.kind in ("file", "flag", "adapted"):
            return self.detail
        separator = ": " if self.kind == "derived" else " "
        return f"{self.kind}{separator}{self.detail}" if self.detail else self.kind

    @property
    def is_default(self) -> bool:
        """Whether nobody ever set this value."""
        return self.kind == "default" or self.first == "default"

    @property
    def is_explicit(self) -> bool:
        """Whether someone set this value, rather than a default or a rule."""
        return self.kind in ("preset", "file", "flag", "checkpoint", "adapted")


@dataclass(frozen=True, slots=True)
class SourcedValues:
    """Values by path, each with its origin."""

    values: Mapping[str, FieldValue]
    origins: Mapping[str, ValueOrigin]


@dataclass(frozen=True, slots=True)
class Setting:
    """One field set by one source."""

    path: str
    value: FieldValue
    origin: ValueOrigin


_TITLE = "# First origins of these values, for `petatron config show`:"
_INDENT, _ARROW = "#   ", "  <- "
_MAX_ORIGIN_LENGTH = 300
_DEFAULT = "default"


def format_origin_comments(
    values: Mapping[str, FieldValue], origins: Mapping[str, ValueOrigin], write: Callable[[FieldValue], str]
) -> str:
    """Returns the comments of all values that somebody set; `write` gives the text of a value in the file."""
    lines = [
        f"{_INDENT}{path}: {write(values[path])}{_ARROW}{printable(origin.first or str(origin))}"
        for path, origin in origins.items()
        if origin.is_explicit and origin.first != _DEFAULT
    ]
    return "\n".join([_TITLE, *lines, ""])


@dataclass(frozen=True, slots=True)
class FirstOrigins:
    """The origins that a file's comments tell, by path, each with the text of the value it is about."""

    is_told: bool = False
    comments: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def of(self, path: str, value: FieldValue, written: str) -> str:
        """Returns the first origin of a value in the file; nothing if the comments do not tell, or tell of another value."""
        if path in self.comments:
            text, origin = self.comments[path]
            return origin if text == written else ""
        return _DEFAULT if self.is_told and value == fields_by_path()[path].default else ""


def read_origin_comments(text: str) -> FirstOrigins:
    """Reads the comments of a file, which may be untrusted."""
    _, title, rest = text.partition(f"{_TITLE}\n")
    comments: dict[str, tuple[str, str]] = {}
    for line in rest.splitlines() if title else ():
        path, colon, told = line.removeprefix(_INDENT).partition(": ")
        value, arrow, origin = told.rpartition(_ARROW)
        if line.startswith(_INDENT) and colon and arrow and path in fields_by_path():
            comments[path] = (value, printable(origin)[:_MAX_ORIGIN_LENGTH])
    return FirstOrigins(bool(title), comments)
