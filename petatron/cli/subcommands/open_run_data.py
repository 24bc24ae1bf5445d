"""Opens the datasets of a run for `data trace` and `data build-index`: the settings of a run, and its tokenizer, without a model."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from petatron.base.errors import ConfigError, Problem, raise_problems
from petatron.base.log import get_logger

if TYPE_CHECKING:
    from petatron.config import RunConfig
    from petatron.data.tokenizer import Tokenizer

_CONFIG_FILE = "config.yaml"
_STORED_SECTIONS = ("model", "moe", "tokenizer", "data", "train")


def add_run_arguments(parser: argparse.ArgumentParser, *, accepted: str) -> None:
    parser.add_argument("run", metavar="RUN", help=f"{accepted}; more flags of `petatron train` may follow")
    text = "ranks of the run, where its settings leave the global batch size to them"
    parser.add_argument("--world-size", type=int, metavar="N", help=text)


def open_run_data(
    name: str, flags: Sequence[str], *, world_size: int | None
) -> tuple[RunConfig, Tokenizer | None, Path | None]:
    """Returns the settings and the tokenizer of a run, and the folder of its checkpoints if it has some.

    name: a preset, a YAML file, a run folder, or a checkpoint. Flags are those of `petatron train`, and win.
    """
    from petatron.cli.config import locate_config
    from petatron.pretrained.detect_model_format import has_steps
    from petatron.pretrained.open_tokenizer import open_tokenizer
    from petatron.validate import load_config
    from petatron.validate.preflight import preflight

    folder, derived = _run_folder(Path(name)), []
    file = None if folder is None else folder / _CONFIG_FILE
    if folder is not None and file is not None and not file.is_file() and has_steps(folder):
        with tempfile.TemporaryDirectory(prefix="petatron-") as place:
            path = Path(place) / _CONFIG_FILE
            path.write_text(json.dumps(_stored_settings(folder)), encoding="utf-8")
            loaded = load_config(flags, require_training=False, files=(path,), world_size=world_size)
    else:
        sources = locate_config(name if folder is None else str(folder))
        for path in sources.get("files", ()):
            derived = _derived_batch_size(Path(path), flags) if world_size is None else []
        sources["world_size"] = world_size
        loaded = load_config([*derived, *flags], require_training=False, **sources)
    for notice in loaded.notices:
        get_logger(__name__).info("note: %s", notice)
    train = loaded.config.train
    if train.train_iters is None and train.train_samples is None:
        fix = "The order of samples depends on how many the run needs: give the flag of the run."
        raise ConfigError([Problem("--train-iters", "", "is not set", fix)])
    raise_problems(problem for problem in preflight(loaded.config) if "-path" in problem.where)
    loaded, tokenizer = open_tokenizer(loaded)
    save = loaded.config.checkpoint.save
    places = [place for place in (folder, None if save is None else Path(save)) if place is not None]
    return loaded.config, tokenizer, next((place for place in places if has_steps(place)), None)


def _run_folder(path: Path) -> Path | None:
    """Returns the folder of a run: that of its files, or of the checkpoint that is named."""
    from petatron.checkpoint.files import step_list

    step = step_list.containing_step(path)
    if step is not None:
        return step.parent
    if path.name == _CONFIG_FILE and path.is_file():
        return path.parent
    return path if path.is_dir() else None


def _stored_settings(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the settings that the newest checkpoint has stored, as the sections of a file.

    Those of layout and precision decide nothing about the data, and would ask for ranks.
    """
    from petatron.checkpoint.files import step_folder, step_list
    from petatron.checkpoint.inspect.summarize_checkpoint import run_config, run_metadata
    from petatron.config.schema.fields import fields_by_path

    step = step_list.resolve_step(folder, None, warn=False)
    stored = run_config(run_metadata(step_folder.read_manifest_head(step)))
    return {
        section: {
            name: value
            for name, value in stored.get(section, {}).items()
            if (info := fields_by_path().get(f"{section}.{name}")) is not None and value not in (None, info.default, [])
        }
        for section in _STORED_SECTIONS
    }


def _derived_batch_size(file: Path, flags: Sequence[str]) -> list[str]:
    """Returns the flag of a global batch size that the run has derived from its ranks, as its file says in a comment."""
    from petatron.history.run_settings import read_settings

    try:
        value = read_settings(file, {}).get("train.global_batch_size")
    except (OSError, ValueError):
        return []
    is_given = any(flag.partition("=")[0] == "--global-batch-size" for flag in flags)
    return [] if value is None or is_given else ["--global-batch-size", str(value)]
