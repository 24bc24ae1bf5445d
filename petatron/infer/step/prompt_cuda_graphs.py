"""Steps with chunks of prompts as CUDA graphs, beside rows that decode: for steps so small that the host launches slower than the GPU runs.

A graph has rows that decode and rows of prompts, both padded to the next of a few sizes. How the rows of prompts belong to chunks is read
on the device (`ChunkBounds`), so one graph serves one long chunk and many short ones, prompts that begin and prompts that go on.

    rows      decode 0 | ... | padding | chunk 0 | chunk 1 | ... | padding

All integers of a step are one tensor, copied in one transfer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from petatron.infer.engine_options import EngineOptions
from petatron.infer.kv_cache_pages import SCRATCH_PAGE
from petatron.infer.step.cuda_graph_capture import CapturedStep, GraphCapture, GraphSizes
from petatron.infer.step.packed_step import PackedStep, RunStep, StepInputs, StepOutputs
from petatron.kernels.attention.paged_attention import ChunkBounds, PagedBatch

MAX_PROMPT_ROWS = 2048
"""Of a graph: with more, kernels take longer than the host, and attention by flash kernels is faster."""
MAX_LENGTH = 8192
"""Of a sequence with a chunk in a graph, for the same reason."""
_FIRST_STEPS = 2
"""So many steps of a shape run before it is captured: a single prompt is answered sooner without."""


class GraphShape(NamedTuple):
    """Rows of a graph: those that decode, and those of prompts."""

    decodes: int
    prompt_rows: int


def decode_sizes(most: int) -> list[int]:
    """Returns the numbers of decode rows of graphs, few of them: beside prompts rows of padding cost little.

    >>> decode_sizes(64), decode_sizes(3), decode_sizes(300)
    ([0, 64], [0, 3], [0, 64, 256, 300])
    """
    sizes, size = [0], 64
    while size < most:
        sizes.append(size)
        size *= 4
    return [*sizes, most]


def prompt_sizes(most: int) -> list[int]:
    """Returns the numbers of prompt rows of graphs: two an octave where rows take time.

    >>> prompt_sizes(2048)
    [32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048]
    >>> prompt_sizes(100)
    [32, 64, 104]
    """
    sizes, size = [32, 64, 128], 256
    while size < most:
        sizes += [size, size + size // 2]
        size *= 2
    return [*(candidate for candidate in sizes if candidate < most), -(-most // 8) * 8]


class PromptInputs:
    """The integers of a step of one shape in one tensor, and the parts of it by name, as tensors of its device.

    N sequences may be in a step: so many rows have logits, and there are so many chunks, with none or some rows each.
    """

    def __init__(
        self, shape: GraphShape, *, most: int, pages: int, flat: Tensor | None = None, pinned: bool = False
    ) -> None:
        self.shape = shape
        self._most, self._pages = most, pages
        self._sizes = (3 * sum(shape), most, shape.decodes, most + 1, most, (shape.decodes + most) * pages)
        self.flat = torch.zeros(sum(self._sizes), dtype=torch.int32, pin_memory=pinned) if flat is None else flat
        rows, self.logit_rows, self.lengths, self.starts, self.contexts, table = self.flat.split(self._sizes)
        self.rows_3T, self.table_NP = rows.view(3, -1), table.view(-1, pages)

    def copy(self, device: torch.device, *, pinned: bool = False) -> PromptInputs:
        flat = self.flat.pin_memory() if pinned else self.flat.to(device, copy=True)
        return PromptInputs(self.shape, most=self._most, pages=self._pages, flat=flat)

    def fill(self, packed: PackedStep) -> None:
        """Writes a step of this shape at most."""
        decodes, chunks = packed.num_decodes, packed.chunks
        used = chunks[-1].stop
        first, rows_3T = self.shape.decodes, self.rows_3T.numpy()
        rows_3T[:] = np.array([[0], [0], [SCRATCH_PAGE]])  # the first row of that page
        rows_3T[:, :decodes] = packed.rows_3T[:, :decodes]
        rows_3T[:, first : first + used - decodes] = packed.rows_3T[:, decodes:used]
        wanted = np.array(packed.logit_rows, dtype=np.int32)
        logit_rows = self.logit_rows.numpy()
        logit_rows[:] = 0
        logit_rows[: len(wanted)] = np.where(wanted < decodes, wanted, wanted - decodes + first)
        lengths, starts, contexts, table = (
            x.numpy() for x in (self.lengths, self.starts, self.contexts, self.table_NP)
        )
        lengths[:] = 1
        lengths[:decodes] = packed.lengths[:decodes]
        starts[:] = used - decodes
        starts[: len(chunks)] = [chunk.start - decodes for chunk in chunks]
        contexts[:] = 0
        contexts[: len(chunks)] = [chunk.context for chunk in chunks]
        table[:, 0] = SCRATCH_PAGE
        for row, pages in enumerate(packed.sequences.page_lists):
            table[row if row < decodes else row - decodes + first, : len(pages)] = pages

    def step_inputs(self, *, max_length: int) -> StepInputs:
        tokens, positions, page_rows = self.rows_3T
        batch = PagedBatch(
            page_rows,
            self.table_NP,
            self.lengths,
            max_length,
            self.shape.decodes,
            chunk_bounds=ChunkBounds(self.starts, self.contexts),
        )
        return tokens, positions, batch, self.logit_rows


class PromptGraphs:
    """Runs steps with prompts of up to `max_sequences` sequences of up to `max_length` tokens."""

    def __init__(self, run: RunStep, capture: GraphCapture, options: EngineOptions, sizes: GraphSizes) -> None:
        self._run, self._capture, self._device = run, capture, capture.device
        self._most, self._max_length, self._pages = options.max_sequences, sizes.max_length, sizes.num_pages(options)
        decodes, rows = decode_sizes(self._most), prompt_sizes(min(options.max_step_tokens, MAX_PROMPT_ROWS))
        self._decode_sizes, self._prompt_sizes = map(sizes.rounded, (decodes, rows))
        self._seen: Counter[GraphShape] = Counter()
        self._captured: dict[GraphShape, CapturedStep[PromptInputs]] = {}

    def shape_of(self, packed: PackedStep) -> GraphShape | None:
        """Returns the shape of the graph that a step fits into; None if there is none."""
        if not packed.chunks or packed.shares_pages or len(packed.logit_rows) > self._most:
            return None
        if max(packed.lengths[packed.num_decodes :]) > MAX_LENGTH:
            return None
        rows = packed.chunks[-1].stop - packed.num_decodes
        prompt_rows = next((size for size in self._prompt_sizes if size >= rows), None)
        decodes = next((size for size in self._decode_sizes if size >= packed.num_decodes), None)
        return None if prompt_rows is None or decodes is None else GraphShape(decodes, prompt_rows)

    def run(self, packed: PackedStep) -> StepOutputs | None:
        """Starts a step; None if it is not a graph. The outputs are valid until the next step."""
        shape = self.shape_of(packed)
        if shape is None:
            return None
        step = self._captured.get(shape)
        if step is None:
            self._seen[shape] += 1
            if self._seen[shape] <= _FIRST_STEPS:
                return None
            step = self._capture_shape(shape)
        host = step.next_host()
        host.fill(packed)
        step.device.copy_(host.flat, non_blocking=True)
        step.graph.replay()
        logits, hidden = step.outputs
        decodes, end = packed.num_decodes, shape.decodes + packed.chunks[-1].stop - packed.num_decodes
        prompt_rows = hidden[shape.decodes : end]
        return logits[: len(packed.logit_rows)], torch.cat((hidden[:decodes], prompt_rows)) if decodes else prompt_rows

    @property
    def shapes(self) -> list[GraphShape]:
        """All shapes of graphs, the largest first."""
        rows = reversed(self._prompt_sizes)
        return [GraphShape(decodes, prompts) for prompts in rows for decodes in reversed(self._decode_sizes)]

    def capture_all(self) -> Iterator[GraphShape]:
        """Captures the steps of all shapes, which otherwise happens when each has occurred a few times; yields each."""
        for shape in self.shapes:
            if shape not in self._captured:
                self._capture_shape(shape)
            yield shape

    def release(self) -> None:
        """Frees the captured graphs."""
        self._capture.free(step.graph for step in self._captured.values())
        self._captured.clear()

    def _capture_shape(self, shape: GraphShape) -> CapturedStep[PromptInputs]:
        host = PromptInputs(shape, most=self._most, pages=self._pages, pinned=self._device.type == "cuda")
        host.lengths[:] = 1  # padding that decodes sees itself
        inputs = host.copy(self._device)
        graph, outputs = self._capture.capture(lambda: self._run(inputs.step_inputs(max_length=self._max_length)))
        other = host.copy(host.flat.device, pinned=self._device.type == "cuda")
        self._captured[shape] = CapturedStep((host, other), inputs.flat, graph, outputs)
        return self._captured[shape]
