"""A weight in FP8: when it is cast, and how long the result is kept.

A GEMM of forward reads a weight's rows, one of backward its columns. Cast once in both orientations, a weight takes two bytes per
element for the whole step: 4 bytes of memory traffic per element with a scale per tensor (2 + 1 + 1), however many micro-batches use it.
Cast for each use in the one orientation that is read, it takes nothing between forward and backward, and 6 bytes of traffic for one micro-
batch (2 + 1 twice). The GEMMs of a weight take as long as 6 x rows operations per element; so with
R rows the second way costs about 100 / R of their time: it is taken for one micro-batch of `MIN_ROWS_TO_REQUANTIZE` rows or more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from petatron.kernels.fp8.cast_and_gemm import E4M3, Fp8Kernels, Fp8Matrix, Orientation
from petatron.layers.ops.fp8_scaling import Quantizer

MIN_ROWS_TO_REQUANTIZE = 8192
"""Below, a weight that only one micro-batch uses is cached all the same."""


def is_cast_for_each_use(*, micro_batches: int, num_rows: int) -> bool:
    """Whether a weight is cast for each use in a step, and nothing of it is kept in between."""
    return micro_batches == 1 and num_rows >= MIN_ROWS_TO_REQUANTIZE


def cast_with_known_scale(x_RC: Tensor, scale: Tensor, kernels: Fp8Kernels, *, orientation: Orientation) -> Fp8Matrix:
    """Casts to e4m3 with the scale of an earlier cast of the same tensor."""
    unused = torch.empty_like(scale)
    return kernels.cast_with_scale(x_RC, E4M3, scale=scale, amax=unused, orientation=orientation)


class Fp8WeightCache:
    """Caches a weight in FP8 for a step, in both orientations; with `keep` False (gathered weights are freed between uses) never.

    With `tensorwise_kernels` the weight has one scale, which is found once, however often the weight is cast in a step.
    """

    def __init__(self, quantizer: Quantizer, *, keep: bool, tensorwise_kernels: Fp8Kernels | None = None) -> None:
        self._quantizer, self._keep, self._tensorwise_kernels = quantizer, keep, tensorwise_kernels
        self._cached: Fp8Matrix | None = None
        self._scale: Tensor | None = None
        self._micro_batches = 2

    def _cast(self, weight: Tensor, orientation: Orientation) -> Fp8Matrix:
        kernels = self._tensorwise_kernels
        if kernels is not None and self._scale is not None:
            return cast_with_known_scale(weight, self._scale, kernels, orientation=orientation)
        matrix = self._quantizer(weight, orientation=orientation)
        if kernels is not None:
            self._scale = (matrix.columns if orientation == "columns" else matrix.rows).scale
        return matrix

    def get(self, weight: Tensor, orientation: Orientation, *, num_rows: int = 0) -> Fp8Matrix:
        """Returns the weight in at least this orientation, for a GEMM of `num_rows` rows."""
        if self._cached is not None:
            return self._cached
        if not self._keep or is_cast_for_each_use(micro_batches=self._micro_batches, num_rows=num_rows):
            return self._cast(weight.detach(), orientation)
        self._cached = self._cast(weight.detach(), "both")
        return self._cached

    def new_step(self, micro_batches: int) -> None:
        """Drops the weight; `micro_batches` is how many will use it."""
        self._micro_batches = micro_batches
        self.drop()

    @property
    def memory(self) -> tuple[Fp8Matrix | None, Tensor | None]:
        """What is cached, and a known scale: a CUDA graph reads their memory, and does not keep it alive."""
        return self._cached, self._scale

    def drop(self) -> None:
        self._cached = self._scale = None
