"""A tensor's amax, the largest of its magnitudes, and how the kernel that writes a tensor attaches it, so that a cast skips that pass.

A cast with one scale per tensor reads the tensor once for amax and once to cast it. A norm or an activation that feeds an FP8 GEMM has
every element in registers anyway: it computes amax as it writes them. The amax is an attribute of the tensor object, so it reaches
the cast through autograd, forward and backward, without a place in any signature between; a view, a copy or a sum is another
tensor and has none, and a change in place makes it void. Without one the cast computes amax itself: the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ATTRIBUTE = "_petatron_amax"


def amax_of(x: Tensor) -> Tensor:
    """Returns amax [1] in float32; that of no numbers is 0."""
    if not x.numel():
        return new_amax(x)
    return x.abs().amax().to(torch.float32).reshape(1)


def new_amax(x: Tensor) -> Tensor:
    """Returns an amax [1] of nothing yet, 0, on the device of `x`: a kernel that writes a tensor updates it."""
    return torch.zeros(1, dtype=torch.float32, device=x.device)


def attach_amax(x: Tensor, amax: Tensor) -> None:
    """Attaches its amax to a tensor, but to none made in inference mode, whose changes are not counted."""
    if not x.is_inference():
        setattr(x, _ATTRIBUTE, (amax, x._version))


def attached_amax(x: Tensor) -> Tensor | None:
    """Returns the attached amax, if the tensor was not changed since."""
    amax, version = getattr(x, _ATTRIBUTE, (None, None))
    return amax if amax is not None and x._version == version else None
