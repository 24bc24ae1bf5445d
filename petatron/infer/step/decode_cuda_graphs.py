"""Decode steps as CUDA graphs: one per batch size, captured when it first occurs, replayed from then on.

A decode step of a small batch is hundreds of kernels of a few microseconds, more than a host can launch in time. Batches are padded to
the next captured size; padding is stored in the scratch page, and its states in the scratch slot. What changes from step to step (ids,
positions, page rows, lengths, state slots and page tables) is one tensor of integers, copied in one transfer.

The most likely ids stay on the device, and the next step may take its inputs from there: it is started before the host has seen them, and
the host's work of one step overlaps the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from petatron.infer.engine_options import EngineOptions
from petatron.infer.kv_cache_pages import SCRATCH_PAGE, SCRATCH_SLOT
from petatron.infer.step.cuda_graph_capture import CapturedStep, GraphCapture, GraphSizes
from petatron.infer.step.packed_step import CacheLocations, RunStep, StepOutputs
from petatron.kernels.attention.paged_attention import PagedBatch
from petatron.kernels.logits_argmax import LogitsArgmaxKernels
from petatron.kernels.registry import KernelContext, choose_kernel

IntRow = Sequence[int] | np.ndarray

_NUM_COLUMNS = 6
"""Ids, rows of the step before whose new ids to take instead (-1: none), positions, page rows, lengths, state slots; after them the
page table."""
_LENGTHS = 4
_PADDING = np.array([[0], [-1], [0], [SCRATCH_PAGE], [1], [SCRATCH_SLOT]], dtype=np.int32)
"""The columns of a row without a sequence, whose first page is the scratch page."""


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
    below = [size for size in sizes if size < most]
    return sorted({-(-size // multiple) * multiple for size in (*below, most)})


class _HostInputs:
    """The integers of a step in pinned memory. The page table stays from step to step, and is changed where pages were added."""

    def __init__(self, size: int, pages: int, *, pinned: bool) -> None:
        self.tensor = torch.zeros((_NUM_COLUMNS + pages, size), dtype=torch.int32, pin_memory=pinned)
        self.tensor[1], self.tensor[_LENGTHS] = -1, 1
        self._columns = self.tensor.numpy()[:_NUM_COLUMNS]
        self._table = self.tensor.numpy()[_NUM_COLUMNS:].reshape(size, -1)
        self._held: list[tuple[Sequence[int], int]] = []

    def fill(
        self, ids: IntRow, sources: IntRow, positions: np.ndarray, sequences: CacheLocations, page_size: int
    ) -> None:
        count, columns = len(sequences.page_lists), self._columns
        self._fill_table(sequences.page_lists)
        at = np.where(positions < 0, ~positions, positions)  # as packed rows have them
        pages = self._table[np.arange(count), at // page_size]
        page_rows = pages * page_size + at % page_size
        for column, values in zip(columns, (ids, sources, positions, page_rows, at + 1, sequences.state_slots)):
            column[:count] = values
        columns[:, count:] = _PADDING

    def _fill_table(self, page_lists: Sequence[list[int]]) -> None:
        """A list of pages grows at its end, or is another list."""
        held, table = self._held, self._table
        for row in range(len(page_lists), len(held)):
            table[row, 0] = SCRATCH_PAGE
        del held[len(page_lists) :]
        held += [((), 0)] * (len(page_lists) - len(held))
        for row, pages in enumerate(page_lists):
            before, known = held[row]
            if before is not pages:
                known = 0
            if known != len(pages):
                table[row, known : len(pages)] = pages[known:]
                held[row] = pages, len(pages)


class DecodeGraphs:
    """Runs decode steps of up to `max_sequences` sequences of up to `max_length` tokens, each with its drafts."""

    def __init__(
        self, run: RunStep, capture: GraphCapture, dtype: torch.dtype, options: EngineOptions, sizes: GraphSizes
    ) -> None:
        self._run, self._graph_capture, self._device = run, capture, capture.device
        self._shares_pages = options.speculative_tokens > 0  # several rows are tokens of one sequence
        self._page_size, self._max_length, self._pages = options.page_size, sizes.max_length, sizes.num_pages(options)
        self.sizes = captured_sizes(options.max_sequences * (1 + options.speculative_tokens), sizes.multiple)
        """The batch sizes of graphs."""
        context = KernelContext.of(self._device, dtype, allow_compile=False)
        self._kernels: LogitsArgmaxKernels = choose_kernel("most likely id", context).functions
        self._captured: dict[int, CapturedStep[_HostInputs]] = {}
        self.ids = torch.zeros(self.sizes[-1], dtype=torch.int32, device=self._device)
        """The new ids of the last step: the most likely ones, unless others were drawn and written here."""

    def run(
        self, ids: IntRow, positions: np.ndarray, sequences: CacheLocations, sources: IntRow | None = None
    ) -> StepOutputs:
        """Starts a step of one token of each sequence; the outputs are valid until the next step.

        `sources`: rows of the step before, whose new ids are the tokens of this one.
        """
        count = len(sequences.page_lists)
        size = next(captured for captured in self.sizes if captured >= count)
        step = self._captured.get(size) or self._capture(size)
        host = step.next_host()
        host.fill(ids, [-1] * count if sources is None else sources, positions, sequences, self._page_size)
        step.device.copy_(host.tensor, non_blocking=True)
        step.graph.replay()
        logits, hidden = step.outputs
        return logits[:count], hidden[:count]

    def capture_all(self) -> Iterator[int]:
        """Captures the steps of all batch sizes, which otherwise happens when each first occurs; yields each."""
        for size in reversed(self.sizes):
            if size not in self._captured:
                self._capture(size)
            yield size

    def release(self) -> None:
        """Frees the captured graphs."""
        self._graph_capture.free(step.graph for step in self._captured.values())
        self._captured.clear()

    def _capture(self, size: int) -> CapturedStep[_HostInputs]:
        hosts = (_HostInputs(size, self._pages, pinned=True), _HostInputs(size, self._pages, pinned=True))
        inputs = hosts[0].tensor.to(self._device)
        ids = self.ids.clone()  # the step before may have left them for this one, and warm-up steps write theirs

        def restore_ids() -> None:
            self.ids.copy_(ids)

        graph, outputs = self._graph_capture.capture(lambda: self._step(inputs, size), after_warm_up=restore_ids)
        self._captured[size] = CapturedStep(hosts, inputs, graph, outputs)
        return self._captured[size]

    def _step(self, inputs: Tensor, size: int) -> StepOutputs:
        typed, sources, positions, page_rows, lengths, state_slots = inputs[:_NUM_COLUMNS]
        tokens = torch.where(sources < 0, typed, self.ids[sources.clamp(min=0).long()])
        table = inputs[_NUM_COLUMNS:].view(size, -1)
        kind = {"shares_pages": self._shares_pages, "state_slots_N": state_slots}
        batch = PagedBatch(page_rows, table, lengths, self._max_length, size, **kind)
        logits, hidden = self._run((tokens, positions, batch, torch.arange(size, device=self._device)))
        self.ids[:size] = self._kernels.most_likely(logits)
        return logits, hidden
