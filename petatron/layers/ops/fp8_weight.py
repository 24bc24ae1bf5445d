"""A weight in FP8: when it is cast, and how long the result is kept.

A GEMM of forward reads a weight's rows, one of backward its columns. Cast once in both orientations, a weight takes two bytes per
element for the whole step: 4 bytes of memory traffic per element with a scale per tensor (2 + 1 + 1), however many micro-batches use it.
Cast for each use in the one orientation that is read, it takes nothing between forward and backward, and 6 bytes of traffic for one micro-
batch (2 + 1 twice). The GEMMs of a weight take as long as 6 x rows operations per element; so with
R rows the second way costs about 100 / R of their time: it is taken for one micro-batch of `MIN_ROWS_TO_REQUANTIZE` rows or more.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from petatron.kernels.fp8.cast_and_gemm import E4M3, CastKernel, Fp8Kernels, Fp8Matrix, Orientation
from petatron.layers.ops.fp8_scaling import Quantizer

MIN_ROWS_TO_REQUANTIZE = 8192
"""Below, a weight that only one micro-batch uses is cached all the same."""


def is_cast_for_each_use(*, micro_batches: int, num_rows: int) -> bool:
    """Whether a weight is cast for each use in a step, and nothing of it is kept in between."""
    return micro_batches == 1 and num_rows >= MIN_ROWS_TO_REQUANTIZE


class WeightCast(Protocol):
    """Quantizes a weight, with the scale that is known of it in a step, if any."""

    scale: Tensor | None

    def __call__(self, weight: Tensor, *, orientation: Orientation) -> Fp8Matrix: ...

    def drop(self) -> None:
        """Forgets the weight: it has changed."""
        ...


class StatelessWeightCast:
    """Computes all scales with each cast."""

    def __init__(self, cast: CastKernel) -> None:
        self._cast = cast
        self.scale: Tensor | None = None

    def __call__(self, weight: Tensor, *, orientation: Orientation) -> Fp8Matrix:
        return self._cast(weight, E4M3, orientation=orientation)

    def drop(self) -> None:
        pass


def cast_with_known_scale(x_RC: Tensor, scale: Tensor, kernels: Fp8Kernels, *, orientation: Orientation) -> Fp8Matrix:
    """Casts to e4m3 with the scale of an earlier cast of the same tensor."""
    unused = torch.empty_like(scale)
    return kernels.cast_with_scale(x_RC, E4M3, scale=scale, amax=unused, orientation=orientation)


class TensorwiseWeightCast:
    """Casts with one scale, which is found once, however often the weight is cast."""

    def __init__(self, quantizer: Quantizer, kernels: Fp8Kernels) -> None:
        self._quantizer, self._kernels = quantizer, kernels
        self.scale: Tensor | None = None

    def __call__(self, weight: Tensor, *, orientation: Orientation) -> Fp8Matrix:
        if self.scale is not None:
            return cast_with_known_scale(weight, self.scale, self._kernels, orientation=orientation)
        matrix = self._quantizer(weight, orientation=orientation)
        self.scale = (matrix.columns if orientation == "columns" else matrix.rows).scale
        return matrix

    def drop(self) -> None:
        self.scale = None


class Fp8WeightCache:
    """Caches a weight in FP8 for a step, in both orientations; with `keep` False (gathered weights are freed between uses) never."""

    def __init__(self, cast: WeightCast, *, keep: bool) -> None:
        self._cast, self._keep = cast, keep
        self._cached: Fp8Matrix | None = None
        self._micro_batches = 2

    def get(self, weight: Tensor, orientation: Orientation, *, num_rows: int = 0) -> Fp8Matrix:
        """Returns the weight in at least this orientation, for a GEMM of `num_rows` rows."""
        if self._cached is not None:
            return self._cached
        if not self._keep or is_cast_for_each_use(micro_batches=self._micro_batches, num_rows=num_rows):
            return self._cast(weight.detach(), orientation=orientation)
        self._cached = self._cast(weight.detach(), orientation="both")
        return self._cached

    def new_step(self, micro_batches: int) -> None:
        """Drops the weight; so many micro-batches will use it."""
        self._micro_batches = micro_batches
        self.drop()

    @property
    def memory(self) -> tuple[Fp8Matrix | None, Tensor | None]:
        """What is cached, and a known scale: a CUDA graph reads their memory, and does not keep it alive."""
        return self._cached, self._cast.scale

    def drop(self) -> None:
        self._cached = None
        self._cast.drop()
