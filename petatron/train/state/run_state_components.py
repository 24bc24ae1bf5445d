"""Stateful components of a run besides its model's: progress, loss scale, position in the data, alternative weights."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from typing import Any

from petatron.base.untrusted_files import is_count
from petatron.checkpoint.files.manifest import METADATA_KEY
from petatron.checkpoint.stateful_components import FixedPlace, SavedState, Stateful
from petatron.optim.loss_scaler import LossScaler
from petatron.train.state.run_metadata import TrainProgress


class _ValueState(FixedPlace):
    """A component of JSON values in the metadata of a run; a checkpoint without them is refused as a whole."""

    def start_anew(self, reason: str) -> None:
        """`check_resumable` names all values that are missing."""


class ProgressState(_ValueState):
    """How far the run is, its position in the data included."""

    name, title, path = "progress", "progress", (METADATA_KEY, "progress")

    def __init__(self, progress: TrainProgress) -> None:
        self._progress = progress

    def values(self) -> dict[str, int]:
        return asdict(self._progress)

    def restore(self, saved: SavedState) -> None:
        known = {field.name for field in fields(TrainProgress)}
        counts = {name: value for name, value in saved.values.items() if name in known}
        if not all(map(is_count, counts.values())):
            raise ValueError(f"its progress is {counts}")
        for name, value in asdict(TrainProgress(**counts)).items():
            setattr(self._progress, name, value)


class LossScaleState(_ValueState):
    """The loss scale."""

    name, title, path = "loss scale", "loss scale", (METADATA_KEY, "scaler")

    def __init__(self, scaler: LossScaler) -> None:
        self._scaler = scaler

    def values(self) -> dict[str, Any]:
        return self._scaler.state()

    def restore(self, saved: SavedState) -> None:
        self._scaler.restore(saved.values)


@dataclass(slots=True)
class DataOrder:
    """The fingerprint of the training data and its order, once it is known."""

    fingerprint: str | None = None


class DataOrderState(_ValueState):
    """Which data, in which order, the run trains on."""

    name, title, path = "data", "data order", (METADATA_KEY, "data")

    def __init__(self, order: DataOrder) -> None:
        self._order = order

    def values(self) -> str | None:
        return self._order.fingerprint

    def restore(self, saved: SavedState) -> None:
        self._order.fingerprint = saved.values


class AlternativeWeights(Stateful):
    """A component with weights of its own for the whole model, which evaluations measure beside the trained ones.

    >>> AlternativeWeights().is_ready
    True
    """

    @property
    def is_ready(self) -> bool:
        """Whether its weights differ from the trained ones by now."""
        return True

    def in_model(self) -> AbstractContextManager[None]:
        """Returns a context in which the model computes with these weights; afterwards it has its own again, bit for bit."""
        raise NotImplementedError
