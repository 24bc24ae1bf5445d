"""The global batch size over a run, and the exact conversion between iterations and samples that it implies.

`--rampup-batch-size START INCREMENT SAMPLES` divides SAMPLES into n = (final - START) / INCREMENT equal spans; during
span k the batch has START + k x INCREMENT samples, afterwards the final size. A batch has the size in effect where
it begins. The size is therefore constant on each of n + 1 spans, and counting needs one division per span, not a loop
over iterations. All of it is integer arithmetic: span k begins at the smallest c with c x n >= k x SAMPLES.

`--step-batch-size-schedule` gives the spans themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from petatron.config.schema.batch_size_steps import parse_batch_size_steps
from petatron.config.schema.run import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizeSchedule:
    """Samples per optimizer step as a function of the samples consumed before it.

    >>> schedule = BatchSizeSchedule(final=8, start=4, increment=2, ramp_samples=16)
    >>> [schedule.at(consumed) for consumed in (0, 7, 8, 15, 16, 1000)]
    [4, 4, 6, 6, 8, 8]
    >>> schedule.samples_after(5)  # 4 + 4 + 6 + 6 + 8
    28
    >>> schedule.iterations_for(28), schedule.iterations_for(27)
    (5, 4)
    """

    final: int
    start: int
    increment: int = 1
    ramp_samples: int = 0
    steps: tuple[tuple[int, int], ...] = ()
    """Samples consumed and the size from there on, in order; none for a ramp or one size."""

    @classmethod
    def from_config(cls, run: RunConfig) -> BatchSizeSchedule:
        """Builds the schedule of a derived and checked configuration."""
        final = run.train.global_batch_size
        if run.train.step_batch_size_schedule is not None:
            steps = parse_batch_size_steps(run.train.step_batch_size_schedule, run.model.seq_length)
            return cls(final=final, start=final, steps=steps)
        if not run.train.rampup_batch_size:
            return cls(final=final, start=final)
        start, increment, samples = run.train.rampup_batch_size
        return cls(final=final, start=start, increment=increment, ramp_samples=samples)

    def __post_init__(self) -> None:
        assert 0 < self.start <= self.final and self.increment > 0 and self.ramp_samples >= 0
        assert (self.final - self.start) % self.increment == 0, "the increments do not end at the final batch size"

    @property
    def _num_increments(self) -> int:
        return (self.final - self.start) // self.increment

    def at(self, consumed_samples: int) -> int:
        """Returns the size of the batch that begins after this many samples."""
        if self.steps:
            return [size for begin, size in self.steps if begin <= consumed_samples][-1]
        if consumed_samples >= self.ramp_samples:
            return self.final
        return self.start + consumed_samples * self._num_increments // self.ramp_samples * self.increment

    def samples_after(self, iterations: int, consumed: int = 0) -> int:
        """Returns the samples consumed in total after this many more iterations."""
        for batch, batches in self._constant_size_spans(consumed):
            num_batches = iterations if batches is None else min(iterations, batches)
            consumed += num_batches * batch
            iterations -= num_batches
            if not iterations:
                break
        return consumed

    def iterations_for(self, samples: int, consumed: int = 0) -> int:
        """Returns how many whole batches fit into a budget of samples from a position on; a last partial one does not count."""
        iterations = 0
        for batch, batches in self._constant_size_spans(consumed):
            fitting = samples // batch
            num_batches = fitting if batches is None else min(fitting, batches)
            iterations += num_batches
            samples -= num_batches * batch
            if (
                num_batches == fitting and num_batches != batches
            ):  # the remaining samples fit no more batch of this size
                break
        return iterations

    def _constant_size_spans(self, consumed: int) -> Iterator[tuple[int, int | None]]:
        """Yields (batch size, number of consecutive batches of that size) from a position on; None: unlimited."""
        for begin, _ in self.steps[1:]:
            if begin > consumed:
                batch = self.at(consumed)
                batches = -(-(begin - consumed) // batch)
                yield batch, batches
                consumed += batches * batch
        if self.steps:
            yield self.final, None
            return
        while (batch := self.at(consumed)) < self.final:
            next_span = (batch - self.start) // self.increment + 1
            span_end = -(-next_span * self.ramp_samples // self._num_increments)
            batches = -(-(span_end - consumed) // batch)
            yield batch, batches
            consumed += batches * batch
        yield self.final, None
