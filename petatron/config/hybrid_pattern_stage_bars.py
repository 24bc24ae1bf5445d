"""The bars of Megatron's hybrid patterns (`M-M*|M-M-`), which cut a model into pipeline stages.

A command line's bars become `--pipeline-model-parallel-layout` (`flags/flag_combinations.py`), which nobody typed then: what is wrong with
it is told of the pattern. On one pipeline rank there is nothing to cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from petatron.base.errors import Problem
from petatron.config.pipeline_stages import LAYER, STAGE_END, parse_pipeline_layout
from petatron.config.schema.fields import FieldValue, fields_by_name
from petatron.config.schema.run import RawRunConfig
from petatron.config.value_origins import ValueOrigin

_LAYOUT, _SIZE = "pipeline_model_parallel_layout", "pipeline_model_parallel_size"


def drop_bars_of_one_rank(values: dict[str, FieldValue], origins: dict[str, ValueOrigin]) -> list[str]:
    """Removes the layout that bars made where there is one pipeline rank; returns the notice of it."""
    layout, size = (fields_by_name()[name].path for name in (_LAYOUT, _SIZE))
    if values[size] != 1 or not _is_of_bars(origins[layout]):
        return []
    typed = origins[layout].detail
    values[layout], origins[layout] = None, ValueOrigin("default")
    return [f"the bars of {typed} have no effect: the pipeline-parallel size is 1"]


def as_pattern_problem(problem: Problem, config: RawRunConfig, origins: Mapping[str, ValueOrigin]) -> Problem:
    """Returns a problem of a layout as one of the pattern whose bars made it, as it was typed; any other as it is."""
    info = fields_by_name()[_LAYOUT]
    layout, pattern = config.parallel.pipeline_model_parallel_layout, config.model.hybrid_layer_pattern
    if not _is_of_bars(origins[info.path]) or layout is None or pattern is None:
        return problem
    typed = origins[info.path].detail
    if problem.where != info.flag:
        return replace(problem, rule=problem.rule.replace(info.flag, f"the bars of {typed}"))
    symbols = iter(pattern)
    stages = ["".join(next(symbols, "") for _ in range(stage.count(LAYER))) for stage in parse_pipeline_layout(layout)]
    fix = problem.fix.replace("Give every rank a t", "Give every rank a layer")
    return replace(problem, where=typed, value=STAGE_END.join(stages), fix=fix)


def _is_of_bars(origin: ValueOrigin) -> bool:
    return origin.kind == "flag" and "hybrid" in origin.detail
