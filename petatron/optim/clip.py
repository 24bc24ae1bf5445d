"""The global gradient norm: every logical element counts once, however many ranks hold it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from petatron.mesh import collectives
from petatron.mesh.flat import FlatGroup
from petatron.mesh.mesh import Axis


class GlobalNorm:
    """Sums over the elements this rank speaks for (`Piece.primary`), then over the ranks that hold the other pieces."""

    def __init__(self, groups: Sequence[FlatGroup], axis: Axis) -> None:
        self._axis = axis
        self._runs = [_primary_runs(group) for group in groups]

    def _views(self, flats: Sequence[Tensor]) -> list[Tensor]:
        return [flat[begin:end] for flat, runs in zip(flats, self._runs) for begin, end in runs]

    def norm(self, flats: Sequence[Tensor]) -> Tensor:
        """L2 norm of a quantity laid out like the groups (gradients, weights), as a scalar on the device."""
        views = self._views(flats)
        wide = flats[0].new_zeros((), dtype=torch.promote_types(flats[0].dtype, torch.float32))
        norms = torch._foreach_norm(views, dtype=wide.dtype) if views else ()
        square = sum((norm.square() for norm in norms), wide)
        return collectives.all_reduce(square, self._axis).sqrt()

    def zeros(self, flats: Sequence[Tensor]) -> Tensor:
        """How many elements are exactly zero."""
        count = sum(
            (view.numel() - view.count_nonzero() for view in self._views(flats)),
            flats[0].new_zeros((), dtype=torch.int64),
        )
        return collectives.all_reduce(count, self._axis)


def _primary_runs(group: FlatGroup) -> list[tuple[int, int]]:
    """Ranges of a group's flat layout whose elements this rank speaks for, neighbours joined; padding is left out.

    Pieces are boxes over whole trailing dimensions or whole parameters, so a piece is contiguous unless it is a slice of
    columns, and then it is all of the local parameter.
    """
    runs: list[tuple[int, int]] = []
    for slot in group.slots:
        row = slot.parameter.numel() // max(1, slot.parameter.shape[0])
        for piece in slot.placement.pieces:
            begin = slot.start + piece.local_start[0] * row
            end = begin + piece.shape[0] * row
            if not piece.primary:
                continue
            if runs and runs[-1][1] == begin:
                runs[-1] = (runs[-1][0], end)
            else:
                runs.append((begin, end))
    return runs
