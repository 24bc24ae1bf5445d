"""New ids on their way from the device to the host, while the next step runs."""

from __future__ import annotations

import torch
from torch import Tensor

from petatron.infer.sampling import SampledRow, sample_tokens
from petatron.infer.step.step_result import StepLayout


class PendingIds:
    """The new ids of a step; `wait` returns them."""

    def __init__(self, ids: Tensor) -> None:
        self._host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
        self._host.copy_(ids, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def wait(self) -> list[int]:
        self._copied.synchronize()
        return self._host.tolist()


def draw_ids(ids: Tensor, logits_RV: Tensor, layout: StepLayout, *, pending: int) -> PendingIds:
    """Draws what is not greedy, into `ids`, and starts to copy them to the host; `pending` tokens before each are not known yet."""
    count = len(layout.scheduled)
    if not all(work.sequence.params.greedy for work in layout.scheduled):
        ids[:count] = sample_tokens(logits_RV, layout.sampled_rows(ids.device, pending=pending))
    return PendingIds(ids[:count])


def needs_host(row: SampledRow) -> bool:
    """Whether a draw depends on the tokens before it, or is reported on: then the next step waits for the host."""
    params = row.params
    reported = params.logprobs is not None or params.constraint is not None
    return row.changes_logits or reported or bool(params.min_new_tokens)
