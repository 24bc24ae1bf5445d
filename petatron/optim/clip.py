"""The global gradient norm: every logical element counts once, however many ranks hold it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from petatron.mesh import collectives
from petatron.mesh.mesh import Axis
from petatron.mesh.stretch import ParameterGroup


class GlobalNorm:
    """Sums over the elements this rank alone speaks for, then over all ranks: one rule for every layout and sharding."""

    def __init__(self, groups: Sequence[ParameterGroup], world: Axis) -> None:
        self._world = world
        self._ranges = [stretch.spoken_for() for group in groups for stretch in group.stretches]

    def _views(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [
            tensor[begin:end] for tensor, ranges in zip(tensors, self._ranges, strict=True) for begin, end in ranges
        ]

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """L2 norm of a quantity given as one tensor per stretch (gradients, weights), as a scalar on the device."""
        views = self._views(tensors)
        wide = tensors[0].new_zeros((), dtype=torch.promote_types(tensors[0].dtype, torch.float32))
        norms = torch._foreach_norm(views, dtype=wide.dtype) if views else ()
        square = sum((norm.square() for norm in norms), wide)
        return collectives.all_reduce(square, self._world).sqrt()

    def zeros(self, tensors: Sequence[Tensor]) -> Tensor:
        """How many elements are exactly zero."""
        count = sum(
            (view.numel() - view.count_nonzero() for view in self._views(tensors)),
            tensors[0].new_zeros((), dtype=torch.int64),
        )
        return collectives.all_reduce(count, self._world)
