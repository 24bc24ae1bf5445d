"""Speculative decoding: the MTP depths (multi-token prediction) draft the next tokens, and the model verifies the drafts in one step.

After a step the model's hidden states h of the step's positions are known, and so is the token after the last position m. Depth k at
position i takes the hidden state of depth k - 1 there and the token k ahead, and returns h^k (`layers/mtp.py`):

    depth 1 at m    takes h_m    and token m + 1, which was just drawn    and predicts token m + 2: the first draft
    depth 2 at m    takes h^1_m  and the first draft                      and predicts token m + 3: the second draft

If more drafts are wanted than there are depths, the last depth continues alone: at position m + 1 it takes its own hidden state of m in
place of the previous depth's, and the last draft. A depth attends to earlier positions in pages of its own, so the positions of every
step, also of prompts, run through all depths. What a depth computed from a draft is recomputed once the true token is known; for that the
hidden states of a sequence's last positions are kept.

The model's next step computes the last token and the drafts after it as rows of one sequence. Each row samples its token exactly as
without drafts (`infer/sampling.py`: a draw is a function of seed, sample and position); tokens are accepted up to the first draft that
differs from the sampled token. So drafts never change a token, only how many tokens a step yields. Rows of rejected drafts stay in
pages behind the end of the sequence, where nothing attends to them, until they are overwritten. A draft is sampled from the depth's
logits with the random number of its token, so drafts of sampled text are accepted as often as those of greedy text.

In a depth's pages the last position of a page depends on the token after it. A shared prefix may have had another one; its draft may then
be worse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.infer.sampling import sample_tokens
from petatron.infer.scheduler import Scheduler
from petatron.infer.sequence import Sequence as RunningSequence
from petatron.infer.step.packed_step import PackedStep, ScheduledTokens
from petatron.infer.step.run_model_step import ModelSteps
from petatron.infer.step.step_result import StepLayout, sampled_row
from petatron.parallel.parallel_model import ParallelModel


@dataclass(slots=True, eq=False)
class _DraftedSequence:
    """A sequence of the last step that is not finished.

    start: the first position that runs through the depths. count: the number of such positions, those of rejected drafts included, which
    the next step overwrites. rows: the sequence's rows in the step's hidden states. decodes: see `ScheduledTokens`. wanted: the number of
    drafts.
    """

    sequence: RunningSequence
    start: int
    count: int
    rows: slice
    decodes: bool
    wanted: int

    @property
    def last(self) -> int:
        """The row of the sequence's last position."""
        return self.sequence.computed - self.start - 1

    def rows_of_depth(self, depth: int) -> ScheduledTokens:
        """Returns the positions of the step, each with the token or draft `depth` ahead."""
        known = [*self.sequence.tokens, *self.sequence.drafts]
        begin, end = self.start + depth, self.start + self.count + depth
        tokens = [*known[begin:end], *[0] * (end - max(begin, len(known)))]
        return ScheduledTokens(tokens, self.start, self.sequence.pages, self.decodes, is_long=self.sequence.is_long)

    def next_row(self, ahead: int) -> ScheduledTokens:
        """Returns the position `ahead` after the step's last, with the last draft."""
        position = self.sequence.computed - 1 + ahead
        return ScheduledTokens(
            self.sequence.drafts[-1:], position, self.sequence.pages, True, is_long=self.sequence.is_long
        )


class Drafter:
    """Drafts the next tokens of all sequences of a step; every rank computes the same drafts."""

    def __init__(
        self, model: ParallelModel, steps: ModelSteps, pack: Callable[..., PackedStep], *, num_drafts: int
    ) -> None:
        """pack: `pack_rows` for this rank."""
        self._steps, self._pack, self._num_drafts = steps, pack, num_drafts
        self._num_depths = min(num_depths(model), num_drafts)
        self._replica = model.mesh.dp.rank
        self._shares_experts = model.spec.moe is not None

    def draft(
        self, layouts: Sequence[StepLayout], schedulers: Sequence[Scheduler], outputs: tuple[Tensor, Tensor] | None
    ) -> None:
        """Sets the drafts of every sequence after a step; for sequences of other replicas only their number."""
        assert outputs is not None, "the depths are on the only stage"
        replicas = [self._find_sequences(*replica) for replica in zip(layouts, schedulers)]
        if not any(replicas):
            return
        drafted_here = replicas[self._replica]
        hidden_TD = self._gather_inputs(drafted_here, outputs[1])
        least = 1
        if self._shares_experts:  # ranks that share experts need equal numbers of rows
            kept = self._num_depths - 1
            least = max(layout.num_tokens + kept * len(layout.scheduled) for layout in layouts)
        for depth in range(1, self._num_depths + 1):
            drafting = [drafted for drafted in drafted_here if drafted.wanted >= depth]
            rows = [drafted.rows_of_depth(depth) for drafted in drafted_here]
            last = [[drafted.last] if drafted.wanted >= depth else [] for drafted in drafted_here]
            hidden_TD = self._run_depth(depth, self._pack(rows, last, least=least), hidden_TD, drafting)
        self._continue_last_depth(replicas, hidden_TD, max(1, *(len(layout.scheduled) for layout in layouts)))
        for number, replica in enumerate(replicas):
            for drafted in replica if number != self._replica else ():
                drafted.sequence.drafts = [0] * drafted.wanted

    def _find_sequences(self, layout: StepLayout, scheduler: Scheduler) -> list[_DraftedSequence]:
        continued: list[_DraftedSequence] = []
        begin = 0
        for work in layout.scheduled:
            sequence, first = work.sequence, begin
            begin += work.count
            if sequence.completion.finish_reason is not None:
                continue
            sequence.drafts = []
            at_end = len(sequence.tokens) == sequence.computed + 1
            most = sequence.max_length - len(sequence.tokens) - 1
            wanted = scheduler.reserve_drafts(sequence, max(0, min(self._num_drafts, most))) if at_end else 0
            kept = 0 if sequence.draft_inputs is None else sequence.draft_inputs.shape[0]
            rows = slice(first, first + work.count)
            continued.append(
                _DraftedSequence(sequence, work.start - kept, kept + work.count, rows, work.decodes, wanted)
            )
        return sorted(continued, key=lambda drafted: (not drafted.decodes, drafted.start > 0))

    def _gather_inputs(self, drafted_here: Sequence[_DraftedSequence], hidden_TD: Tensor) -> Tensor:
        """Returns the hidden states of all positions that run through the depths; keeps those that the next step runs again."""
        parts = [hidden_TD[:0]]
        for drafted in drafted_here:
            sequence, rows_RD = drafted.sequence, hidden_TD[drafted.rows]
            if sequence.draft_inputs is not None:
                rows_RD = torch.cat((sequence.draft_inputs, rows_RD))
            if self._num_depths > 1:
                sequence.draft_inputs = rows_RD[: drafted.last + 1][1 - self._num_depths :].clone()
            parts.append(rows_RD)
        return torch.cat(parts)

    def _continue_last_depth(
        self, replicas: Sequence[Sequence[_DraftedSequence]], hidden_TD: Tensor, most_sequences: int
    ) -> None:
        drafted_here = replicas[self._replica]
        counts = torch.tensor([drafted.count for drafted in drafted_here], dtype=torch.int64)
        last_N = counts.cumsum(0) - counts + torch.tensor([drafted.last for drafted in drafted_here], dtype=torch.int64)
        last_ND = hidden_TD[last_N.to(hidden_TD.device)]
        numbers = list(range(len(drafted_here)))
        most_wanted = max(drafted.wanted for replica in replicas for drafted in replica)
        for ahead in range(1, most_wanted - self._num_depths + 1):
            kept = [at for at, number in enumerate(numbers) if drafted_here[number].wanted >= self._num_depths + ahead]
            numbers = [numbers[at] for at in kept]
            drafting = [drafted_here[number] for number in numbers]
            rows = [drafted.next_row(ahead) for drafted in drafting]
            packed = self._pack(rows, [[0]] * len(rows), least=most_sequences if self._shares_experts else 1)
            last_ND = self._run_depth(self._num_depths, packed, last_ND[kept], drafting)

    def _run_depth(
        self, depth: int, packed: PackedStep, hidden_TD: Tensor, drafting: Sequence[_DraftedSequence]
    ) -> Tensor:
        """Runs a depth, appends a draft to each sequence of `drafting`, and returns the depth's hidden states."""
        padding = packed.rows_3T.shape[1] - hidden_TD.shape[0]
        logits_RV, depth_TD = self._steps.run_depth(depth, packed, F.pad(hidden_TD, (0, 0, 0, padding)))
        inputs = [sampled_row(drafted.sequence, drafted.sequence.drafts, logits_RV.device) for drafted in drafting]
        if inputs:
            for drafted, token in zip(drafting, sample_tokens(logits_RV, inputs).tolist(), strict=True):
                drafted.sequence.drafts.append(token)
        return depth_TD[: hidden_TD.shape[0]]


def num_depths(model: ParallelModel) -> int:
    """Returns the depths of multi-token prediction of a model."""
    return model.spec.config.mtp_num_layers or 0
