"""Rules about recompute: its granularity, its method, its memory budget."""

from __future__ import annotations

from collections.abc import Iterator

from petatron.base.errors import Problem
from petatron.config.pipeline_stages import max_layers_per_stage
from petatron.config.schema.pipeline_schedules import SPLIT_BACKWARD_SCHEDULES
from petatron.config.schema.run import RawRunConfig


def check_recompute(config: RawRunConfig) -> Iterator[Problem]:
    memory = config.memory
    granularity, budget = memory.recompute_granularity, memory.recompute_memory_budget_gb
    with_layers = memory.recompute_method is not None or memory.recompute_num_layers is not None
    if granularity == "full":
        if memory.recompute_method is None or memory.recompute_num_layers is None:
            rule = "full needs --recompute-method and --recompute-num-layers"
            yield Problem("--recompute-granularity", "", rule, "Common: --recompute-method uniform, 1 layer.")
    elif with_layers and granularity is not None:  # without one they have no effect, as in Megatron
        where = "--recompute-method" if memory.recompute_method is not None else "--recompute-num-layers"
        rule = f"applies to full recompute, but --recompute-granularity is {granularity}"
        yield Problem(where, "", rule, "Use --recompute-granularity full, or leave it out.")
    if budget is not None and granularity is not None:
        rule = f"chooses what to recompute, and so does --recompute-granularity {granularity}"
        yield Problem("--recompute-memory-budget-gb", f"{budget:g}", rule, "Keep one of them.")
    if budget is not None and config.parallel.pipeline_schedule in SPLIT_BACKWARD_SCHEDULES:
        rule = f"cannot be kept with --pipeline-schedule {config.parallel.pipeline_schedule}, which holds operands back"
        yield Problem("--recompute-memory-budget-gb", f"{budget:g}", rule, "Use 1f1b or interleaved.")
    number, largest = memory.recompute_num_layers, max_layers_per_stage(config)
    if number is not None and largest is not None and number > largest:
        rule = f"is more than the {largest} layers of a pipeline stage"
        yield Problem("--recompute-num-layers", str(number), rule, f"Use {largest} or less.")
