"""The validator: a pure function from a derived config to all its problems.

Each rule is written once, in the file of its topic; each reads the config and yields problems in terms of flags, with
the value found, the rule and a fix. Rules about fields that derivation could not fill are skipped, because the reason is
already reported.
"""

from __future__ import annotations

from collections.abc import Iterator

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
from petatron.config.checks.rule_helpers import conflict_problems, number_problems
from petatron.config.checks.run import check_run
from petatron.config.schema.fields import all_fields
from petatron.config.schema.run import RawRunConfig


def check_config(config: RawRunConfig, *, require_training: bool = True) -> list[Problem]:
    """Returns every problem of a derived config; empty means it may run.

    `require_training=False` skips what only training needs: a length, a learning rate, data, a vocabulary.
    """
    rules = (
        number_problems(config),
        conflict_problems(config),
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
    problems = [problem for rule in rules for problem in rule]
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
