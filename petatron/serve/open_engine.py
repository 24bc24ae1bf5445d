"""Opens the generation engine of a checkpoint, with its tokenizer, in the layout of the flags; and replaces it by that of another step.

A checkpoint is the folder of a run (its newest step), of one step, or of a Hugging Face model. `model_settings` says what is opened and
how many ranks it needs, before there are any; `open_engine` then opens it on every rank.

A `CheckpointEngine` is on every rank: rank 0 serves; the other ranks `follow`. Between two engines all ranks agree on what comes next:
rank 0 names a folder to load, or the end. A new step is loaded into the weights that are there, so that it needs no memory; if that fails,
the former step is loaded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from petatron.base.errors import CheckpointError, ConfigError, DataError, PetatronError, Problem
from petatron.base.log import get_logger
from petatron.checkpoint.files import step_list
from petatron.checkpoint.files.step_folder import read_manifest
from petatron.checkpoint.inspect.summarize_checkpoint import run_config, run_metadata
from petatron.config import LoadedConfig
from petatron.config.required_settings import known_vocab_size
from petatron.config.schema.objective_and_dataset_names import IMAGE_TEXT_DATASET
from petatron.config.schema.sections.recommender import RECOMMENDER_MODEL
from petatron.config.schema.sections.vision_language import VISION_LANGUAGE_MODEL
from petatron.config.unused_settings import training_flags
from petatron.data.image_text.image_prompt import ImagePrompts
from petatron.data.image_text.image_prompt_settings import image_prompt_settings
from petatron.data.image_text.image_text_settings import SETTINGS_FLAG
from petatron.data.tokenizer import Tokenizer
from petatron.infer.encoder.encoder_engine import EncoderEngine
from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.engine_outputs import Completion, EngineStats, TokenEvent
from petatron.infer.prompt_images import PromptImages, why_no_images
from petatron.infer.reading_engine import ReadingEngine
from petatron.infer.recommend.recommender_engine import RecommenderEngine
from petatron.infer.sampling_params import (
    SamplingDefaults,
    SamplingParams,
    read_sampling_defaults,
)
from petatron.infer.stop_ids import find_stop_ids
from petatron.mesh.json_collectives import broadcast_json
from petatron.mesh.launch.environment import read_environment
from petatron.models.registry import model_spec
from petatron.pretrained.detect_model_format import check_weights_kind, find_model, model_files
from petatron.pretrained.from_pretrained import from_pretrained
from petatron.pretrained.load_checkpoint import load_checkpoint
from petatron.pretrained.open_tokenizer import open_tokenizer
from petatron.pretrained.read_checkpoint_args import read_checkpoint_args
from petatron.pretrained.saveable_model import Model
from petatron.validate import load_config
from petatron.validate.layer_capabilities import why_reading_only

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """What is known of a checkpoint before its weights are read; what `check_request` asks of a model.

    checkpoint: as it was named. folder: of the Hugging Face model, or of one step. max_length: tokens of prompt and answer together.
    stop_ids: that end an answer, by the model's own files and its tokenizer. weights: the kind of state read as the weights.
    flags, options: of the model and its layout, and of the engine.
    """

    checkpoint: str
    folder: Path
    loaded: LoadedConfig
    tokenizer: Tokenizer | None
    vocab_size: int
    max_length: int
    stop_ids: tuple[int, ...]
    weights: str | None = None
    flags: tuple[str, ...] = ()
    options: EngineOptions | None = None

    @property
    def reads_only(self) -> str | None:
        """Why the model continues no text; None: it does."""
        return why_reading_only(model_spec(self.loaded.config))

    @property
    def source_length(self) -> int | None:
        """The most tokens of a prompt that an encoder reads; None: prompts are continued."""
        return model_spec(self.loaded.config).source_length

    def required_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer, for whoever reads text; `ConfigError` if the model has none."""
        if self.tokenizer is None:
            rule = "has no tokenizer, so that it cannot read text"
            fix = "Give its own with --tokenizer-model FILE, or --tokenizer-type."
            raise ConfigError([Problem("CHECKPOINT", self.checkpoint, rule, fix)])
        return self.tokenizer

    def sampling_defaults(self) -> SamplingDefaults:
        """Reads how its makers recommend to sample."""
        return read_sampling_defaults(model_files(self.folder))

    def image_prompts(self) -> ImagePrompts:
        """Returns what writes prompts with images; raises `DataError` where the model reads none.

        How images are shown is what `--dataset-settings` says, else what the model's image processor does, or what it was trained with.
        """
        model, parallel = self.loaded.config.model, self.loaded.config.parallel
        if (reason := why_no_images(model, pipeline_stages=parallel.pipeline_model_parallel_size)) is not None:
            raise DataError(reason)
        settings = image_prompt_settings(
            model_files(self.folder),
            model,
            given=self.loaded.config.data.dataset_settings,
            trained=_dataset_settings_of_run(self.folder),
        )
        return ImagePrompts(model, self.required_tokenizer(), settings)

    def image_prompts_or_reason(self) -> ImagePrompts | str:
        """Returns what writes prompts with images, or why there are none; a server answers texts then."""
        try:
            return self.image_prompts()
        except DataError as error:
            if self.loaded.config.model.model_type == VISION_LANGUAGE_MODEL:
                _log.warning("requests with images are refused: %s", error)
            return str(error)

    @property
    def num_ranks(self) -> int:
        return (self.loaded.config.launch.nproc_per_node or 1) * self.loaded.config.launch.nnodes


@dataclass(frozen=True, slots=True)
class OpenedEngine:
    """An engine on this rank, and its model."""

    engine: Engine
    model: Model
    settings: ModelSettings


def model_settings(
    checkpoint: str | Path,
    flags: Sequence[str] = (),
    *,
    options: EngineOptions | None = None,
    weights: str | None = None,
) -> ModelSettings:
    """Reads the settings of a checkpoint with those of flags, as `petatron train` spells them; `ConfigError` with all problems."""
    folder, environment = find_model(checkpoint), read_environment()
    check_weights_kind(folder, weights)
    world_size = None if environment.launcher == "single" else environment.world_size
    argv = ["--from", str(folder), *flags]
    loaded = load_config(argv, world_size=world_size, require_training=False, read_checkpoint=read_checkpoint_args)
    loaded, tokenizer = open_tokenizer(loaded)
    model = loaded.config.model
    longest = model.max_position_embeddings + 1  # the last new token is never an input, so it needs no position
    asked = None if options is None else options.max_length
    vocab_size = known_vocab_size(model)
    return ModelSettings(
        checkpoint=str(checkpoint),
        folder=folder,
        loaded=loaded,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        max_length=min(asked or longest, longest),
        stop_ids=find_stop_ids(folder, tokenizer, vocab_size=vocab_size),
        weights=weights,
        flags=tuple(flags),
        options=options,
    )


def warn_of_training_flags(settings: ModelSettings) -> None:
    """Warns of flags that were typed and have no effect on a model that is only read."""
    unused = training_flags(settings.loaded.origins)
    if settings.loaded.config.model.model_type == VISION_LANGUAGE_MODEL:
        unused = [flag for flag in unused if flag != SETTINGS_FLAG]  # which say how the images of prompts are shown
    if unused:
        _log.warning("without effect here, only training reads them: %s", ", ".join(unused))


def open_engine(settings: ModelSettings, *, dtype: torch.dtype | str | None = None) -> OpenedEngine:
    """Loads the weights and builds the engine; every rank calls it. `dtype` None is that of the flags, else that of the weights."""
    model = load_model(settings, dtype=dtype)
    return OpenedEngine(Engine(model, settings.tokenizer, settings.options), model, settings)


def load_model(settings: ModelSettings, *, dtype: torch.dtype | str | None = None) -> Model:
    """Loads the weights, without memory for gradients; every rank calls it."""
    flags, weights = list(settings.flags), settings.weights
    return from_pretrained(settings.folder, flags=flags, dtype=dtype, gradients=False, weights=weights)


def _dataset_settings_of_run(folder: Path) -> tuple[str, ...]:
    """Returns the settings of the images and texts that a run was trained with; none for others."""
    step = step_list.containing_step(folder)
    if step is None:
        return ()
    data = run_config(run_metadata(read_manifest(step))).get("data", {})
    settings = data.get("dataset_settings") if data.get("dataset_type") == IMAGE_TEXT_DATASET else None
    return tuple(str(setting) for setting in settings) if isinstance(settings, list | tuple) else ()


class CheckpointEngine:
    """The engine of a checkpoint, which can be reloaded; a `ServedEngine` at rank 0."""

    def __init__(self, settings: ModelSettings) -> None:
        self._settings, self.path, self.stop_ids = settings, settings.folder, settings.stop_ids
        self._model: Model = load_model(settings)
        self._closed = False
        self._engine = self._build()

    def _build(self) -> Engine | ReadingEngine:
        if self._settings.source_length is not None:
            raise DataError(
                "The server continues prompts, and an encoder-decoder answers them with a text of its own, which its routes do not tell "
                "apart. Use petatron generate."
            )
        reads_only, tokenizer, options = self._settings.reads_only, self._settings.tokenizer, self._settings.options
        if reads_only is None:
            engine = Engine(self._model, tokenizer, options)
            engine.capture_graphs(_log_capture)
            return engine
        recommends = self._model.spec.config.model_type == RECOMMENDER_MODEL
        kind = RecommenderEngine if recommends else EncoderEngine
        return kind(self._model, tokenizer, options, reads_only=reads_only)

    @property
    def step_number(self) -> int | None:
        """The training step of the weights; None for the folder of a model alone."""
        match = step_list.STEP_FOLDER_NAME.fullmatch(self.path.name)
        return None if match is None else int(match[1])

    @property
    def vocab_size(self) -> int:
        return self._engine.vocab_size

    @property
    def max_length(self) -> int:
        return self._engine.max_length

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._engine.tokenizer

    @property
    def reads_only(self) -> str | None:
        return self._engine.reads_only

    @property
    def source_length(self) -> int | None:
        return self._engine.source_length

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, *, images: PromptImages | None = None) -> int:
        return self._engine.submit(prompt_ids, params, images=images, compiled=False)

    def cancel(self, request: int) -> None:
        self._engine.cancel(request)

    def step(self) -> list[TokenEvent]:
        return self._engine.step()

    def take(self, request: int) -> Completion:
        return self._engine.take(request)

    def wake(self) -> None:
        """A step is computed here, and waits for nothing."""

    def check_alive(self) -> None:
        """Holds always: this engine lives in the process that asks."""

    def reload(self, step: Path) -> CheckpointEngine:
        """Loads another step on all ranks, while nothing runs; at rank 0. `path` then tells which step it is."""
        self._engine.close()
        self._replace(broadcast_json(str(step), self._model.mesh.control))
        return self

    def close(self) -> None:
        """Ends the engines of all ranks; at rank 0."""
        if not self._closed:
            self._closed = True
            self._engine.close()
            broadcast_json(None, self._model.mesh.control)

    def follow(self) -> None:
        """Takes part in what rank 0 does until it closes its engine."""
        while True:
            self._engine.follow()
            step = broadcast_json(None, self._model.mesh.control)
            if step is None:
                return
            self._replace(step)

    def _replace(self, step: str) -> None:
        """Loads, on every rank alike: where a load fails, it fails on all."""
        del self._engine  # its cache must be free before a new one takes what memory there is
        try:
            self._load(Path(step))
        except PetatronError as error:
            _log.warning("%s cannot be loaded, so %s is served on: %s", step, self.path, error)
            self._load(self.path)
        self._engine = self._build()

    def _load(self, step: Path) -> None:
        weights = self._settings.weights
        if load_checkpoint(str(step), model=self._model, random_states=False, weights=weights) is None:
            raise CheckpointError(f"{step} holds no checkpoint any more. Another step will do.")
        self.path = step


def _log_capture(done: int, total: int) -> None:
    if done == total:
        _log.info("captured CUDA graphs of %d kinds of steps", total)
