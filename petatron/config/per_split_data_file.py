"""`--per-split-data-args-path`: a JSON file with the values of `--train-data-path`, `--valid-data-path` and `--test-data-path`."""

from __future__ import annotations

import json
from pathlib import Path

from petatron.base.errors import Problem
from petatron.base.untrusted_files import read_limited_bytes
from petatron.config.flags.parse_command_line import SPLIT_DATA_FLAG
from petatron.config.schema.fields import fields_by_name
from petatron.config.value_origins import Setting, ValueOrigin

_SPLITS = ("train", "valid", "test")
UNREADABLE = "cannot be read"
MAX_SPLIT_DATA_BYTES = 1 << 24


def read_split_data(path: str) -> tuple[list[Setting], list[Problem]]:
    """Returns the settings of a file, or what is wrong with it."""
    fix = 'Write {"train": [...], "valid": [...], "test": [...]}, each with prefixes, or weights and prefixes.'
    try:
        lists = json.loads(read_limited_bytes(Path(path), MAX_SPLIT_DATA_BYTES))
    except OSError as error:
        return [], [Problem(SPLIT_DATA_FLAG, path, f"{UNREADABLE}: {error.strerror or error}", "Check the path.")]
    except (ValueError, RecursionError):
        return [], [Problem(SPLIT_DATA_FLAG, path, "is not JSON", fix)]
    if not isinstance(lists, dict) or not all(_is_list(prefixes) for prefixes in lists.values()):
        return [], [Problem(SPLIT_DATA_FLAG, path, "is not lists of prefixes by split", fix)]
    if unknown := [name for name in lists if name not in _SPLITS]:
        return [], [Problem(SPLIT_DATA_FLAG, path, f"has {', '.join(map(str, unknown))[:80]}, which is no split", fix)]
    origin = ValueOrigin("flag", SPLIT_DATA_FLAG)
    return [
        Setting(fields_by_name()[f"{split}_data_path"].path, tuple(map(str, lists[split])), origin)
        for split in _SPLITS
        if lists.get(split)
    ], []


def _is_list(prefixes: object) -> bool:
    return isinstance(prefixes, list) and all(isinstance(prefix, str | int | float) for prefix in prefixes)
