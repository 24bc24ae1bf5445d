"""cuBLAS workspaces of captured CUDA graphs.

torch gives cuBLAS a workspace for each handle and stream, allocates it at the first GEMM there, and keeps it in a table of the process. A
graph that is captured on a stream where GEMMs have run before, as those of warm-up steps have, contains the address of such a workspace
and does not own it. Whoever clears the table frees it: `torch.compile` with CUDA graphs does so before its own captures, and empties the
allocator's cache as well. A replay then reads and writes memory that belongs to somebody else, or to nobody ("unspecified launch failure").
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def workspaces_in_graph_pool() -> Iterator[None]:
    """Has GEMMs that are captured in this context allocate workspaces in the memory pool of their graph, which lives as long as it does.

    The workspaces are not in torch's table afterwards, so eager GEMMs neither use them nor keep the pool from being freed.
    """
    torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore[reportAttributeAccessIssue]
