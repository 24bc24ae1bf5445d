"""What a power cut may leave of a folder: harsher than a kill, for what was not synced may be lost, in any combination.

The model is that of a careful reading of POSIX. A file has the content it had when it was last synced; one that never was
is empty, or full of zeros. A folder has the names it had when it was last synced, and of what happened to its names since
(a file made, renamed, removed) any part may have reached the disk, in any order between folders; only a single
rename is atomic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from petatron.checkpoint.files.digested_file_io import Disk

Names = dict[str, "Node"]
Survives = Callable[[], bool]
"""Whether the next change that was not synced reached the disk."""


@dataclass(slots=True, eq=False)
class Node:
    """A file (`content`: as synced, None: never) or a folder (`names`: as synced; `live`: now; `pending`: between the two)."""

    is_folder: bool
    content: bytes | None = None
    names: Names = field(default_factory=dict)
    live: Names = field(default_factory=dict)
    pending: list[Callable[[Names], None]] = field(default_factory=list)

    def change(self, change: Callable[[Names], None]) -> None:
        change(self.live)
        self.pending.append(change)

    def sync(self) -> None:
        self.names = dict(self.live)
        self.pending.clear()

    def leave(self, path: Path, survives: Survives) -> None:
        """Write what a cut leaves of this."""
        if not self.is_folder:
            path.write_bytes(self.content if self.content is not None else b"" if survives() else bytes(64))
            return
        path.mkdir()
        names = dict(self.names)
        for change in self.pending:
            if survives():
                change(names)
        for name, node in names.items():
            node.leave(path / name, survives)


def _read(path: Path) -> Node:
    """A folder that has been on disk for long."""
    if path.is_file():
        return Node(False, path.read_bytes())
    names = {child.name: _read(child) for child in path.iterdir()}
    return Node(True, names=names, live=dict(names))


class PoweredDisk(Disk):
    """Follows a folder through all changes; `watch` is told after every change that matters."""

    def __init__(self, folder: Path, watch: Callable[[PoweredDisk, str], None]) -> None:
        self.root = _read(folder)
        self._folder = folder
        self._watch = watch
        self._renaming = ""

    def cut(self, target: Path, survives: Survives) -> None:
        """Make `target` what the folder may be after a power cut now."""
        self.root.leave(target, survives)

    def failpoint(self, event: str, path: Path) -> None:
        if event == "renaming":
            self._renaming = path.name
            return
        if event == "written" or (event == "folder made" and self._find(path) is not None):
            return
        self._note(event, path)
        self._watch(self, f"{event} {path.relative_to(self._folder)}")

    def _find(self, path: Path) -> Node | None:
        node: Node | None = self.root
        for part in path.relative_to(self._folder).parts:
            node = node.live.get(part) if node is not None else None
        return node

    def _note(self, event: str, path: Path) -> None:
        if event == "folder synced":
            node = self._find(path)
            assert node is not None
            node.sync()
            return
        if event == "folder made" and self._find(path.parent) is None:
            self._note(event, path.parent)
        parent, name = self._find(path.parent), path.name
        assert parent is not None
        if event in ("folder made", "opened"):
            node = Node(event == "folder made")
            parent.change(lambda names: names.update({name: node}))
        elif event == "synced":
            parent.live[name].content = path.read_bytes()
        elif event == "removed":
            parent.change(lambda names: names.pop(name, None))
        else:
            assert event == "renamed", event
            old, node = self._renaming, parent.live[self._renaming]
            parent.change(lambda names: (names.pop(old, None), names.update({name: node})))


def chances(random: Random) -> list[Survives]:
    """Nothing survives, everything does, and a few kinds of luck between."""
    return [
        lambda: False,
        lambda: True,
        lambda: random.random() < 0.2,
        lambda: random.random() < 0.5,
        lambda: random.random() < 0.8,
    ]
