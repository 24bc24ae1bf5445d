"""The pipeline of a run: which schedule, over how many ranks, with how many stages on each."""

from __future__ import annotations

from dataclasses import dataclass

from petatron.config import RunConfig
from petatron.schedule import RankSchedule, in_flight, rank_schedule, stage_rank


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """Which schedule cuts a step into actions, over how many ranks and stages per rank."""

    name: str
    ranks: int
    virtual: int
    group_size: int | None = None
    combined: bool = False

    def rank_of(self, stage: int) -> int:
        return stage_rank(self.name, stage, ranks=self.ranks, stages=self.ranks * self.virtual)

    def in_flight(self, micro_batches: int) -> tuple[int, ...]:
        """How many micro-batches' activations each stage holds at most."""
        return in_flight(
            self.name,
            ranks=self.ranks,
            virtual=self.virtual,
            micro_batches=micro_batches,
            group_size=self.group_size,
            combined=self.combined,
        )

    def training_schedule(self, micro_batches: int, *, rank: int) -> RankSchedule:
        """What a pipeline rank does in a training step."""
        return rank_schedule(
            self.name,
            ranks=self.ranks,
            virtual=self.virtual,
            micro_batches=micro_batches,
            rank=rank,
            group_size=self.group_size,
            combined=self.combined,
        )

    def evaluation_schedule(self, micro_batches: int, *, rank: int) -> RankSchedule:
        """What a pipeline rank does in an evaluation step."""
        return rank_schedule(
            self.name,
            ranks=self.ranks,
            virtual=self.virtual,
            micro_batches=micro_batches,
            rank=rank,
            training=False,
        )


def pipeline_plan(run: RunConfig) -> PipelinePlan:
    """The pipeline of a derived config; one rank is a pipeline of one stage."""
    parallel = run.parallel
    assert parallel.pipeline_schedule is not None and parallel.num_virtual_stages_per_pipeline_rank is not None
    return PipelinePlan(
        parallel.pipeline_schedule,
        parallel.pipeline_model_parallel_size,
        parallel.num_virtual_stages_per_pipeline_rank,
        parallel.microbatch_group_size_per_virtual_pipeline_stage,
        combined=parallel.overlap_moe_expert_parallel_comm,
    )


def num_micro_batches(run: RunConfig) -> int:
    """Per step and data-parallel rank, once a batch-size ramp is over."""
    assert run.train.global_batch_size is not None and run.parallel.data_parallel_size is not None
    return max(1, run.train.global_batch_size // (run.train.micro_batch_size * run.parallel.data_parallel_size))
