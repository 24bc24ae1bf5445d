"""Decode steps on a CPU, recorded for each shape of batch and repeated (`recorded_tensor_ops.py`).

The shape is the number of sequences and the pages of the longest, rounded up, so that a recording serves for dozens of steps. It costs as
much as a few steps that are not recorded, so a shape is recorded when it has occurred a few times; and a recording gathers what the
sequences have in pages, so sequences with many tokens, whose attention takes longer than any call, are not recorded. It is made of a
step of padding, and then repeated for the sequences: a recurrent state takes in a token once, also where a recording fails.

Depths of multi-token prediction are recorded in the same way. They read hidden states beside ids and positions, which are copied to where
recordings read them.

N sequences, P pages.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from petatron.base.log import get_logger
from petatron.infer.kv_cache_pages import SCRATCH_PAGE, SCRATCH_SLOT
from petatron.infer.step.packed_step import CacheLocations, StepInputs, StepOutputs
from petatron.infer.step.recorded_tensor_ops import RecordedCalls, Unrecordable
from petatron.kernels.attention.paged_attention import PagedBatch

_log = get_logger(__name__)
_FIRST_STEPS = 3
"""So many steps of a shape run before it is recorded."""
_MAX_RECORDINGS = 16
_MAX_GATHERED_TOKENS = 4096
_MIN_PAGES = 2


@dataclass(frozen=True, slots=True)
class StepShape:
    """The shape of a decode step: sequences, and pages that each may have."""

    sequences: int
    pages: int


def padded_pages(pages: int) -> int:
    """Returns the pages of the shape for a longest sequence of so many: some at least, and then up to eight numbers an octave.

    >>> [padded_pages(pages) for pages in (1, 5, 16, 17, 33, 100)]
    [2, 6, 16, 18, 36, 104]
    """
    step = max(_MIN_PAGES, (1 << (pages - 1).bit_length()) // 16)
    return -(-pages // step) * step


@dataclass(frozen=True, slots=True, eq=False)
class _RecordedStep:
    """The tensors that a recording reads (ids, positions and page rows; lengths; state slots; page tables), and its calls."""

    rows_3N: Tensor
    lengths_N: Tensor
    state_slots_N: Tensor
    table_NP: Tensor
    calls: RecordedCalls

    def repeat(self, rows: np.ndarray, lengths: list[int], sequences: CacheLocations) -> StepOutputs:
        self.rows_3N.numpy()[:] = rows
        self.lengths_N.numpy()[:] = lengths
        self.state_slots_N.numpy()[:] = sequences.state_slots
        table = self.table_NP.numpy()
        table[:] = SCRATCH_PAGE
        for row, pages in zip(table, sequences.page_lists, strict=True):
            row[: len(pages)] = pages
        return self.calls.repeat()


class RecordedSteps:
    """Runs decode steps of one stage that is the whole model. page_size: 0 where no layer has pages."""

    def __init__(self, run: Callable[[StepInputs], StepOutputs], *, page_size: int) -> None:
        self._run, self._page_size = run, page_size
        self._seen: Counter[StepShape] = Counter()
        self._recorded: OrderedDict[StepShape, _RecordedStep] = OrderedDict()
        self._recordable = True

    def run(self, rows: np.ndarray, lengths: list[int], sequences: CacheLocations) -> StepOutputs | None:
        """Runs a step of ids, positions and page rows; None if its shape is not recorded. The outputs are valid until the next step."""
        shape = StepShape(len(lengths), padded_pages(max(map(len, sequences.page_lists))))
        if not self._recordable or shape.sequences * shape.pages * self._page_size > _MAX_GATHERED_TOKENS:
            return None
        step = self._recorded.get(shape)
        if step is not None:
            self._recorded.move_to_end(shape)
            return step.repeat(rows, lengths, sequences)
        self._seen[shape] += 1
        if self._seen[shape] <= _FIRST_STEPS:
            return None
        try:
            step = self._recorded[shape] = self._record(shape)
        except Unrecordable as error:
            _log.debug("decode steps are not recorded: %s", error)
            self._recordable = False
            return None
        if len(self._recorded) > _MAX_RECORDINGS:
            forgotten, _ = self._recorded.popitem(last=False)
            del self._seen[forgotten]
        return step.repeat(rows, lengths, sequences)

    def forget(self) -> None:
        """Forgets all recordings; shapes are recorded again after a few steps."""
        self._seen.clear()
        self._recorded.clear()

    @torch.inference_mode(False)  # tensors made in it would hide what operations are made of
    def _record(self, shape: StepShape) -> _RecordedStep:
        rows_3N = torch.zeros((3, shape.sequences), dtype=torch.int64)  # page row 0 is in the scratch page
        lengths_N = torch.ones(shape.sequences, dtype=torch.int32)
        state_slots_N = torch.full((shape.sequences,), SCRATCH_SLOT, dtype=torch.int64)
        table_NP = torch.full((shape.sequences, shape.pages), SCRATCH_PAGE, dtype=torch.int32)
        tokens, positions, page_rows = rows_3N
        wanted = torch.arange(shape.sequences)
        most = shape.pages * self._page_size

        def step() -> StepOutputs:
            batch = PagedBatch(page_rows, table_NP, lengths_N, most, shape.sequences, state_slots_N=state_slots_N)
            return self._run((tokens, positions, batch, wanted))

        return _RecordedStep(rows_3N, lengths_N, state_slots_N, table_NP, RecordedCalls(step))


RunDepth = Callable[[int, StepInputs, Tensor], StepOutputs]
"""Runs a depth on the inputs of a step and hidden states."""


class RecordedDepths:
    """The recordings of every depth, which read hidden states from `hidden_TD`, of as many rows at most."""

    def __init__(self, run: RunDepth, hidden_TD: Tensor, *, page_size: int) -> None:
        self._run, self._page_size, self._hidden_TD = run, page_size, hidden_TD
        self._recorded: dict[int, RecordedSteps] = {}

    def run(
        self, depth: int, rows_3T: np.ndarray, lengths: list[int], sequences: CacheLocations, hidden_TD: Tensor
    ) -> StepOutputs | None:
        """Returns logits and hidden states of all rows, valid until the next run; None if nothing is recorded for such rows."""
        if hidden_TD.shape[0] > self._hidden_TD.shape[0]:
            return None
        if depth not in self._recorded:
            self._recorded[depth] = RecordedSteps(partial(self._run_depth, depth), page_size=self._page_size)
        self._hidden_TD[: hidden_TD.shape[0]].copy_(hidden_TD)
        return self._recorded[depth].run(rows_3T, lengths, sequences)

    def forget(self) -> None:
        """Forgets all recordings."""
        self._recorded.clear()

    def _run_depth(self, depth: int, inputs: StepInputs) -> StepOutputs:
        return self._run(depth, inputs, self._hidden_TD[: inputs[0].shape[0]])
