"""What one step finds out of each sequence: a sampled token, log-probabilities, a pooled vector; and the same as numbers.

Ranks of the last stage compute it from logits. All ranks know beforehand how many numbers it is (`StepLayout`), so it is exchanged as
one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from petatron.infer.engine_outputs import TokenLogprob
from petatron.infer.sampling import SampledRow, drawn_logprobs, sample_tokens, token_logprobs
from petatron.infer.scheduler import ScheduledSequence
from petatron.infer.sequence import Sequence as RunningSequence
from petatron.mesh import collectives
from petatron.mesh.mesh import ParallelMesh

NO_TOKEN = -1
"""In place of a token, where the constraint of a sequence allows none."""


@dataclass(slots=True, eq=False)
class SequenceResult:
    """Of one sequence.

    tokens: the accepted drafts, and one more; none if none was asked for. logprobs: of each, if asked for. pooled: the sum of
    hidden states of the step's tokens, or the last one's.
    """

    work: ScheduledSequence
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    prompt_logprobs: Sequence[TokenLogprob] = ()
    pooled: list[float] | None = None

    @property
    def num_accepted(self) -> int:
        return max(0, len(self.tokens) - 1)

    def pack(self) -> Iterator[float]:
        """Yields as many numbers as if all drafts had been accepted."""
        rejected = len(self.work.drafts) - self.num_accepted if self.tokens else 0
        yield from (*self.tokens, *[NO_TOKEN] * rejected)
        for logprob in (*self.logprobs, *list(self.logprobs[:1]) * rejected, *self.prompt_logprobs):
            top = (number for pair in logprob.top for number in pair)
            yield from (logprob.token, logprob.logprob, logprob.kept_mass, *top)
        yield from self.pooled or ()


def accept_drafts(drafts: Sequence[int], drawn: Sequence[int]) -> list[int]:
    """Returns the tokens that are the sequence's next: those drawn after drafts that were all drawn too.

    >>> accept_drafts([4, 5, 6], [4, 5, 7, 8]), accept_drafts([], [3])
    ([4, 5, 7], [3])
    """
    wrong = (number for number, (draft, token) in enumerate(zip(drafts, drawn)) if draft != token)
    return list(drawn[: next(wrong, len(drafts)) + 1])


@dataclass(frozen=True, slots=True, eq=False)
class StepLayout:
    """A replica's step: the scheduled sequences, and for each the rows whose logits are needed, counted from its first.

    `samples` says how many of a sequence's last rows are sampled: one, and one for each draft, or none; those before have prompt
    tokens as targets.
    """

    scheduled: Sequence[ScheduledSequence]
    logit_rows: list[list[int]]
    samples: list[int]
    hidden_size: int

    @classmethod
    def of(cls, scheduled: Sequence[ScheduledSequence], *, hidden_size: int) -> StepLayout:
        rows, samples = [], []
        for work in scheduled:
            params = work.sequence.params
            last_target = work.sequence.num_prompt - 1
            end = min(work.start + work.count, last_target)
            reported = () if params.prompt_logprobs is None else range(work.start, end)
            sampled = work.reaches_end and params.max_new_tokens > 0 and params.pooling is None
            samples.append((1 + len(work.drafts)) * sampled)
            sampled_rows = range(work.count - samples[-1], work.count)
            rows.append([*(position - work.start for position in reported), *sampled_rows])
        return cls(scheduled, rows, samples, hidden_size)

    def sampled_rows(self, device: torch.device, *, pending: int = 0) -> list[SampledRow]:
        """Returns what the draws depend on; `pending` tokens before each are not known yet."""
        return [
            sampled_row(work.sequence, work.drafts[:drafted], device, pending=pending)
            for work, samples in zip(self.scheduled, self.samples)
            for drafted in range(samples)
        ]

    @property
    def num_tokens(self) -> int:
        return sum(work.count for work in self.scheduled)

    @property
    def num_values(self) -> int:
        return sum(self._size(number) for number in range(len(self.scheduled)))

    def unpack(self, values: Sequence[float]) -> list[SequenceResult]:
        """Returns the results that `SequenceResult.pack` made numbers of."""
        results, numbers = [], iter(values)
        for number, work in enumerate(self.scheduled):
            params, samples = work.sequence.params, self.samples[number]
            drawn = [int(token) for token in islice(numbers, samples)]
            tokens = drawn[:1] + [token for token in drawn[1:] if token != NO_TOKEN]
            num_reported = 0 if params.logprobs is None else samples
            logprobs = [_read_logprob(numbers, params.logprobs or 0) for _ in range(num_reported)]
            num_prompt = len(self.logit_rows[number]) - samples
            prompt_logprobs = [_read_logprob(numbers, params.prompt_logprobs or 0) for _ in range(num_prompt)]
            pooled = list(islice(numbers, self.hidden_size)) if self.pools(number) else None
            results.append(SequenceResult(work, tokens, logprobs[: len(tokens)], prompt_logprobs, pooled))
        return results

    def _size(self, number: int) -> int:
        """Returns how many numbers a sequence has."""
        params, sampled = self.scheduled[number].sequence.params, self.samples[number]
        size = 0
        if sampled:
            size = sampled * (1 + (0 if params.logprobs is None else 3 + 2 * params.logprobs))
        reported = len(self.logit_rows[number]) - sampled
        if reported:
            assert params.prompt_logprobs is not None
            size += reported * (3 + 2 * params.prompt_logprobs)
        if self.pools(number):
            size += self.hidden_size
        return size

    def pools(self, number: int) -> bool:
        work = self.scheduled[number]
        pooling = work.sequence.params.pooling
        in_step = {"mean": True, "first": work.start == 0, "last": work.reaches_end}
        return pooling is not None and in_step[pooling]


def _read_logprob(numbers: Iterator[float], num_top: int) -> TokenLogprob:
    token, logprob, kept_mass = next(numbers), next(numbers), next(numbers)
    top = tuple((int(next(numbers)), next(numbers)) for _ in range(num_top))
    return TokenLogprob(int(token), logprob, top, kept_mass)


def compute_result(layout: StepLayout, logits_RV: Tensor, hidden_TD: Tensor) -> list[SequenceResult]:
    """Samples, and collects what else was asked for."""
    results = [SequenceResult(work) for work in layout.scheduled]
    sampled_rows: list[int] = []
    reported: list[tuple[SequenceResult, int, int, int]] = []
    row = 0
    for result, rows, samples in zip(results, layout.logit_rows, layout.samples):
        sequence, start = result.work.sequence, result.work.start
        for offset in rows[: len(rows) - samples]:
            target = sequence.tokens[start + offset + 1]
            reported.append((result, row, target, sequence.params.prompt_logprobs or 0))
            row += 1
        sampled_rows += range(row, row + samples)
        row += samples
    _sample(layout, results, logits_RV, sampled_rows)
    if reported:
        of_results, rows, targets, num_top = map(list, zip(*reported))
        for result, logprob in zip(of_results, token_logprobs(logits_RV[rows], targets, num_top)):
            result.prompt_logprobs = [*result.prompt_logprobs, logprob]
    _pool(layout, results, hidden_TD)
    return results


def _sample(layout: StepLayout, results: Sequence[SequenceResult], logits_RV: Tensor, rows: Sequence[int]) -> None:
    if not rows:
        return
    logits = logits_RV if len(rows) == logits_RV.shape[0] else logits_RV[list(rows)]
    inputs = layout.sampled_rows(logits.device)
    drawn: list[int] = sample_tokens(logits, inputs).tolist()
    begin, wanting = 0, []
    for result, samples in zip(results, layout.samples):
        if samples:
            if result.work.sequence.constraint is not None:
                for row in range(begin, begin + samples):
                    drawn[row] = NO_TOKEN if inputs[row].allowed_V is None else drawn[row]
            tokens = accept_drafts(result.work.drafts, drawn[begin : begin + samples])
            result.tokens = tokens[:1] + [token for token in tokens[1:] if token != NO_TOKEN]
            if result.work.sequence.params.logprobs is not None:
                wanting += [(result, begin + number, max(token, 0)) for number, token in enumerate(result.tokens)]
            begin += samples
    if wanting:
        numbers, tokens = [report[1] for report in wanting], [report[2] for report in wanting]
        drawn_rows = [inputs[number] for number in numbers]
        num_top = [row.params.logprobs or 0 for row in drawn_rows]
        logprobs = token_logprobs(logits[numbers], tokens, num_top, drawn_rows)
        for (result, *_), logprob in zip(wanting, logprobs):
            result.logprobs = [*result.logprobs, logprob]


def sampled_row(
    sequence: RunningSequence, drafts: Sequence[int], device: torch.device, *, pending: int = 0
) -> SampledRow:
    """Returns what the draw of the token after some drafts depends on."""
    state = sequence.constraint
    state = state.after(drafts) if state is not None and drafts else state
    allowed = None if state is None else state.allowed_tokens()
    if allowed is not None and sequence.params.allowed_ids is not None:
        ids = list(sequence.params.allowed_ids)
        both = torch.zeros_like(allowed)
        both[ids] = allowed[ids]
        allowed = both if both.any() else None
    mask = None if allowed is None else allowed.to(device)
    tokens = [*sequence.tokens, *drafts] if drafts else sequence.tokens
    return SampledRow(sequence.params, tokens, sequence.num_prompt, mask, pending)


def _pool(layout: StepLayout, results: Sequence[SequenceResult], hidden_TD: Tensor) -> None:
    row = 0
    for number, result in enumerate(results):
        begin, row = row, row + result.work.count
        if layout.pools(number):
            pooling = result.work.sequence.params.pooling
            first = row - 1 if pooling == "last" else begin
            last = begin + 1 if pooling == "first" else row
            result.pooled = hidden_TD[first:last].double().sum(dim=0).tolist()


def exchange_results(
    mesh: ParallelMesh, layouts: Sequence[StepLayout], results: list[SequenceResult] | None
) -> list[list[SequenceResult]]:
    """Returns the results of all replicas on every rank; `results` is None before the last stage."""
    if mesh.pp.size == 1 and mesh.dp.size == 1:  # tensor-parallel ranks have the same logits, so the same result
        assert results is not None
        return [results]
    sizes = [layout.num_values for layout in layouts]
    values = torch.zeros(sum(sizes), dtype=torch.float64)
    begin = sum(sizes[: mesh.dp.rank])
    if results is not None and mesh.tp.rank == 0:
        packed = np.array([number for result in results for number in result.pack()], dtype=np.float64)
        values[begin : begin + sizes[mesh.dp.rank]] = torch.from_numpy(packed)
    # Every value is zero on all ranks but one, so the sum has its bits.
    parts = collectives.all_reduce(values, mesh.control).split(sizes)
    return [layout.unpack(part.tolist()) for layout, part in zip(layouts, parts)]


class PendingDraws:
    """The new ids of a step that is still running, with the log-probabilities of some."""

    def __init__(self, ids: Tensor, logprobs: Tensor | None, reported: Sequence[bool]) -> None:
        self._ids, self._reported = _copy_to_host(ids), reported
        self._logprobs = None if logprobs is None else _copy_to_host(logprobs)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def wait(self) -> list[tuple[int, TokenLogprob | None]]:
        """Returns each new id, with its log-probability if that was asked for."""
        self._copied.synchronize()
        ids: list[int] = self._ids.tolist()
        if self._logprobs is None:
            return [(token, None) for token in ids]
        drawn = zip(ids, self._logprobs.tolist(), self._reported, strict=True)
        return [(token, TokenLogprob(token, value) if reported else None) for token, value, reported in drawn]


def _copy_to_host(values: Tensor) -> Tensor:
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


def draw_ids(ids: Tensor, logits_RV: Tensor, layout: StepLayout, *, pending: int) -> PendingDraws:
    """Draws what is not greedy, into `ids`, and starts to copy them to the host; `pending` tokens before each are not known yet."""
    drawn, params = ids[: len(layout.scheduled)], [work.sequence.params for work in layout.scheduled]
    reported = [param.logprobs is not None for param in params]
    rows: list[SampledRow] = []
    if any(reported) or not all(param.greedy for param in params):
        rows = layout.sampled_rows(ids.device, pending=pending)
    if not all(param.greedy for param in params):
        drawn.copy_(sample_tokens(logits_RV, rows))
    return PendingDraws(drawn, drawn_logprobs(logits_RV, drawn, rows) if any(reported) else None, reported)


def needs_host(row: SampledRow) -> bool:
    """Whether a draw depends on the tokens before it, or more is reported of it than its own log-probability: then the next step waits
    for the host."""
    params = row.params
    reported = params.logprobs is not None and (params.logprobs > 0 or (params.policy_logprobs and row.filters))
    return row.changes_logits or reported or params.constraint is not None or bool(params.min_new_tokens)
