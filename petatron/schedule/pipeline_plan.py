"""`PipelinePlan`: the pipeline schedule of a run, its ranks, and virtual stages per rank."""

from __future__ import annotations

from dataclasses import dataclass

from petatron.config import RunConfig
from petatron.schedule import RankSchedule, ScheduleShape, in_flight, rank_schedule, stage_rank


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """The schedule of a step, over how many ranks and virtual stages per rank."""

    name: str
    ranks: int
    virtual: int
    group_size: int | None = None
    combined: bool = False

    def rank_of(self, stage: int) -> int:
        return stage_rank(self.name, stage, ranks=self.ranks, stages=self.ranks * self.virtual)

    def shape(self, micro_batches: int) -> ScheduleShape:
        """Returns the shape of a step of `micro_batches` micro-batches."""
        return ScheduleShape(self.name, self.ranks, self.virtual, micro_batches, self.group_size, self.combined)

    def in_flight(self, micro_batches: int) -> tuple[int, ...]:
        """Returns the most micro-batches whose activations each stage holds."""
        return in_flight(self.shape(micro_batches))

    def training_schedule(self, micro_batches: int, *, rank: int) -> RankSchedule:
        """Returns a pipeline rank's actions of a training step."""
        return rank_schedule(self.shape(micro_batches), rank=rank)

    def evaluation_schedule(self, micro_batches: int, *, rank: int) -> RankSchedule:
        """Returns a pipeline rank's actions of an evaluation step."""
        return rank_schedule(self.shape(micro_batches), rank=rank, training=False)


def pipeline_plan(run: RunConfig) -> PipelinePlan:
    """Returns the pipeline of a config; one rank is a pipeline of one stage."""
    parallel = run.parallel
    return PipelinePlan(
        parallel.pipeline_schedule,
        parallel.pipeline_model_parallel_size,
        parallel.num_virtual_stages_per_pipeline_rank,
        parallel.microbatch_group_size_per_virtual_pipeline_stage,
        combined=parallel.overlap_moe_expert_parallel_comm,
    )


def num_micro_batches(run: RunConfig) -> int:
    """Returns the micro-batches per step and data-parallel rank, after a batch-size ramp."""
    return max(1, run.train.global_batch_size // (run.train.micro_batch_size * run.parallel.data_parallel_size))
