"""The engine of a checkpoint, on every rank, and its replacement by that of another step of the same run.

Rank 0 serves; the other ranks `follow`. Between two engines all ranks agree on what comes next: rank 0 names a folder to load, or the end.
A new step is loaded into the weights that are there, so that it needs no memory; if that fails, the former step is loaded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from petatron.base.errors import CheckpointError, PetatronError
from petatron.base.log import get_logger
from petatron.checkpoint.files import step_list
from petatron.infer.engine import Engine
from petatron.infer.sampling_params import SamplingParams
from petatron.mesh.json_collectives import broadcast_json
from petatron.pretrained.run_model import Model
from petatron.pretrained.save_and_load import load_checkpoint
from petatron.serve.open_engine import ModelSettings, load_model

_log = get_logger(__name__)


class CheckpointEngine(Engine):
    """An engine that can be reloaded; a `ServedEngine` at rank 0."""

    def __init__(self, settings: ModelSettings) -> None:
        self._settings, self.path, self.stop_ids = settings, settings.folder, settings.stop_ids
        self._model: Model = load_model(settings)
        self._build()

    def _build(self) -> None:
        super().__init__(self._model, self._settings.tokenizer, self._settings.options)
        self.capture_graphs(_log_capture)

    @property
    def step_number(self) -> int | None:
        """The training step of the weights; None for the folder of a model alone."""
        match = step_list.STEP_FOLDER_NAME.fullmatch(self.path.name)
        return None if match is None else int(match[1])

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, *, compiled: bool = False) -> int:
        return super().submit(prompt_ids, params, compiled=compiled)

    def wake(self) -> None:
        """A step is computed here, and waits for nothing."""

    def check_alive(self) -> None:
        """Holds always: this engine lives in the process that asks."""

    def reload(self, step: Path) -> CheckpointEngine:
        """Loads another step on all ranks, while nothing runs; at rank 0. `path` then tells which step it is."""
        super().close()
        self._replace(broadcast_json(str(step), self._model.mesh.control))
        return self

    def close(self) -> None:
        """Ends the engines of all ranks; at rank 0."""
        if not self._closed:
            super().close()
            broadcast_json(None, self._model.mesh.control)

    def follow(self) -> None:
        """Takes part in what rank 0 does until it closes its engine."""
        while True:
            super().follow()
            step = broadcast_json(None, self._model.mesh.control)
            if step is None:
                return
            self._replace(step)

    def _replace(self, step: str) -> None:
        """Loads, on every rank alike: where a load fails, it fails on all."""
        del self._steps  # its cache must be free before a new one takes what memory there is
        try:
            self._load(Path(step))
        except PetatronError as error:
            _log.warning("%s cannot be loaded, so %s is served on: %s", step, self.path, error)
            self._load(self.path)
        self._build()

    def _load(self, step: Path) -> None:
        weights = self._settings.weights
        if load_checkpoint(str(step), model=self._model, random_states=False, weights=weights) is None:
            raise CheckpointError(f"{step} holds no checkpoint any more. Another step will do.")
        self.path = step


def _log_capture(done: int, total: int) -> None:
    if done == total:
        _log.info("captured CUDA graphs of %d kinds of steps", total)
