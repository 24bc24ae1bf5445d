"""Which schedule, of which sizes: what every function of `schedule/` is a function of."""

from __future__ import annotations

from dataclasses import dataclass

from petatron.config.schema.pipeline_schedules import ONE_STAGE_PER_RANK, OVERLAP_SCHEDULES, SCHEDULES


@dataclass(frozen=True, slots=True)
class ScheduleShape:
    """A schedule's name, its ranks, virtual stages per rank, and micro-batches of one step.

    group_size is for interleaved: how many micro-batches run a rank's first stage before its second starts (default: ranks).
    combined: in the steady state a forward and a backward of different micro-batches are one batch, and run combined.

    >>> ScheduleShape("zb-v", ranks=3, virtual=2, micro_batches=8).stage_ranks
    [0, 1, 2, 2, 1, 0]
    """

    name: str
    ranks: int
    virtual: int
    micro_batches: int
    group_size: int | None = None
    combined: bool = False

    @property
    def stages(self) -> int:
        return self.ranks * self.virtual

    @property
    def stage_ranks(self) -> list[int]:
        """The rank that has each stage."""
        return [stage_rank(self.name, stage, ranks=self.ranks, stages=self.stages) for stage in range(self.stages)]

    def problem(self) -> str | None:
        """Returns why there is no such schedule, as the rule that is broken; None if there is one."""
        name, ranks, virtual = self.name, self.ranks, self.virtual
        if name not in SCHEDULES:
            return f"the schedules are {', '.join(SCHEDULES)}; there is no {name!r}"
        if min(ranks, virtual, self.micro_batches) < 1:
            return "ranks, stages per rank and micro-batches must each be at least 1"
        if name in ONE_STAGE_PER_RANK and virtual > 1:
            return f"{name} has one stage per rank, not {virtual}; interleaved has any number, zb-v two"
        if name == "zb-v" and virtual != 2 and (ranks, virtual) != (1, 1):
            return f"zb-v has exactly two stages per rank, not {virtual}"
        if name == "interleaved" and self.group_size is not None and self.group_size < ranks:
            return f"a group of {self.group_size} micro-batches is smaller than the pipeline's {ranks} ranks"
        if self.combined and ranks > 1 and name not in OVERLAP_SCHEDULES:
            return (
                f"{name} does not run forwards and backwards in turn, so it cannot combine them; "
                f"{' and '.join(OVERLAP_SCHEDULES)} can"
            )
        return None

    def check(self) -> None:
        """Raises ValueError with the reason where there is no such schedule."""
        problem = self.problem()
        if problem:
            raise ValueError(problem)


def stage_rank(name: str, stage: int, *, ranks: int, stages: int) -> int:
    """Returns the rank that has a stage under a schedule."""
    if name == "zb-v" and stage >= ranks:
        return stages - 1 - stage
    return stage % ranks
