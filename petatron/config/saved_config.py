"""The config.yaml that a run writes next to its metrics: it restarts the same run, from any folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from petatron.config.absolute_paths import with_absolute_paths
from petatron.config.load import LoadedConfig
from petatron.config.schema.fields import all_fields, flatten_config, replace_fields
from petatron.config.schema.run import RunConfig
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
