"""The validator: a pure function from a derived config to all its problems.

Each rule is written once, in the file of its topic; each reads the config and yields problems in terms of flags, with
the value found, the rule and a fix. Rules about fields that derivation could not fill are skipped, because the reason is
already reported.
"""

from __future__ import annotations

from petatron.base.errors import Problem
from petatron.config.declared_rules import conflict_problems, number_problems, out_of_bounds
from petatron.config.schema.run import RawRunConfig
from petatron.validate.cuda_graphs import check_cuda_graphs
from petatron.validate.data_parallel import check_data_parallel
from petatron.validate.files import check_files
from petatron.validate.fp8 import check_fp8
from petatron.validate.layers.hybrid import check_hybrid
from petatron.validate.layers.recurrent import check_recurrent_layers
from petatron.validate.model import check_model
from petatron.validate.moe import check_moe
from petatron.validate.moe_overlap import check_moe_overlap
from petatron.validate.parallel_sizes import check_layout
from petatron.validate.pipeline import check_pipeline
from petatron.validate.run import check_run


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
