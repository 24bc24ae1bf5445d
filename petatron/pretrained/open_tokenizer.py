"""Opens the tokenizer of a run: by default the tokenizer of the model that the run starts from; another one must be forced.

With another tokenizer the ids would mean something else than the model has learned, and training would not notice.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from petatron.base.errors import CheckpointError, ConfigError, Problem
from petatron.base.log import get_logger
from petatron.base.model_companion_files import read_companion_file
from petatron.base.model_folder_file_names import is_hf_folder
from petatron.checkpoint.files import step_folder, step_list
from petatron.config import CheckpointConfig, LoadedConfig, with_vocab_size
from petatron.config.required_settings import known_vocab_size
from petatron.config.schema.data import TokenizerConfig
from petatron.config.schema.fields import fields_by_path, flatten_config, replace_fields
from petatron.config.schema.objective_and_dataset_names import CHAT_DATASETS, PREFERENCE_OBJECTIVES
from petatron.config.settings_from_checkpoint import tokenizer_paths
from petatron.config.value_origins import ValueOrigin
from petatron.data.conversations.end_of_turn import with_end_of_turn
from petatron.data.prompt.built_in_templates import (
    TEMPLATE_FILE,
    default_template,
    with_chat_template,
    with_template_source,
)
from petatron.data.prompt.chat_template import tokenizer_chat_template
from petatron.data.tokenizer import Tokenizer, build_tokenizer, folder_tokenizer
from petatron.data.vocabulary_difference import vocabulary_difference

_log = get_logger(__name__)


def open_tokenizer(loaded: LoadedConfig) -> tuple[LoadedConfig, Tokenizer | None]:
    """Opens the tokenizer of a run, if any; returns the config with the vocabulary size, or raises `ConfigError` if it is unknown."""
    start = _find_start_tokenizer(loaded.config.checkpoint)
    loaded = loaded if start is None else _with_start_tokenizer(loaded, start)
    config = loaded.config
    if config.tokenizer.tokenizer_type is None:
        known_vocab_size(config.model)
        return loaded, None
    tokenizer = build_tokenizer(config.tokenizer, vocab_size=_asked_vocab_size(loaded))
    if start is not None:
        _check_start_tokenizer(loaded, tokenizer, start)
    if start is not None and loaded.config.data.chat_template is None:
        tokenizer = _with_template_of_run(loaded, tokenizer, start)
    learns_chats = _learns_chats(loaded)
    loaded = _with_chat_template(loaded, tokenizer) if learns_chats else loaded
    tokenizer = with_chat_template(tokenizer, loaded.config.data.chat_template)
    if learns_chats:
        tokenizer = with_end_of_turn(tokenizer)
    return with_vocab_size(loaded, *_vocab_size(loaded, tokenizer)), tokenizer


def _with_template_of_run(loaded: LoadedConfig, tokenizer: Tokenizer, start: StartTokenizer) -> Tokenizer:
    """Returns a tokenizer with the chat template that the model was trained with, where a run opens the files that it was made of."""
    path, step = start.folder / TEMPLATE_FILE, step_list.containing_step(start.folder)
    chosen = any(loaded.origins[name].kind in ("flag", "file") for name in tokenizer_paths())
    if step is None or chosen or not path.is_file():
        return tokenizer
    step_folder.check_aux_files(step, step_folder.read_manifest_head(step))
    return with_template_source(tokenizer, read_companion_file(path, CheckpointError).decode(errors="replace"))


def _learns_chats(loaded: LoadedConfig) -> bool:
    data, objective = loaded.config.data, loaded.config.train.objective
    return data.dataset_type in CHAT_DATASETS or (data.dataset_type is None and objective in PREFERENCE_OBJECTIVES)


def _with_chat_template(loaded: LoadedConfig, tokenizer: Tokenizer) -> LoadedConfig:
    """Returns the config with a built-in template where conversations need one, and neither the user nor the tokenizer has any."""
    if loaded.config.data.chat_template is not None or tokenizer_chat_template(tokenizer) is not None:
        return loaded
    name, path = default_template(tokenizer), "data.chat_template"
    _log.info(
        "note: %s has no chat template: conversations are written by the built-in one, %s, which is saved with the model; "
        "--chat-template FILE gives another",
        tokenizer.name,
        name,
    )
    origins = loaded.origins | {path: ValueOrigin("derived", "the tokenizer has no chat template")}
    config = replace_fields(loaded.config, {path: name})
    return replace(loaded, config=config, origins=origins)


def _vocab_size(loaded: LoadedConfig, tokenizer: Tokenizer) -> tuple[int, str]:
    """Returns the size of the model's vocabulary, and where it comes from."""
    extra, name = loaded.config.model.extra_vocab_size, f"{tokenizer.name} tokenizer"
    return tokenizer.vocab_size + extra, f"{name} and --extra-vocab-size {extra}" if extra else name


def _asked_vocab_size(loaded: LoadedConfig) -> int | None:
    """Returns the requested vocabulary size; the tokenizer's size overrides a preset's."""
    of_preset = loaded.origins["model.vocab_size"].kind in ("preset", "adapted")
    gives_way = of_preset and loaded.config.tokenizer.tokenizer_type != "NullTokenizer"
    return None if gives_way else loaded.config.model.vocab_size


@dataclass(frozen=True, slots=True)
class StartTokenizer:
    """The tokenizer and the folder of the model that a run starts from."""

    folder: Path
    config: TokenizerConfig


def _find_start_tokenizer(checkpoint: CheckpointConfig) -> StartTokenizer | None:
    """Returns the tokenizer of the model in `--load`, else of `--pretrained-checkpoint`; None without a model, or if it has none."""
    folder = None if checkpoint.load is None else _model_folder(Path(checkpoint.load), checkpoint.ckpt_step)
    if folder is None and checkpoint.pretrained_checkpoint is not None:
        folder = _model_folder(Path(checkpoint.pretrained_checkpoint), None)
    held = None if folder is None else folder_tokenizer(folder)
    return None if folder is None or held is None else StartTokenizer(folder, held)


def _model_folder(path: Path, step: int | None) -> Path | None:
    """Returns the Hugging Face folder of the model to load; a damaged folder raises when it is loaded."""
    containing = step_list.containing_step(path)
    if containing is not None:
        return containing / step_folder.MODEL_FOLDER
    step = step_list.latest_step(path) if step is None else step
    steps = step_folder.list_steps(path)
    if step is not None and step in steps:
        return steps[step] / step_folder.MODEL_FOLDER
    return path if is_hf_folder(path) else None


def _with_start_tokenizer(loaded: LoadedConfig, start: StartTokenizer) -> LoadedConfig:
    """Returns the config with the model's tokenizer, unless the user chose another or declined it."""
    declined = not loaded.config.checkpoint.use_tokenizer_model_from_checkpoint_args
    if declined or any(loaded.origins[path].is_explicit for path in tokenizer_paths()):
        return loaded
    step = step_list.containing_step(start.folder)
    if step is not None:  # nothing else has read these files yet
        step_folder.check_aux_files(step, step_folder.read_manifest_head(step))
    values = {path: asdict(start.config)[path.partition(".")[2]] for path in tokenizer_paths()}
    origins = dict.fromkeys(values, ValueOrigin("derived", f"the tokenizer of {start.folder}"))
    return replace(loaded, config=replace_fields(loaded.config, values), origins=loaded.origins | origins)


def _check_start_tokenizer(loaded: LoadedConfig, tokenizer: Tokenizer, start: StartTokenizer) -> None:
    """Raises if the user chose another tokenizer than the model's without forcing it."""
    values = flatten_config(loaded.config)
    given = [path for path in tokenizer_paths() if loaded.origins[path].is_explicit and values[path] is not None]
    if not given or tokenizer.name == str(start.folder):
        return
    difference = vocabulary_difference(tokenizer, build_tokenizer(start.config))
    if difference is None:
        return
    if loaded.config.tokenizer.force_tokenizer:
        _log.warning("--force-tokenizer: %s takes the place of the tokenizer of %s", tokenizer.name, start.folder)
        return
    rule = f"is another tokenizer than that of the model in {start.folder}: it {difference}"
    fix = "Leave it out to use the model's own, or add --force-tokenizer to train the model with this one."
    raise ConfigError([Problem(fields_by_path()[given[0]].flag, str(values[given[0]]), rule, fix)])
