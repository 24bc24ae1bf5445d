"""`Stateful`: a part of a run's state that checkpoints contain. A run is a list of them; what saves and loads iterates, and names none.

A component has any of three forms of state:

    chunks   boxes of logical tensors `KIND/NAME`, which are loaded in every layout
    local    a rank's own tensors, which are loaded in the layout that saved them
    values   small JSON values, the same on every rank

The manifest records the name, kinds and values of each component, so that a run that does not use one can say what it leaves. Those that
are older than this list (weights, optimizer state, random states, progress, ...) keep their place in the format: `FixedPlace`.
What is missing, extra or changed between a checkpoint and a run is decided and said here, in `ComponentLoad`.

Components of trained parameters alone (moments, averages) have no tensors of frozen ones; the manifest names these once, so that a run may
freeze more or fewer when it continues.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.base.format_text import abbreviate_names
from petatron.checkpoint.files.manifest import METADATA_KEY
from petatron.checkpoint.tensor_chunk import Chunk

_COMPONENTS_KEY, _FROZEN_KEY = "components", "frozen"
_ABSENT = object()
EMPTY_DOCUMENT: Mapping[str, Any] = {"optimizer": None, METADATA_KEY: {}}
"""What the manifest of every checkpoint has, also where no component fills it: readers look for both."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """What a checkpoint has of a component besides its chunks, which are filled already.

    values: as `Stateful.values` returned them. local: this rank's tensors; None if another layout saved the checkpoint. step_folder:
    the folder of the checkpoint; None for a model of another program. unfrozen: the logical tensors that the run trains and the one that
    saved the checkpoint froze; a component of trained parameters has nothing of them there.

    >>> SavedState({"count": 3}, None).values["count"]
    3
    """

    values: Any
    local: Mapping[str, Tensor] | None
    step_folder: Path | None = None
    unfrozen: frozenset[str] = frozenset()


class Stateful:
    """A component of a run's state. A subclass has a name, and says what it saves; what it does not save it leaves out.

    >>> class Counter(Stateful):
    ...     name, count = "counter", 0
    ...     def values(self):
    ...         return {"count": self.count}
    ...     def restore(self, saved):
    ...         self.count = saved.values["count"]
    >>> one, document = Counter(), {}
    >>> one.count = 3
    >>> one.record(document)
    >>> document["components"]["counter"]["values"]
    {'count': 3}
    """

    name: str
    """An identifier, once in a run: the kind of its tensors' keys, and the prefix of its local tensors."""
    title: str = ""
    """What messages call it, in the plural; by default its name."""
    required: bool = False
    """Whether a run cannot continue without it: then a checkpoint that lacks it is refused, and a run that does not use it too."""
    trained_only: bool = False
    """Whether its tensors are those of trained parameters alone, under their names."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its chunks' keys, the part before the slash; the same on every rank."""
        return (self.name,)

    @property
    def local_prefix(self) -> str | None:
        """The prefix of its local tensors in a checkpoint; None if it has none."""
        return f"{self.name}/"

    def chunks(self) -> Iterable[Chunk]:
        """Returns the boxes of logical tensors to save from and load into: views of live storage."""
        return ()

    def chunks_to_load(self) -> Iterable[Chunk]:
        """Returns the boxes to load into, where they are others than those that are saved."""
        return self.chunks()

    def local(self) -> Mapping[str, Tensor]:
        """Returns this rank's own tensors, by name."""
        return {}

    def values(self) -> Any:
        """Returns JSON values, the same on every rank; None means none."""
        return None

    def restore(self, saved: SavedState) -> str | None:
        """Continues from a checkpoint, whose tensors are in the chunks already; returns what a user should know, if anything."""

    def start_anew(self, reason: str) -> str | None:
        """Starts without a checkpoint's state, after all other components are restored; returns what to tell the user."""
        return f"{self.title or self.name} start anew: {reason}"

    def refusal(self, folder: str) -> str:
        """Returns why a checkpoint without a required component is refused, and what to do."""
        return (
            f"The checkpoint in {folder} has no {self.title or self.name}, which this run needs to continue. "
            "Use --finetune to start a new run from its weights."
        )

    def after_update(self, *, updates: int, skipped: Tensor | None) -> None:
        """Called after every step; `updates` counts those so far, `skipped` is 1.0 on the device where this one was skipped."""

    def record(self, document: dict[str, Any]) -> None:
        """Adds the component to the document of a manifest."""
        document.setdefault(_COMPONENTS_KEY, {})[self.name] = {
            "title": self.title or self.name,
            "kinds": list(self.kinds),
            "required": self.required,
            "values": self.values(),
        }

    def is_in(self, document: Mapping[str, Any]) -> bool:
        """Whether a checkpoint with this document has the component."""
        return self.name in _recorded_components(document)

    def recorded_values(self, document: Mapping[str, Any]) -> Any:
        """Returns the values in a document that has the component."""
        return _recorded_components(document)[self.name]["values"]


def _recorded_components(document: Mapping[str, Any]) -> Mapping[str, Any]:
    components = document.get(_COMPONENTS_KEY, {})
    if not isinstance(components, Mapping):
        raise ValueError(f"it records its components as {type(components).__name__}")
    return components


class FixedPlace(Stateful):
    """A component that the format of checkpoints knows: its values are at `path` in the document, if it has any."""

    path: tuple[str, ...] = ()
    fixed_kinds: tuple[str, ...] = ()
    fixed_local_prefix: str | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.fixed_kinds

    @property
    def local_prefix(self) -> str | None:
        return self.fixed_local_prefix

    def record(self, document: dict[str, Any]) -> None:
        if self.path:
            *outer, last = self.path
            for key in outer:
                document = document.setdefault(key, {})
            document[last] = self.values()

    def is_in(self, document: Mapping[str, Any]) -> bool:
        return not self.path or self._lookup(document) not in (None, _ABSENT)

    def recorded_values(self, document: Mapping[str, Any]) -> Any:
        return self._lookup(document) if self.path else None

    def _lookup(self, document: Mapping[str, Any]) -> Any:
        value: Any = document
        for key in self.path:
            value = value.get(key, _ABSENT) if isinstance(value, Mapping) else _ABSENT
        return value


def check_names(components: Sequence[Stateful]) -> None:
    """Raises for components that would share a name or the keys of their tensors."""
    owners: dict[str, Stateful] = {}
    for component in components:
        if not component.name.replace("_", "").replace("-", "").replace(" ", "").isalnum():
            raise CheckpointError(
                f"{component.name!r} is no name of a state component. Use alphanumeric characters, - and _."
            )
        for claimed in dict.fromkeys((component.name, *component.kinds)):
            if owners.setdefault(claimed, component) is not component:
                raise CheckpointError(
                    f"Two components of the run's state save under {claimed!r}: {type(owners[claimed]).__name__} and "
                    f"{type(component).__name__}. Give one of them another name."
                )


def build_document(
    components: Sequence[Stateful], metadata: Mapping[str, Any] | None, frozen: Iterable[str] = ()
) -> dict[str, Any]:
    """Returns the JSON document of a manifest: the components' values, metadata that no load restores, and the frozen logical tensors."""
    document: dict[str, Any] = {**EMPTY_DOCUMENT, METADATA_KEY: dict(metadata or {})}
    if any(component.trained_only for component in components) and (names := sorted(frozen)):
        document[_FROZEN_KEY] = names
    for component in components:
        component.record(document)
    return document


def local_tensors(components: Sequence[Stateful]) -> dict[str, Tensor]:
    """Returns this rank's own tensors of all components, as a checkpoint names them."""
    return {
        f"{component.local_prefix}{name}": tensor
        for component in components
        if component.local_prefix is not None
        for name, tensor in component.local().items()
    }


@dataclass(frozen=True, slots=True)
class _RecordedComponent:
    """What a manifest says of a component that the run does not use."""

    title: str
    kinds: tuple[str, ...]
    required: bool

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> _RecordedComponent:
        title, kinds = entry["title"], entry["kinds"]
        if (
            not isinstance(title, str)
            or not isinstance(kinds, list)
            or not all(isinstance(kind, str) for kind in kinds)
        ):
            raise ValueError(f"it records a component as {entry!r}")
        return cls(title, tuple(kinds), bool(entry["required"]))


@dataclass(slots=True)
class ComponentLoad:
    """One load: which components a checkpoint fills, which start anew, and which of its own are left.

    skipped: components that a flag excludes, by name, with that flag. strict: whether the checkpoint may have nothing more than what the
    components use, except optional components, which are named, and those of what is frozen now. frozen: the run's frozen tensors.
    """

    components: Sequence[Stateful]
    skipped: Mapping[str, str]
    strict: bool
    frozen: Collection[str] = ()
    frozen_then: frozenset[str] = frozenset()
    restored: list[Stateful] = field(default_factory=list)
    _unused: list[_RecordedComponent] = field(default_factory=list)

    def select(self, document: Mapping[str, Any], folder: str) -> list[Chunk]:
        """Returns the chunks to fill from a checkpoint with this document; raises if it lacks or has what must not be."""
        wanted = [component for component in self.components if component.name not in self.skipped]
        self.restored = [component for component in wanted if component.is_in(document)]
        missing = [component for component in wanted if component.required and component not in self.restored]
        names = {component.name for component in self.components}
        frozen = document.get(_FROZEN_KEY, [])
        if not isinstance(frozen, list) or not all(isinstance(name, str) for name in frozen):
            raise ValueError("it does not list the names of what was frozen")
        self.frozen_then = frozenset(frozen)
        recorded = _recorded_components(document)
        self._unused = [_RecordedComponent.from_json(entry) for name, entry in recorded.items() if name not in names]
        problems = [component.refusal(folder) for component in missing]
        problems += [
            f"The checkpoint in {folder} has {unused.title}, without which its run cannot continue, and this run does not use them. "
            "Start the run with what it was started with, or use --finetune to start a new run from its weights."
            for unused in self._unused
            if self.strict and unused.required
        ]
        if problems:
            raise CheckpointError("\n".join(problems))
        return [
            chunk
            for component in self.restored
            for chunk in component.chunks_to_load()
            if not (component.trained_only and chunk.name in self.frozen_then)
        ]

    def may_ignore_key(self, key: str) -> bool:
        """Whether a tensor may be left unread."""
        kind, _, name = key.partition("/")
        if name in self.frozen and not any(
            kind in component.kinds for component in self.restored if not component.trained_only
        ):
            return True
        if not self.strict:
            return all(kind not in component.kinds for component in self.restored)
        skipped = [component.kinds for component in self.components if component.name in self.skipped]
        return any(kind in kinds for kinds in (*skipped, *(unused.kinds for unused in self._unused)))

    @property
    def reads_local(self) -> bool:
        """Whether any component may have local tensors."""
        return any(
            component.local_prefix is not None for component in self.components if component.name not in self.skipped
        )

    def restore(
        self,
        document: Mapping[str, Any],
        local: Mapping[str, Tensor] | None,
        step_folder: Path | None,
        parsing: Callable[[], AbstractContextManager[None]],
    ) -> list[str]:
        """Restores every component, then starts the others anew; returns what a user should know.

        `parsing` surrounds what reads values and local tensors: they may be anything.
        """
        notes: list[str | None] = []
        unfrozen = self.frozen_then.difference(self.frozen)
        with parsing():
            values = [component.recorded_values(document) for component in self.restored]
        for component, recorded in zip(self.restored, values, strict=True):
            rank_tensors = None if local is None else _with_prefix(component.local_prefix, local)
            saved = SavedState(recorded, rank_tensors, step_folder, unfrozen)
            parses = saved.values is not None or component.local_prefix is not None
            with parsing() if parses else nullcontext():
                notes.append(component.restore(saved))
            notes += self._freeze_notes(component) if component.trained_only else ()
        for component in self.components:
            if component not in self.restored:
                notes.append(component.start_anew(self.skipped.get(component.name, "the checkpoint has none")))
        notes += [
            f"{unused.title} of the checkpoint are not used by this run, and its checkpoints will not have them"
            for unused in self._unused
        ]
        return [note for note in notes if note is not None]

    def _freeze_notes(self, component: Stateful) -> Iterator[str]:
        """Yields what a component of trained parameters starts without, and what it leaves, as other ones are frozen than then."""
        title, now = component.title or component.name, frozenset(self.frozen)
        if names := sorted(self.frozen_then - now):
            yield f"not in the checkpoint: {title} of {abbreviate_names(names)}, which its run froze; these start anew"
        if names := sorted(now - self.frozen_then):
            yield f"left in the checkpoint: {title} of {abbreviate_names(names)}, which this run freezes"


def _with_prefix(prefix: str | None, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of a prefix, without it; the empty prefix has the names that have no other."""
    if prefix is None:
        return {}
    if not prefix:
        return {name: tensor for name, tensor in local.items() if "/" not in name}
    return {name.removeprefix(prefix): tensor for name, tensor in local.items() if name.startswith(prefix)}
