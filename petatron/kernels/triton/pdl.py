"""Programmatic dependent launch (PDL): a kernel of a decode step starts while the one before it ends.

A decode step of one sequence is a chain of kernels of a few microseconds, and between two of them a GPU is idle for about one. A kernel
that is launched with PDL is resident before its predecessor has ended: it does what needs no input (a GEMM prefetches its weights), then
waits. Every such kernel waits, so what comes after it also comes after all before it. Without the launch option both instructions do
nothing, and large kernels are launched without it: their gaps are nothing beside their work.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_PDL_ROWS = 64
"""A kernel over more rows than this is long enough for its launch not to matter."""
_HOPPER = (9, 0)


def pdl_options_for(rows: int, x: Tensor) -> dict[str, bool]:
    """Returns the `USE_PDL` constant of a kernel over `rows` rows, and the launch option that goes with it."""
    return pdl_options(uses_pdl(rows, x))


def uses_pdl(rows: int, x: Tensor) -> bool:
    """Whether a kernel over `rows` rows is launched with PDL."""
    return rows <= MAX_PDL_ROWS and x.is_cuda and device_capability(x.get_device()) >= _HOPPER


def pdl_options(pdl: bool) -> dict[str, bool]:
    return {"USE_PDL": True, "launch_pdl": True} if pdl else {"USE_PDL": False}


@cache
def device_capability(index: int) -> tuple[int, int]:
    """Returns the compute capability of a device, by its index."""
    return torch.cuda.get_device_capability(index)


@triton.jit
def pdl_wait_and_trigger(USE_PDL: tl.constexpr):
    """Waits until all kernels before have ended, and lets the next one start."""
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
