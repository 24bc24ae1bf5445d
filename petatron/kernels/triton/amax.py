"""The amax of what a kernel reads or writes, in integers.

Without its sign, a float's bits order as its value does, with infinity above all numbers and NaN above infinity. So integer maxima (in
registers, or atomic in memory) are exact, lose no NaN and do not depend on their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def magnitude_bits(x):
    """Returns the bits of |x|."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def atomic_max_amax(amax, bits):
    """Updates amax to max(amax, bits); most programs find it as large already, and write nothing."""
    largest = tl.max(bits)
    if largest > tl.load(amax):
        tl.atomic_max(amax, largest, sem="relaxed")


def amax_bits(amax: Tensor | None, other: Tensor) -> Tensor:
    """Returns the bits of `amax` [1] float32 for a kernel; without one a placeholder, which is not written."""
    return other if amax is None else amax.view(torch.int32)
