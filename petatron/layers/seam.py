"""A seam is a function slot of a layer, the identity on one device; `parallel/` fills it with communication."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Seam = Callable[[Tensor], Tensor]


def identity(x: Tensor) -> Tensor:
    return x
