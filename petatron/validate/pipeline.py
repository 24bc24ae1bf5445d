"""Rules about the pipeline: whether schedule, virtual stages and the split of the layers are compatible."""

from __future__ import annotations

from collections.abc import Iterator

from petatron.base.errors import Problem
from petatron.config.declared_rules import at_least
from petatron.config.pipeline_stages import stage_problems
from petatron.config.schema.fields import flag_name
from petatron.config.schema.parallel import RawParallelConfig
from petatron.config.schema.pipeline_schedules import ONE_STAGE_PER_RANK
from petatron.config.schema.run import RawRunConfig

_SIZES = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
_GROUP = "microbatch_group_size_per_virtual_pipeline_stage"
_SCHEDULE, _VIRTUAL = "--pipeline-schedule", "--num-virtual-stages-per-pipeline-rank"


def check_pipeline(config: RawRunConfig) -> Iterator[Problem]:
    parallel = config.parallel
    low = [problem for name in (*_SIZES, _GROUP) for problem in at_least(name, getattr(parallel, name), 1)]
    yield from low
    if low or parallel.pipeline_model_parallel_size < 1:
        return
    mismatch = list(_schedule(parallel))
    yield from mismatch
    if not mismatch:
        yield from stage_problems(config)
    group, pp = getattr(parallel, _GROUP), parallel.pipeline_model_parallel_size
    if group is not None and group < pp and parallel.pipeline_schedule == "interleaved":  # no effect elsewhere
        rule = f"is below --pipeline-model-parallel-size {pp}, so a rank would wait for its own output"
        yield Problem(flag_name(_GROUP), str(group), rule, f"Use {pp} or more.")


def _schedule(parallel: RawParallelConfig) -> Iterator[Problem]:
    pp, virtual, schedule = (
        parallel.pipeline_model_parallel_size,
        parallel.num_virtual_stages_per_pipeline_rank,
        parallel.pipeline_schedule,
    )
    chunked = parallel.num_layers_per_virtual_pipeline_stage is not None
    if pp == 1 and (chunked or schedule in ("interleaved", "zb-v") or (virtual or 1) > 1):
        where, found = _cause(parallel)
        yield Problem(where, found, "needs --pipeline-model-parallel-size above 1", "Leave it out.")
    elif schedule == "zb-v" and virtual is not None and virtual != 2:
        rule = f"has exactly 2 stages per rank, but {virtual} {'was' if virtual == 1 else 'were'} asked for"
        yield Problem(_SCHEDULE, schedule, rule, f"Leave out {_cause(parallel)[0]}, or use another schedule.")
    elif schedule == "interleaved" and virtual == 1:
        rule = "needs more than one virtual stage per rank"
        yield Problem(_SCHEDULE, schedule, rule, f"Give {_VIRTUAL} 2, say, or use 1f1b.")
    elif schedule in ONE_STAGE_PER_RANK and virtual is not None and virtual > 1:
        rule = f"has one stage per rank, but there are {virtual} virtual stages"
        yield Problem(_SCHEDULE, schedule, rule, "Use interleaved, or leave it out.")


def _cause(parallel: RawParallelConfig) -> tuple[str, str]:
    """Returns the flag that determined how many stages a rank holds, with its value."""
    for name in ("pipeline_model_parallel_layout", "num_layers_per_virtual_pipeline_stage"):
        if (value := getattr(parallel, name)) is not None:
            return flag_name(name), str(value)
    schedule, virtual = parallel.pipeline_schedule, parallel.num_virtual_stages_per_pipeline_rank
    if (schedule, virtual) in (("zb-v", 2), ("interleaved", 1)):
        return _SCHEDULE, str(schedule)
    return _VIRTUAL, str(virtual)
