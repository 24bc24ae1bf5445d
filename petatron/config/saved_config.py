"""Writes the config.yaml of a run: it restarts the same run from any folder, since its paths are absolute."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from petatron.base.remote_address import is_remote
from petatron.config.import_user_modules import IMPORTS_PATH, absolute_import
from petatron.config.read_config_sources import LoadedConfig
from petatron.config.schema.data_blend import BlendError, named_sets, parse_blend, read_blend_file
from petatron.config.schema.fields import FieldInfo, all_fields, flatten_config, replace_fields
from petatron.config.schema.run import RunConfig
from petatron.config.schema.sections.chat_template import BUILT_IN_TEMPLATES
from petatron.config.unused_settings import unused_settings
from petatron.config.value_origins import format_origin_comments
from petatron.config.yaml_file import dump_yaml, yaml_value

_NOT_REPEATED = "for that start only; say it again if it is meant again"
_NOT_KEPT = "where a private key is is not kept; say it again"


def without_private_paths(config: RunConfig) -> RunConfig:
    """Returns the config as others may read it: without the places of private keys.

    >>> from petatron.config import CheckpointConfig
    >>> without_private_paths(RunConfig(checkpoint=CheckpointConfig(sign_key="/home/me/key"))).checkpoint.sign_key is None
    True
    """
    return replace_fields(config, dict.fromkeys(_private_paths()))


def without_private_settings(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the sections of a stored config without such settings, which older checkpoints have."""
    private = _private_paths()
    return {
        section: {name: value for name, value in values.items() if f"{section}.{name}" not in private}
        for section, values in sections.items()
    }


def _private_paths() -> set[str]:
    return {info.path for info in all_fields() if "private" in info.marks}


def saved_yaml(loaded: LoadedConfig) -> str:
    """Serializes the settings of a run as a file.

    Paths are absolute. Derived values are comments, so that the run can resume on another number of ranks. So are one-time answers of
    this start, such as the consent to another schedule: the next start asks again. Where a private key is is not written. Comments at
    the end keep where values first came from.
    """
    config = without_private_paths(with_absolute_paths(loaded.config))
    config = replace_fields(config, _unused_default_paths(loaded.config))
    values = flatten_config(config)
    load, save = config.checkpoint.load, config.checkpoint.save
    continues = load is not None and save is not None and os.path.realpath(load) == os.path.realpath(save)
    marks = {"one start", "one load"} if continues else {"one start"}
    once = [info for info in all_fields() if marks & set(info.marks) and values[info.path] != info.default]
    given = flatten_config(loaded.config)
    private = {path: _NOT_KEPT for path in _private_paths() if given[path] is not None}
    reasons = {info.path: _NOT_REPEATED for info in once} | private
    kept = {path: origin for path, origin in loaded.origins.items() if path not in reasons}
    settings = dump_yaml(config, origins=loaded.origins, commented_out=reasons)
    return f"{settings}\n{format_origin_comments(values, kept, yaml_value)}"


def _unused_default_paths(config: RunConfig) -> dict[str, Any]:
    """Returns the default paths that have no effect, as they are: made absolute, they would look as if somebody had set them."""
    values, unused = flatten_config(config), unused_settings(config)
    return {
        info.path: info.default for info in path_fields() if info.path in unused and values[info.path] == info.default
    }


def path_fields() -> list[FieldInfo]:
    """Returns the fields whose value is a path or several; those of datasets may have weights between them."""
    return [info for info in all_fields() if "path" in info.marks]


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Returns the config with absolute paths: relative ones are resolved against the working folder.

    A `--data-args-path` whose file names datasets by relative prefixes becomes the equivalent `--data-path`.
    """
    values = flatten_config(config)
    list_file = config.data.data_args_path
    blend = _relative_blend(list_file) if list_file is not None else ()
    if blend and not config.data.data_path:
        values |= {"data.data_path": blend, "data.data_args_path": None}
    for info in path_fields():
        values[info.path] = absolute_value(info, values[info.path])
    values[IMPORTS_PATH] = tuple(map(absolute_import, config.launch.imports))
    return replace_fields(config, values)


def absolute_value(info: FieldInfo, value: Any) -> Any:
    """Returns the absolute value of a path field; weights in a list stay."""
    if info.path == "data.chat_template" and value in BUILT_IN_TEMPLATES:
        return value
    if info.path == "data.valid_data_path":
        return tuple(_absolute_sets(value))
    if info.is_list:
        return tuple(_absolute_blend(value))
    return _absolute(value) if value else value


def _absolute_sets(paths: Sequence[str]) -> list[str]:
    """Returns the words of several sets with names, or of one without."""
    try:
        sets = named_sets(paths)
    except BlendError:  # reported by `check`
        return list(paths)
    absolute = {name: _absolute_blend(of_set) for name, of_set in sets.items()}
    return [
        word if name is None or place else f"{name}={word}"
        for name, of_set in absolute.items()
        for place, word in enumerate(of_set)
    ]


def _absolute_blend(blend: Sequence[str]) -> list[str]:
    try:
        weighted = any(part.weight is not None for part in parse_blend(blend))
    except BlendError:  # reported by `check`
        return list(blend)
    return [word if weighted and place % 2 == 0 else _absolute(word) for place, word in enumerate(blend)]


def _absolute(path: str) -> str:
    return path if is_remote(path) else os.path.abspath(path)


def _relative_blend(list_file: str) -> tuple[str, ...]:
    """Returns the words of a --data-args-path file if some of its prefixes are relative; an unreadable file is reported elsewhere."""
    try:
        blend = read_blend_file(list_file)
        prefixes = [part.prefix for part in parse_blend(blend)]
    except (OSError, UnicodeDecodeError, BlendError):
        return ()
    return tuple(blend) if not all(os.path.isabs(prefix) or is_remote(prefix) for prefix in prefixes) else ()
