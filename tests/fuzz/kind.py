"""What is fuzzed: a sample, its doors, and what a digest covers. What a case does to it: changes of files."""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Files = dict[str, bytes]
Door = Callable[[Path, Path], Any]
"""Opens the folder of a sample as a user would, writing only to the second folder, and returns the content in a comparable form."""
Place = Literal["file", "link", "fifo", "folder", "sparse", "gone"]


class Refused(Exception):
    """A door's own way of saying no where the program reports instead of raising, as `checkpoint verify` does."""


@dataclass(frozen=True, slots=True)
class Change:
    """What one path of the sample becomes. `content` is a file's; `target` a link's; `size` that of a sparse file."""

    place: Place
    content: bytes = b""
    target: str = ""
    size: int = 0

    def make(self, path: Path) -> None:
        """Puts it there; the path is free."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.place == "file":
            path.write_bytes(self.content)
        elif self.place == "link":
            path.symlink_to(self.target)
        elif self.place == "fifo":
            os.mkfifo(path)
        elif self.place == "folder":
            path.mkdir()
        elif self.place == "sparse":
            path.write_bytes(self.content)
            os.truncate(path, self.size)

    def to_json(self) -> dict[str, Any]:
        packed = base64.b85encode(zlib.compress(self.content, 9)).decode() if self.content else ""
        values = {"place": self.place, "content": packed, "target": self.target, "size": self.size}
        return {name: value for name, value in values.items() if value}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Change:
        packed = values.get("content", "")
        content = zlib.decompress(base64.b85decode(packed)) if packed else b""
        return Change(values["place"], content, values.get("target", ""), values.get("size", 0))


@dataclass(frozen=True, slots=True)
class Case:
    """A mutated sample. `sealed` says that whoever changed it has made its digests fit; `story` what was done."""

    kind: str
    number: int
    door: str
    changes: Mapping[str, Change]
    sealed: bool
    story: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.number}"

    def to_json(self) -> str:
        changes = {path: change.to_json() for path, change in self.changes.items()}
        values = {"kind": self.kind, "number": self.number, "door": self.door, "sealed": self.sealed}
        return json.dumps({**values, "story": self.story, "changes": changes}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Case:
        values = json.loads(text)
        changes = {path: Change.from_json(change) for path, change in values["changes"].items()}
        return Case(values["kind"], values["number"], values["door"], changes, values["sealed"], tuple(values["story"]))


def _covers_nothing(case: Case) -> bool:
    return False


def _as_they_are(inner: Files) -> Files:
    return inner


@dataclass(frozen=True, slots=True)
class Kind:
    """A sample and its doors.

    files: the sample as it is on disk. inner: the same before digests and packing, from which `seal` makes files; what is changed
    there is what someone would send who means harm, not what a broken disk leaves. formats: by the end of a path, what the mutators
    know of a file (`mutate/__init__.py`); other files are bytes. shares: how often a door is chosen (1 where it is not said).
    reads: which files a door opens, by the beginnings of their paths (all, where it is not said); only these are mutated for it.
    streams: ends of paths of files that are read to their end, however long they are; these do not become huge.
    wall_s: when a case that has not come back is interrupted; the machine may be busy, so it is wide, and `guard.CPU_S` is what counts.
    covered: whether digests cover what a case changed, so that all it may do is give the content of the sample.
    """

    name: str
    files: Files
    doors: Mapping[str, Door]
    formats: Mapping[str, str] = field(default_factory=dict)
    inner: Files = field(default_factory=dict)
    seal: Callable[[Files], Files] = _as_they_are
    shares: Mapping[str, float] = field(default_factory=dict)
    reads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    streams: tuple[str, ...] = ()
    covered: Callable[[Case], bool] = _covers_nothing
    wall_s: float = 10.0

    def format_of(self, path: str) -> str:
        return next((found for end, found in self.formats.items() if path.endswith(end)), "bytes")

    def read_by(self, door: str, files: Files) -> Files:
        """Those of these files that a door opens."""
        return {path: content for path, content in files.items() if path.startswith(self.reads.get(door, ("",)))}
