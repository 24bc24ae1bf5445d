"""Rules about `--exact-rollouts`: settings whose numbers depend on more than a token and its document.

Ranks add partial sums in an order that may depend on how many rows there are; the sum of two does not. A rank that has a part of a
sequence, or of the experts, computes in an order of its own, which generation does not have.
"""

from __future__ import annotations

from collections.abc import Iterator

from petatron.base.errors import Problem
from petatron.config.schema.run import RawRunConfig

EXACT_ROLLOUTS_FLAG = "--exact-rollouts"
_MAX_TENSOR_RANKS = 2
_LEAVE = f"Leave {EXACT_ROLLOUTS_FLAG} out: then the difference is measured."


def check_exact_rollouts(config: RawRunConfig) -> Iterator[Problem]:
    if not config.train.exact_rollouts:
        return
    parallel = config.parallel
    if parallel.tensor_model_parallel_size > _MAX_TENSOR_RANKS:
        rule = f"adds more than two partial sums, in an order that depends on the rows, so {EXACT_ROLLOUTS_FLAG} does not hold"
        value = str(parallel.tensor_model_parallel_size)
        yield Problem("--tensor-model-parallel-size", value, rule, f"Use 1 or {_MAX_TENSOR_RANKS}. {_LEAVE}")
    for flag, size in (
        ("--context-parallel-size", parallel.context_parallel_size),
        ("--expert-model-parallel-size", parallel.expert_model_parallel_size),
    ):
        if size > 1:
            rule = f"computes in an order that generation does not have, so {EXACT_ROLLOUTS_FLAG} does not hold"
            yield Problem(flag, str(size), rule, f"Use 1. {_LEAVE}")
    if config.precision.fp8_format is not None:
        rule = f"scales whole tensors by what else is in a batch, so {EXACT_ROLLOUTS_FLAG} does not hold"
        yield Problem("--fp8-format", config.precision.fp8_format, rule, f"Leave it out. {_LEAVE}")
    if config.model.adapter_base_format is not None:
        rule = f"dequantizes weights for GEMMs of another order, so {EXACT_ROLLOUTS_FLAG} does not hold"
        yield Problem("--adapter-base-format", config.model.adapter_base_format, rule, f"Leave it out. {_LEAVE}")
    if config.model.adapter is not None and config.model.adapter_dropout > 0.0:
        rule = f"drops what generation does not, so {EXACT_ROLLOUTS_FLAG} does not hold"
        yield Problem("--adapter-dropout", str(config.model.adapter_dropout), rule, f"Use 0. {_LEAVE}")
    if config.model.hidden_dropout > 0.0:
        rule = f"drops what generation does not, so {EXACT_ROLLOUTS_FLAG} does not hold"
        yield Problem("--hidden-dropout", str(config.model.hidden_dropout), rule, f"Use 0. {_LEAVE}")
