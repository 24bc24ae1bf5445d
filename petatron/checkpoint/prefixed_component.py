"""A component of a second model of a run, which is saved in the same checkpoint under names of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from petatron.checkpoint.stateful_components import SavedState, Stateful
from petatron.checkpoint.tensor_chunk import Chunk


class PrefixedComponent(Stateful):
    """A component whose name, kinds and local tensors have a prefix, the name of its model.

    It saves what it loads: no model folder has the weights of a second model besides. A checkpoint without it starts it anew: the model is
    then what the run built.
    """

    def __init__(self, component: Stateful, prefix: str) -> None:
        self._component, self._prefix = component, prefix
        self.name = f"{prefix}-{component.name.replace(' ', '-')}"
        self.title = f"{component.title or component.name} of the {prefix}"
        self.is_restored = False

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(map(self._prefixed, self._component.kinds))

    @property
    def local_prefix(self) -> str | None:
        return None if self._component.local_prefix is None else f"{self.name}/"

    def chunks(self) -> Iterator[Chunk]:
        return (replace(chunk, key=self._prefixed(chunk.key)) for chunk in self._component.chunks_to_load())

    def local(self) -> Mapping[str, Tensor]:
        return self._component.local()

    def values(self) -> Any:
        return self._component.values()

    def restore(self, saved: SavedState) -> str | None:
        self.is_restored = True
        return self._component.restore(SavedState(saved.values, saved.local))

    def after_update(self, *, updates: int, skipped: Tensor | None) -> None:
        """Does nothing: the model has updates of its own."""

    def _prefixed(self, kind: str) -> str:
        return f"{self._prefix}-{kind}"
