"""The config.yaml that a run writes next to its metrics: it restarts the same run, from any folder."""

from __future__ import annotations

import os

from petatron.config.absolute_paths import with_absolute_paths
from petatron.config.load import LoadedConfig
from petatron.config.schema.fields import all_fields, flatten_config
from petatron.config.yaml_file import dump_yaml

_NOT_REPEATED = "for that start only; say it again if it is meant again"


def saved_yaml(loaded: LoadedConfig) -> str:
    """Serialises the settings of a run as a file.

    Paths are absolute. Derived values are comments, so that the run can resume on another number of ranks. So are one-time answers of
    this start, such as the consent to another schedule: the next start asks again.
    """
    config = with_absolute_paths(loaded.config)
    values = flatten_config(config)
    load, save = config.checkpoint.load, config.checkpoint.save
    continues = load is not None and save is not None and os.path.realpath(load) == os.path.realpath(save)
    marks = {"one start", "one load"} if continues else {"one start"}
    once = [info for info in all_fields() if marks & set(info.marks) and values[info.path] != info.default]
    return dump_yaml(config, origins=loaded.origins, commented_out={info.path: _NOT_REPEATED for info in once})
