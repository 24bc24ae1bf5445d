"""The validator: a pure function from a derived config to all its problems.

Each rule is written once, in the file of its topic; each reads the config and yields problems in terms of flags, with
the value found, the rule and a fix. Rules about fields that derivation could not fill are skipped, because the reason is
already reported. A flag that is refused because its feature is not in this version has that one problem: what else is
wrong with its value does not matter. Rules about other flags still apply.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from petatron.base.errors import Problem
from petatron.config.checks.cuda_graphs import check_cuda_graphs
from petatron.config.checks.data_parallel import check_data_parallel
from petatron.config.checks.files import check_files
from petatron.config.checks.fp8 import check_fp8
from petatron.config.checks.layers.hybrid import check_hybrid
from petatron.config.checks.layers.linear_attention import check_linear_attention
from petatron.config.checks.model import check_model
from petatron.config.checks.moe import check_moe
from petatron.config.checks.moe_overlap import check_moe_overlap
from petatron.config.checks.parallel_sizes import check_layout
from petatron.config.checks.pipeline import check_pipeline
from petatron.config.checks.run import check_run
from petatron.config.flags.parse import PRESET_FLAG, unsupported_problem
from petatron.config.schema.fields import all_fields, fields_by_path, join_with_or
from petatron.config.schema.run import RawRunConfig
from petatron.config.value_origins import Setting

# Path of a field -> the feature that any value but its default requires.
UNSUPPORTED_FIELDS: Mapping[str, str] = {}


def missing_features(settings: Sequence[Setting]) -> list[str]:
    """Returns the features that settings need and that are not in this version."""
    needed = [setting for setting in settings if setting.value != fields_by_path()[setting.path].default]
    return [UNSUPPORTED_FIELDS[setting.path] for setting in needed if setting.path in UNSUPPORTED_FIELDS]


def unsupported_preset(name: str, settings: Sequence[Setting]) -> list[Problem]:
    """Returns the one problem of a preset that needs absent features; flags that nobody typed are not to blame."""
    if not (features := missing_features(settings)):
        return []
    rule = f"needs {join_with_or(features, last='and')}, which this version does not have"
    fix = "Use another preset (`petatron config presets` says which can run), or override what it needs."
    return [Problem(PRESET_FLAG, name, rule, fix)]


def check_config(config: RawRunConfig, *, require_training: bool = True) -> list[Problem]:
    """Returns every problem of a derived config; empty means it may run.

    `require_training=False` skips what only training needs: a length, a learning rate, data, a vocabulary.
    """
    refusals = list(_unsupported_fields(config))
    refused = {problem.where for problem in refusals}
    rules = (
        check_model(config),
        check_hybrid(config),
        check_linear_attention(config),
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
    problems = [problem for found in rules for problem in found if problem.where not in refused] + refusals
    return problems + list(_out_of_bounds(config, reported={problem.where for problem in problems}))


def _out_of_bounds(config: RawRunConfig, *, reported: set[str]) -> Iterator[Problem]:
    """Yields numbers outside the bounds of the schema that no rule has reported."""
    for info in all_fields():
        if info.bounds is None:
            continue
        value = getattr(getattr(config, info.section), info.name)
        numbers = value if info.is_list else () if value is None else (value,)
        for number in numbers:
            if (rule := info.bounds.violation(number)) is not None and info.flag not in reported:
                yield Problem(info.flag, str(number), rule, info.meaning)


def _unsupported_fields(config: RawRunConfig) -> Iterator[Problem]:
    for path, feature in UNSUPPORTED_FIELDS.items():
        info = fields_by_path()[path]
        value = getattr(getattr(config, info.section), info.name)
        if value != info.default:
            fix = "Leave it out" if info.kind == "bool" or info.default is None else f"Use {info.default}"
            yield unsupported_problem(info.flag, "" if info.kind == "bool" else str(value), feature, fix)
