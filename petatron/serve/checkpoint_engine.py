"""The engine of a checkpoint, on every rank, and its replacement by that of another step of the same run.

Rank 0 serves; the other ranks `follow`. Between two engines all ranks agree on what comes next: rank 0 names a folder to load, or the end.
A new step is loaded into the weights that are there, so that it needs no memory; if that fails, the former step is loaded again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from petatron.base.errors import CheckpointError, PetatronError
from petatron.base.log import get_logger
from petatron.base.model_companion_files import is_hf_folder
from petatron.checkpoint.convert.formats import config_sections, load_config_sections
from petatron.checkpoint.convert.read_hf_folder import read_model_settings
from petatron.checkpoint.files import step_folder, step_list
from petatron.config import RunConfig
from petatron.data.tokenizer import Tokenizer, build_tokenizer, folder_tokenizer
from petatron.infer.completion import Completion, TokenEvent
from petatron.infer.engine import Engine, EngineStats
from petatron.infer.engine_options import EngineOptions
from petatron.infer.sampling_params import SamplingParams
from petatron.mesh.collectives import broadcast_object
from petatron.train.state.pretrained import from_pretrained
from petatron.train.state.run_model import Model
from petatron.train.state.save_and_load import load_checkpoint

_log = get_logger(__name__)


class CheckpointEngine:
    """An engine that can be reloaded; a `ServedEngine` at rank 0."""

    def __init__(self, checkpoint: Path, *, flags: Sequence[str] = (), options: EngineOptions | None = None) -> None:
        """`checkpoint` is the folder of a Hugging Face model, of a step, or of a run, of which the newest step is taken."""
        self.path = _one_step(checkpoint)
        self._options = options
        self._model: Model = from_pretrained(self.path, flags=flags)
        self.tokenizer: Tokenizer | None = _open_tokenizer(self.path, flags)
        self.stop_ids = _stop_ids(self._model)
        self._engine: Engine | None = self._build()

    @property
    def step_number(self) -> int | None:
        """The training step of the weights; None for the folder of a model alone."""
        match = step_list.STEP_FOLDER_NAME.fullmatch(self.path.name)
        return None if match is None else int(match[1])

    @property
    def is_first_rank(self) -> bool:
        return self._model.mesh.world.rank == 0

    @property
    def max_length(self) -> int:
        return self._running.max_length

    @property
    def vocab_size(self) -> int:
        return self._running.vocab_size

    @property
    def has_work(self) -> bool:
        return self._running.has_work

    @property
    def stats(self) -> EngineStats:
        return self._running.stats

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        return self._running.submit(prompt_ids, params)

    def cancel(self, request: int) -> None:
        self._running.cancel(request)

    def step(self) -> list[TokenEvent]:
        return self._running.step()

    def take(self, request: int) -> Completion:
        return self._running.take(request)

    def reload(self, step: Path) -> CheckpointEngine:
        """Loads another step on all ranks, while nothing runs; at rank 0. `path` then tells which step it is."""
        self._running.close()
        self._replace(broadcast_object(str(step), self._model.mesh.control))
        return self

    def close(self) -> None:
        """Ends the engines of all ranks; at rank 0."""
        if self._engine is not None:
            self._engine.close()
            broadcast_object(None, self._model.mesh.control)
            self._engine = None

    def follow(self) -> None:
        """Takes part in what rank 0 does until it closes its engine."""
        while True:
            self._running.follow()
            step = broadcast_object(None, self._model.mesh.control)
            if step is None:
                return
            self._replace(step)

    @property
    def _running(self) -> Engine:
        assert self._engine is not None, "the engine is closed"
        return self._engine

    def _replace(self, step: str) -> None:
        """Loads, on every rank alike: where a load fails, it fails on all."""
        self._engine = None  # its cache must be free before a new one takes what memory there is
        try:
            self._load(Path(step))
        except PetatronError as error:
            _log.warning("%s cannot be loaded, so %s is served on: %s", step, self.path, error)
            self._load(self.path)
        self._engine = self._build()

    def _load(self, step: Path) -> None:
        if load_checkpoint(str(step), model=self._model, random_states=False) is None:
            raise CheckpointError(f"{step} holds no checkpoint any more. Another step will do.")
        self.path = step

    def _build(self) -> Engine:
        return Engine(self._model, self.tokenizer, self._options)


def run_config_of(checkpoint: Path, flags: Sequence[str]) -> RunConfig:
    """Returns the settings of a checkpoint's model with those of flags; its world size is how many ranks the layout needs."""
    sections = config_sections(*read_model_settings(_model_folder(_one_step(checkpoint))))
    return load_config_sections(sections, flags, world_size=None).config


def _one_step(checkpoint: Path) -> Path:
    return checkpoint if is_hf_folder(checkpoint) else step_list.resolve_step(checkpoint, None)


def _model_folder(step: Path) -> Path:
    return step if is_hf_folder(step) else step / step_folder.MODEL_FOLDER


def _open_tokenizer(step: Path, flags: Sequence[str]) -> Tokenizer | None:
    """Returns the tokenizer that the flags name, else the model's own; None where there is none."""
    run = run_config_of(step, flags)
    given = run.tokenizer
    if given.tokenizer_type or given.tokenizer_model or given.vocab_file:
        return build_tokenizer(given, vocab_size=run.model.vocab_size)
    held = folder_tokenizer(_model_folder(step))
    return None if held is None else build_tokenizer(held)


def _stop_ids(model: Model) -> tuple[int, ...]:
    """Returns the ids that end an answer, as config.json and generation_config.json name them; each may name one or several."""
    held = model.companion_files
    if held is None:
        return ()
    named: list[Any] = [held.token_ids.get("eos_token_id")]
    if "generation_config.json" in held.files:
        content = json.loads(held.files["generation_config.json"])
        named.append(content.get("eos_token_id") if isinstance(content, Mapping) else None)
    flat = [one for value in named for one in (value if isinstance(value, list) else [value])]
    return tuple(sorted({one for one in flat if isinstance(one, int) and one >= 0}))
