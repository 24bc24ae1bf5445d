"""The door to a checked config: sources are read (`config/load.py`), every rule is asked, and all problems are told together.

Only here does a `LoadedConfig` come to be, so what takes one, or its `RunConfig`, needs to check no settings. Each rule is written once, in
the file of its topic; each reads the config and yields problems in terms of flags, with the value found, the rule and a fix. Rules about
fields that derivation could not fill are skipped, because the reason is already reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Unpack

from petatron.base.errors import ConfigError, Problem
from petatron.config.declared_rules import conflict_problems, number_problems, out_of_bounds
from petatron.config.derived_defaults import resolve_derived
from petatron.config.load import ConfigSources, LoadedConfig, RawLoadedConfig, parse_config
from petatron.config.schema.fields import all_fields
from petatron.config.schema.run import RawRunConfig
from petatron.config.value_origins import ValueOrigin
from petatron.validate.cuda_graphs import check_cuda_graphs
from petatron.validate.files import check_files
from petatron.validate.fp8 import check_fp8
from petatron.validate.layers import check_hybrid, check_recurrent_layers
from petatron.validate.layout import check_data_parallel, check_layout, check_pipeline
from petatron.validate.model import check_model
from petatron.validate.moe import check_moe, check_moe_overlap
from petatron.validate.notices import effect_notices
from petatron.validate.run import check_run


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
    return replace(problem, value=f"{problem.value} of {origin.detail}".strip())


def check_config(config: RawRunConfig, *, require_training: bool = True) -> list[Problem]:
    """Returns every problem of a derived config; empty means it may run.

    `require_training=False` skips what only training needs: a length, a learning rate, data, a vocabulary.
    """
    rules = (
        number_problems(config),
        conflict_problems(config),
        check_model(config),
        check_hybrid(config),
        check_recurrent_layers(config),
        check_moe(config, require_training=require_training),
        check_layout(config, require_training=require_training),
        check_pipeline(config),
        check_data_parallel(config),
        check_moe_overlap(config),
        check_fp8(config),
        check_run(config, require_training=require_training),
        check_cuda_graphs(config),
        check_files(config, require_training=require_training),
    )
    problems = [problem for rule in rules for problem in rule]
    return problems + list(out_of_bounds(config, reported={problem.where for problem in problems}))
