"""What a configuration needs from outside: files that must be there, libraries that must be installed.

`check` asks whether values fit each other; this asks the machine. Both are asked before anything is started.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from petatron.base.errors import Problem
from petatron.config.blend import BlendError, parse_blend
from petatron.config.fields import flag_of
from petatron.config.schema import RunConfig

_FILES = ("tokenizer_model", "vocab_file", "merge_file")
_BLENDS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
_LIBRARIES = {"tensorboard_dir": "tensorboard", "wandb_project": "wandb"}


def preflight(config: RunConfig) -> list[Problem]:
    """Everything that is missing, all at once."""
    return [*_missing_files(config), *_missing_data(config), *_missing_libraries(config), *_timeline(config)]


def _timeline(config: RunConfig) -> Iterator[Problem]:
    path = config.log.pipeline_timeline
    if path is not None and Path(path).is_dir():
        yield Problem("--pipeline-timeline", path, "is a folder", "Give the path of a file.")
    elif path is not None and not Path(path).absolute().parent.is_dir():
        yield Problem("--pipeline-timeline", path, "is in a folder that does not exist", "Make the folder first.")


def _missing_files(config: RunConfig) -> Iterator[Problem]:
    named = [(name, getattr(config.tokenizer, name)) for name in _FILES]
    for name, path in [*named, ("data_args_path", config.data.data_args_path)]:
        if path is not None and not Path(path).exists():
            yield Problem(flag_of(name), path, "does not exist", "Give the path of a file that is there.")


def _missing_data(config: RunConfig) -> Iterator[Problem]:
    for name in _BLENDS:
        try:
            parts = parse_blend(getattr(config.data, name))
        except BlendError:  # a problem of its own
            continue
        for prefix in dict.fromkeys(part.prefix for part in parts):
            gone = [f"{prefix}{end}" for end in (".idx", ".bin") if not Path(f"{prefix}{end}").is_file()]
            if gone:
                fix = "Give the prefix of files that `petatron data preprocess` wrote, without .bin or .idx."
                yield Problem(flag_of(name), prefix, f"does not exist: there is no {' and no '.join(gone)}", fix)


def _missing_libraries(config: RunConfig) -> Iterator[Problem]:
    for name, library in _LIBRARIES.items():
        value = getattr(config.log, name)
        if value is not None and importlib.util.find_spec(library) is None:
            fix = f"pip install {library}, or pip install 'petatron[log]'."
            yield Problem(flag_of(name), value, f"needs {library}, which is not installed", fix)
