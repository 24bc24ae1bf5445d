"""The global gradient norm, and the factor that clips gradients by it.

Every logical element counts once in the norm, however many ranks hold it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from petatron.kernels.optimizer.adam import SquaresKernel, sum_of_squares
from petatron.mesh import collectives
from petatron.mesh.mesh import Axis
from petatron.sharding.flat_shard import FlatShard


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Returns the factor, at most 1, that clips gradients with this norm to `max_norm`, as a scalar on the device.

    >>> clip_factor(torch.tensor(4.0), 1.0), clip_factor(torch.tensor(0.5), 1.0)
    (tensor(0.2500), tensor(1.))
    """
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


class GlobalNorm:
    """Sums over the elements this rank is primary for, then over all ranks: one rule for every layout and sharding."""

    def __init__(
        self,
        flat_shards: Sequence[FlatShard],
        world: Axis,
        device: torch.device,
        kernel: SquaresKernel = sum_of_squares,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`dtype` is the precision of the model, which a rank without any of the tensors sums in too."""
        self._world, self._device, self._kernel = world, device, kernel
        self._dtype = torch.promote_types(dtype, torch.float32)
        self._primary_ranges = [flat_shard.primary_ranges() for flat_shard in flat_shards]

    def _primary_views(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [
            tensor[begin:end]
            for tensor, ranges in zip(tensors, self._primary_ranges, strict=True)
            for begin, end in ranges
        ]

    def norm(self, tensors: Sequence[Tensor], more: Sequence[Tensor] = ()) -> Tensor:
        """Returns the L2 norm of a quantity given as one tensor per flat shard (gradients, weights), as a scalar on the device.

        Tensors in host memory (offloaded weights) are summed there. `more` are tensors that this rank alone has, of any shape.
        """
        views = self._primary_views(tensors) + [x.view(-1) for x in more if x.numel()]
        wide = torch.promote_types(tensors[0].dtype, torch.float32) if tensors else self._dtype
        square = torch.zeros((), dtype=wide, device=self._device)
        here = [view for view in views if view.device.type == self._device.type]
        elsewhere = [view for view in views if view.device.type != self._device.type]
        for dtype in dict.fromkeys(view.dtype for view in here):
            square = square + self._kernel([view for view in here if view.dtype == dtype])
        if elsewhere:
            square = square + sum_of_squares(elsewhere).to(self._device)
        return collectives.all_reduce(square, self._world).sqrt()

    def count_zeros(self, tensors: Sequence[Tensor], more: Sequence[Tensor] = (), *, absent: int = 0) -> Tensor:
        """Counts elements that are exactly zero, and `absent` ones, which are stored nowhere on this rank since they are zero."""
        count = sum(
            (view.numel() - view.count_nonzero() for view in [*self._primary_views(tensors), *more]),
            torch.full((), absent, dtype=torch.int64, device=self._device),
        )
        return collectives.all_reduce(count, self._world)
