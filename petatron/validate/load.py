"""The door to a checked config: sources are read (`config/load.py`), every rule is asked, and all problems are told together.

Only here does a `LoadedConfig` come to be, so what takes one, or its `RunConfig`, needs to check no settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Unpack

from petatron.base.errors import ConfigError, Problem
from petatron.config.derived_defaults import resolve_derived
from petatron.config.load import ConfigSources, LoadedConfig, RawLoadedConfig, parse_config
from petatron.config.schema.fields import all_fields
from petatron.config.value_origins import ValueOrigin
from petatron.validate.check_all import check_config
from petatron.validate.notices import effect_notices


def load_config(
    argv: Sequence[str] = (), *, require_training: bool = True, **sources: Unpack[ConfigSources]
) -> LoadedConfig:
    """Returns a valid config, or raises `ConfigError` with every problem.

    `argv` may itself contain `--preset NAME` and `--config FILE`. `require_training=False` is for subcommands that only need a
    model or a layout.

    >>> load_config(["--hidden-size", "64"], preset="tiny-llama", require_training=False).config.model.kv_channels
    8
    """
    return without_problems(*resolve_config(argv, require_training=require_training, **sources))


def without_problems(loaded: RawLoadedConfig, problems: Sequence[Problem]) -> LoadedConfig:
    """Returns the resolved config; raises `ConfigError` if there are problems."""
    if problems:
        raise ConfigError(problems)
    return LoadedConfig(resolve_derived(loaded.config), loaded.origins, loaded.notices)


def resolve_config(
    argv: Sequence[str] = (), *, require_training: bool = True, **sources: Unpack[ConfigSources]
) -> tuple[RawLoadedConfig, list[Problem]]:
    """Like `load_config`, but returns the problems together with what could be parsed and derived.

    A rule about a field whose value could not be read is not told, since that is already a problem of its own.
    """
    parsed = parse_config(argv, **sources)
    loaded, origins = parsed.loaded, parsed.loaded.origins
    problems = check_config(loaded.config, require_training=require_training)
    told = [_with_source(problem, origins) for problem in problems if problem.where not in parsed.doubtful_flags]
    notices = (*loaded.notices, *effect_notices(loaded.config, origins))
    return replace(loaded, notices=notices), parsed.problems + told


def _with_source(problem: Problem, origins: Mapping[str, ValueOrigin]) -> Problem:
    """Names the checkpoint or model folder that a value comes from, which nobody typed."""
    origin = next((origins[info.path] for info in all_fields() if info.flag == problem.where), None)
    if origin is None or origin.kind != "checkpoint":
        return problem
    return replace(problem, found=f"{problem.found} of {origin.detail}".strip())
