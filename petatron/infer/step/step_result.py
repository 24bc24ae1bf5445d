"""What one step finds out of each sequence: a sampled token, log-probabilities, a pooled vector; and the same as numbers.

Ranks of the last stage compute it from logits. All ranks know beforehand how many numbers it is (`StepLayout`), so it is exchanged as
one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from petatron.infer.completion import TokenLogprob
from petatron.infer.sampling import SampledRow, sample_tokens, token_logprobs
from petatron.infer.scheduler import ScheduledSequence
from petatron.infer.sequence import Sequence as RunningSequence

NO_TOKEN = -1
"""In place of a token, where the constraint of a sequence allows none."""


@dataclass(slots=True, eq=False)
class SequenceResult:
    """Of one sequence. token: None if none was asked for. pooled: the sum of hidden states of the step's tokens, or the last one's."""

    work: ScheduledSequence
    token: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: Sequence[TokenLogprob] = ()
    pooled: list[float] | None = None

    def pack(self) -> Iterator[float]:
        if self.token is not None:
            yield self.token
        for logprob in (*([self.logprob] if self.logprob is not None else []), *self.prompt_logprobs):
            yield from (logprob.token, logprob.logprob, *(number for pair in logprob.top for number in pair))
        yield from self.pooled or ()


@dataclass(frozen=True, slots=True, eq=False)
class StepLayout:
    """A replica's step: the scheduled sequences, and for each the rows whose logits are needed, counted from its first.

    The last of a sequence's rows is sampled if `samples` says so; those before have prompt tokens as targets.
    """

    scheduled: Sequence[ScheduledSequence]
    logit_rows: list[list[int]]
    samples: list[bool]
    hidden_size: int

    @classmethod
    def of(cls, scheduled: Sequence[ScheduledSequence], *, hidden_size: int) -> StepLayout:
        rows, samples = [], []
        for work in scheduled:
            params = work.sequence.params
            last_target = work.sequence.num_prompt - 1
            reported = (
                range(work.start, min(work.start + work.count, last_target))
                if params.prompt_logprobs is not None
                else ()
            )
            sampled = work.reaches_end and params.max_new_tokens > 0 and params.pooling is None
            rows.append([position - work.start for position in reported] + [work.count - 1] * sampled)
            samples.append(sampled)
        return cls(scheduled, rows, samples, hidden_size)

    def sampled_rows(self, device: torch.device, *, pending: int = 0) -> list[SampledRow]:
        """Returns what the draws depend on; `pending` tokens before each are not known yet."""
        return [
            _sampled_row(work.sequence, device, pending)
            for work, samples in zip(self.scheduled, self.samples)
            if samples
        ]

    @property
    def num_tokens(self) -> int:
        return sum(work.count for work in self.scheduled)

    @property
    def num_values(self) -> int:
        return sum(self._sizes(number)[0] for number in range(len(self.scheduled)))

    def unpack(self, values: Sequence[float]) -> list[SequenceResult]:
        """Returns the results that `SequenceResult.pack` made numbers of."""
        results, position = [], 0
        for number, work in enumerate(self.scheduled):
            size, num_top, prompt_top = self._sizes(number)
            own, position = list(values[position : position + size]), position + size
            result = SequenceResult(work)
            if self.samples[number]:
                result.token = int(own.pop(0))
                if num_top is not None:
                    result.logprob, own = _read_logprob(own, num_top)
            prompt_logprobs = []
            for _ in range(len(self.logit_rows[number]) - self.samples[number]):
                logprob, own = _read_logprob(own, prompt_top or 0)
                prompt_logprobs.append(logprob)
            result.prompt_logprobs = prompt_logprobs
            result.pooled = own or None
            results.append(result)
        return results

    def _sizes(self, number: int) -> tuple[int, int | None, int | None]:
        """Returns how many numbers a sequence has, and how many alternatives each new and prompt token."""
        params, sampled = self.scheduled[number].sequence.params, self.samples[number]
        size = 0
        if sampled:
            size = 1 + (0 if params.logprobs is None else 2 + 2 * params.logprobs)
        reported = len(self.logit_rows[number]) - sampled
        if reported:
            assert params.prompt_logprobs is not None
            size += reported * (2 + 2 * params.prompt_logprobs)
        if self.pools(number):
            size += self.hidden_size
        return size, params.logprobs, params.prompt_logprobs

    def pools(self, number: int) -> bool:
        work = self.scheduled[number]
        pooling = work.sequence.params.pooling
        return pooling == "mean" or (pooling == "last" and work.reaches_end)


def _read_logprob(values: list[float], num_top: int) -> tuple[TokenLogprob, list[float]]:
    token, logprob, *rest = values[: 2 + 2 * num_top]
    top = tuple((int(rest[at]), rest[at + 1]) for at in range(0, len(rest), 2))
    return TokenLogprob(int(token), logprob, top), values[2 + 2 * num_top :]


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
        if samples:
            sampled_rows.append(row)
            row += 1
    _sample(layout, results, logits_RV, sampled_rows)
    if reported:
        found = token_logprobs(
            logits_RV[[each[1] for each in reported]], [each[2] for each in reported], [each[3] for each in reported]
        )
        for (result, *_), logprob in zip(reported, found):
            result.prompt_logprobs = [*result.prompt_logprobs, logprob]
    _pool(layout, results, hidden_TD)
    return results


def _sample(layout: StepLayout, results: Sequence[SequenceResult], logits_RV: Tensor, rows: Sequence[int]) -> None:
    if not rows:
        return
    logits = logits_RV if len(rows) == logits_RV.shape[0] else logits_RV[list(rows)]
    chosen = [result for result, samples in zip(results, layout.samples) if samples]
    inputs = layout.sampled_rows(logits.device)
    for result, row, token in zip(chosen, inputs, sample_tokens(logits, inputs).tolist()):
        stuck = result.work.sequence.constraint is not None and row.allowed_V is None
        result.token = NO_TOKEN if stuck else token
    wanting = [number for number, each in enumerate(inputs) if each.params.logprobs is not None]
    if wanting:
        tokens = [max(chosen[number].token or 0, 0) for number in wanting]
        found = token_logprobs(logits[wanting], tokens, [inputs[number].params.logprobs or 0 for number in wanting])
        for number, logprob in zip(wanting, found):
            chosen[number].logprob = logprob


def _sampled_row(sequence: RunningSequence, device: torch.device, pending: int) -> SampledRow:
    allowed = None if sequence.constraint is None else sequence.constraint.allowed_tokens()
    mask = None if allowed is None else allowed.to(device)
    return SampledRow(sequence.params, sequence.tokens, sequence.num_prompt, mask, pending)


def _pool(layout: StepLayout, results: Sequence[SequenceResult], hidden_TD: Tensor) -> None:
    row = 0
    for number, result in enumerate(results):
        begin, row = row, row + result.work.count
        if layout.pools(number):
            mean = result.work.sequence.params.pooling == "mean"
            pooled = hidden_TD[begin:row].double().sum(dim=0) if mean else hidden_TD[row - 1].double()
            result.pooled = pooled.tolist()
