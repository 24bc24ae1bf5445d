"""A communication slot is a function of a layer, the identity on one device; `parallel/` fills it with collectives."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

CommSlot = Callable[[Tensor], Tensor]


def identity(x: Tensor) -> Tensor:
    return x
