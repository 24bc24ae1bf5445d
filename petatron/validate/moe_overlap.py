"""What `--overlap-moe-expert-parallel-comm` needs, and what it cannot be combined with: the one list of it.

A forward of one micro-batch and a backward of another alternate within layers
(`parallel/pipeline/combined_forward_backward.py`). So tokens must be dispatched by an all-to-all, the schedule must alternate
forwards and backwards, and nothing that the two share may change in the middle of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator

from petatron.base.errors import Problem
from petatron.config.schema.parallel import FSDP_STRATEGIES
from petatron.config.schema.pipeline_schedules import OVERLAP_SCHEDULES
from petatron.config.schema.run import RawRunConfig

MOE_OVERLAP_FLAG = "--overlap-moe-expert-parallel-comm"


def check_moe_overlap(config: RawRunConfig) -> Iterator[Problem]:
    if not config.parallel.overlap_moe_expert_parallel_comm:
        return
    for rule, fix in (*_needs(config), *_schedule(config), *_memory(config)):
        yield Problem(MOE_OVERLAP_FLAG, "", rule, fix)


OverlapProblem = tuple[str, str]
"""The rule that is broken, and what to do."""


def _needs(config: RawRunConfig) -> Iterator[OverlapProblem]:
    parallel, moe = config.parallel, config.moe
    if moe.num_experts is None:
        yield "needs --num-experts: a dense model has no expert all-to-all", "Leave it out."
        return
    if parallel.expert_model_parallel_size * (parallel.expert_tensor_parallel_size or 1) == 1:
        yield (
            "needs --expert-model-parallel-size above 1: else no token is sent anywhere",
            "Leave it out, or use 2 or more.",
        )
    if moe.moe_token_dispatcher_type != "alltoall":
        rule = f"needs --moe-token-dispatcher-type alltoall, but that is {moe.moe_token_dispatcher_type}"
        yield rule, "Use alltoall, or leave this out."


def _schedule(config: RawRunConfig) -> Iterator[OverlapProblem]:
    parallel = config.parallel
    name = parallel.pipeline_schedule
    if parallel.pipeline_model_parallel_size > 1 and name is not None and name not in OVERLAP_SCHEDULES:
        rule = f"cannot be combined with --pipeline-schedule {name}, which does not run forwards and backwards in turn"
        yield rule, f"Use {' or '.join(OVERLAP_SCHEDULES)}, or leave one of them out."
    if config.log.pipeline_timeline is not None:
        rule = "cannot be combined with --pipeline-timeline: two passes that run in turns have no times of their own"
        yield rule, "Leave one of them out."


def _memory(config: RawRunConfig) -> Iterator[OverlapProblem]:
    memory, strategy = config.memory, config.parallel.data_parallel_sharding_strategy
    again = "would repeat the all-to-all in the backward pass, with random states and hooks set back around it"
    if memory.recompute_granularity == "full":
        yield (
            f"cannot be combined with --recompute-granularity full, which {again}",
            "Use selective recompute without moe.",
        )
    elif memory.recompute_granularity == "selective" and "moe" in memory.recompute_modules:
        yield (
            f"cannot be combined with --recompute-modules moe, which {again}",
            "Use moe_act, shared_experts or others.",
        )
    if memory.recompute_memory_budget_gb is not None:
        rule = "cannot be combined with --recompute-memory-budget-gb, which may choose to recompute layers with their all-to-all"
        yield rule, "Use selective recompute without moe."
    if memory.cpu_offloading_num_layers > 0:
        rule = "cannot be combined with --cpu-offloading-num-layers, whose copies follow one pass from layer to layer"
        yield rule, "Leave one of them out."
    if strategy in FSDP_STRATEGIES:
        rule = f"cannot be combined with --data-parallel-sharding-strategy {strategy}"
        why = "one pass would free the weights of a layer while the other is in it"
        yield f"{rule}: {why}", "Use optim (--use-distributed-optimizer), or leave one of them out."
