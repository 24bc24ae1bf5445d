"""What every pipeline stage keeps for its backward passes: pure arithmetic, so it is known before any rank starts."""

from __future__ import annotations

from typing import Literal

from petatron.config import RunConfig
from petatron.config.stages import stages
from petatron.models.activations import ActivationShape
from petatron.models.recompute_plan import BudgetError, RecomputePlan, plan_recompute
from petatron.train.build import pipeline_plan, steps_micro_batches


def memory_plans(run: RunConfig, *, device: Literal["cpu", "cuda"]) -> list[RecomputePlan]:
    """The plan of every stage in model order; a budget that some stage cannot keep is refused with what the largest needs."""
    shape = ActivationShape.of(run, device=device)
    pipeline = pipeline_plan(run)
    in_flight = pipeline.in_flight(steps_micro_batches(run))
    plans: list[RecomputePlan] = []
    refused: list[BudgetError] = []
    for stage, held in zip(stages(run), in_flight, strict=True):
        try:
            plans.append(plan_recompute(run.memory, shape, stage, in_flight=held, stages_here=pipeline.virtual))
        except BudgetError as error:
            refused.append(error)
    if refused:
        raise max(refused, key=lambda error: error.needed_bytes)
    return plans
