"""Decode steps as CUDA graphs: one per batch size, captured when it first occurs, replayed from then on.

A decode step of a small batch is hundreds of kernels of a few microseconds, more than a host can launch in time. Batches are padded to
the next captured size; padding is stored in the scratch page. What changes from step to step (ids, positions, slots, lengths and page
tables) is one tensor of integers, copied in one transfer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from petatron.kernels.attention.paged import PagedBatch

StepInputs = tuple[Tensor, Tensor, PagedBatch, Tensor]
"""Ids, positions, where they are stored, and the rows whose logits are wanted."""
StepOutputs = tuple[Tensor, Tensor]

_WARM_UP_STEPS = 2
_NUM_COLUMNS = 4
"""Ids, positions, slots, lengths; after them the page table."""


def captured_sizes(most: int, multiple: int) -> list[int]:
    """Returns the batch sizes that are captured: few enough to be captured, close enough to waste little.

    >>> captured_sizes(64, 1)
    [1, 2, 4, 8, 12, 16, 24, 32, 48, 64]
    >>> captured_sizes(5, 4)
    [4, 8]
    """
    sizes = {1, 2, 4}
    size = 8
    while size < most:
        sizes |= {size, size + size // 2}
        size *= 2
    rounded = {-(-each // multiple) * multiple for each in (*(each for each in sizes if each < most), most)}
    return sorted(rounded)


@dataclass(frozen=True, slots=True, eq=False)
class _CapturedStep:
    host: Tensor
    device: Tensor
    graph: torch.cuda.CUDAGraph
    outputs: StepOutputs


class DecodeGraphs:
    """Runs decode steps of up to `most` sequences of up to `pages` pages."""

    def __init__(
        self,
        run: Callable[[StepInputs], StepOutputs],
        device: torch.device,
        *,
        most: int,
        multiple: int,
        pages: int,
        max_length: int,
    ) -> None:
        self._run, self._device, self._pages, self._max_length = run, device, pages, max_length
        self._sizes = captured_sizes(most, multiple)
        self._captured: dict[int, _CapturedStep] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def run(self, columns: np.ndarray, page_tables: list[list[int]]) -> StepOutputs:
        """Runs a step of [ids, positions, slots, lengths] x sequences; the outputs are valid until the next step."""
        count = columns.shape[1]
        size = next(each for each in self._sizes if each >= count)
        if size not in self._captured:
            self._captured[size] = self._capture(size)
        step = self._captured[size]
        host = step.host.numpy()
        host[:] = 0
        host[:_NUM_COLUMNS, :count] = columns
        host[_NUM_COLUMNS - 1, count:] = 1
        table = host[_NUM_COLUMNS:].reshape(size, -1)
        for row, pages in zip(table, page_tables):
            row[: len(pages)] = pages
        step.device.copy_(step.host, non_blocking=True)
        step.graph.replay()
        logits, hidden = step.outputs
        return logits[:count], hidden[:count]

    def _capture(self, size: int) -> _CapturedStep:
        host = torch.zeros((_NUM_COLUMNS + self._pages, size), dtype=torch.int32, pin_memory=True)
        host[_NUM_COLUMNS - 1] = 1
        inputs = host.to(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UP_STEPS):
                self._run(self._views(inputs, size))
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = self._run(self._views(inputs, size))
        return _CapturedStep(host, inputs, graph, outputs)

    def _views(self, inputs: Tensor, size: int) -> StepInputs:
        tokens, positions, slots, lengths = inputs[:_NUM_COLUMNS]
        table = inputs[_NUM_COLUMNS:].view(size, -1)
        batch = PagedBatch(slots, table, lengths, self._max_length, size)
        return tokens, positions, batch, torch.arange(size, device=self._device)
