"""Depths of multi-token prediction on a CPU, recorded and repeated as decode steps are (`recorded_steps.py`).

A depth reads hidden states beside ids and positions; they are copied to where its recordings read them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from petatron.infer.step.packed_step import CacheLocations, StepInputs, StepOutputs
from petatron.infer.step.recorded_steps import RecordedSteps

RunDepth = Callable[[int, StepInputs, Tensor], StepOutputs]
"""Runs a depth on the inputs of a step and hidden states."""


class RecordedDepths:
    """The recordings of every depth, of up to `most_rows` rows."""

    def __init__(self, run: RunDepth, *, most_rows: int, width: int, dtype: torch.dtype, page_size: int) -> None:
        self._run, self._page_size = run, page_size
        self._hidden_TD = torch.zeros((most_rows, width), dtype=dtype)
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
