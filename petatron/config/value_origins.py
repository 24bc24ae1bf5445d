"""The origin of each value, for `petatron config show`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from petatron.config.schema.fields import FieldValue


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
class Setting:
    """One field set by one source."""

    path: str
    value: FieldValue
    origin: ValueOrigin
