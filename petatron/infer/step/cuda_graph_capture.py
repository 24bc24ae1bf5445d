"""Captures functions as CUDA graphs that share one pool of memory: what one leaves there is valid until the next is replayed."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from petatron.base.cublas_workspaces import workspaces_in_graph_pool
from petatron.infer.engine_options import EngineOptions

Outputs = TypeVar("Outputs")
HostInputs = TypeVar("HostInputs")
_WARM_UP_CALLS = 2


class GraphSizes(NamedTuple):
    """max_length: tokens of a sequence. multiple: of all rows of a step."""

    max_length: int
    multiple: int

    def num_pages(self, options: EngineOptions) -> int:
        return -(-self.max_length // options.page_size)

    def rounded(self, sizes: Iterable[int]) -> list[int]:
        return [-(-size // self.multiple) * self.multiple for size in sizes]


@dataclass(slots=True, eq=False)
class CapturedStep(Generic[HostInputs]):
    """A graph of a step, and where it reads and writes. hosts: two, since the copy of one may still run while the next is prepared."""

    hosts: tuple[HostInputs, HostInputs]
    device: Tensor
    graph: torch.cuda.CUDAGraph
    outputs: tuple[Tensor, Tensor]

    def next_host(self) -> HostInputs:
        host, other = self.hosts
        self.hosts = other, host
        return host


class GraphCapture:
    """The pool, and the stream on which graphs are captured.

    `read_memory` returns what others own and a graph reads: it lives until the graph is freed, though its owner may drop it.
    """

    def __init__(self, device: torch.device, *, read_memory: Callable[[], object] = lambda: None) -> None:
        self.device = device
        self._read_memory = read_memory
        self._memory_of: dict[int, tuple[torch.cuda.CUDAGraph, object]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(
        self, function: Callable[[], Outputs], *, after_warm_up: Callable[[], None] | None = None
    ) -> tuple[torch.cuda.CUDAGraph, Outputs]:
        """Calls a function a few times, then once more to capture it; returns the graph and the tensors that it writes."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UP_CALLS):
                function()
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        if after_warm_up is not None:
            after_warm_up()
        graph = torch.cuda.CUDAGraph()
        with (
            _without_garbage_collection(),
            workspaces_in_graph_pool(),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            outputs = function()
        self._memory_of[id(graph)] = graph, self._read_memory()
        return graph, outputs

    def free(self, graphs: Iterable[torch.cuda.CUDAGraph]) -> None:
        """Frees graphs; a communicator whose collectives they hold can end only then."""
        torch.cuda.synchronize(self.device)
        for graph in graphs:
            graph.reset()
            self._memory_of.pop(id(graph), None)


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Garbage collected during a capture might free what must not be freed then, such as another graph."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
