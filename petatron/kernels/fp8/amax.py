"""A tensor's amax, the largest of its magnitudes; and the note by which the kernel that writes a tensor hands it on.

A cast with one scale per tensor reads the tensor once for amax and once to cast it. A norm or an activation that feeds an FP8 GEMM has
every number in registers anyway: it computes amax as it writes them, and the cast need not. The note is kept with the tensor object, so
it reaches the cast through autograd, forward and backward, without a place in any signature between; a view, a copy or a sum is another
tensor and has none, and a change in place makes it void. Where there is none, the cast computes amax itself: the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NOTE = "_petatron_amax"


def amax_of(x: Tensor) -> Tensor:
    """Returns amax [1] in float32; that of no numbers is 0."""
    if not x.numel():
        return zero_amax(x)
    return x.abs().amax().to(torch.float32).reshape(1)


def zero_amax(x: Tensor) -> Tensor:
    """Returns an amax [1] to be raised by a kernel that writes a tensor on the device of `x`."""
    return torch.zeros(1, dtype=torch.float32, device=x.device)


def note_amax(x: Tensor, amax: Tensor) -> None:
    """Notes the amax of a tensor; one made in inference mode, whose changes are not counted, gets none."""
    if not x.is_inference():
        setattr(x, _NOTE, (amax, x._version))


def known_amax(x: Tensor) -> Tensor | None:
    """Returns the amax noted for a tensor that was not changed since."""
    amax, version = getattr(x, _NOTE, (None, None))
    return amax if amax is not None and x._version == version else None
