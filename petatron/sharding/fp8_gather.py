"""All-gathers weights in FP8: computes their scales, quantizes what a rank sends and dequantizes what it receives.

A rank owns flat shards of matrices that end anywhere, inside a row or a square. So the ranks first max-reduce the amax of
each set of numbers with one scale, in one exchange for all weights; then each quantizes what it owns, and FP8 values are
all-gathered. `kernels/fp8/param_gather.py` says why GEMMs get the same operands.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from petatron.kernels.fp8.cast_and_gemm import BLOCK, E4M3, Scaling, power_of_two_scale
from petatron.kernels.fp8.param_gather import Fp8ParamGatherKernels
from petatron.mesh import collectives
from petatron.mesh.collectives import Handle
from petatron.mesh.mesh import Axis
from petatron.sharding.shard_spec import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weights:
    """The weights of FP8 GEMMs and the scaling of each; `kernels` only where they are also all-gathered in FP8."""

    scalings: Mapping[str, Scaling]
    kernels: Fp8ParamGatherKernels | None = None


@dataclass(frozen=True, slots=True)
class ScaledMatrix:
    """A weight of `size` elements and its range in a table of scales; `columns` where each square of it has a scale."""

    size: int
    first_scale: int
    num_scales: int
    columns: int | None

    @classmethod
    def from_shape(cls, shape: Shape, scaling: Scaling, *, first_scale: int) -> ScaledMatrix:
        """`first_scale` is the index of its first scale in the table."""
        if scaling == "tensorwise":
            return cls(math.prod(shape), first_scale, 1, None)
        assert scaling == "block_128x128" and len(shape) == 2 and not any(size % BLOCK for size in shape), (
            f"{scaling} {shape}"
        )
        return cls(math.prod(shape), first_scale, math.prod(shape) // BLOCK**2, shape[1])

    def scales_in(self, scales: Tensor) -> Tensor:
        return scales[self.first_scale : self.first_scale + self.num_scales]


@dataclass(frozen=True, slots=True)
class MatrixShard:
    """Elements `begin` onwards of a matrix, which this rank owns."""

    matrix: ScaledMatrix
    begin: int
    values: Tensor


def all_reduce_scales(
    shards: Iterable[MatrixShard], num_scales: int, axis: Axis, kernels: Fp8ParamGatherKernels, device: torch.device
) -> Tensor:
    """Returns the scales of all matrices, from the shards that each rank of the axis owns."""
    amax = torch.zeros(num_scales, dtype=torch.float32, device=device)
    for part in shards:
        matrix = part.matrix
        kernels.update_shard_amax(part.values, matrix.scales_in(amax), begin=part.begin, columns=matrix.columns)
    # The bits of magnitudes order as their values do, and lose no NaN.
    collectives.all_reduce(amax.view(torch.int32), axis, op="max")
    return power_of_two_scale(amax, E4M3)


def quantize_shard(shard: MatrixShard, scales: Tensor, out: Tensor, kernels: Fp8ParamGatherKernels) -> None:
    """Quantizes this rank's shard of a matrix."""
    matrix = shard.matrix
    kernels.quantize_shard(
        shard.values, matrix.scales_in(scales), out.view(E4M3), begin=shard.begin, columns=matrix.columns
    )


def dequantize_shards(
    matrix: ScaledMatrix, received: Tensor, scales: Tensor, out: Tensor, kernels: Fp8ParamGatherKernels
) -> None:
    """Dequantizes a matrix [shards, elements]."""
    kernels.dequantize_shards(received.view(E4M3), matrix.scales_in(scales), out, columns=matrix.columns)


class BucketFp8Gather:
    """All-gathers buckets of FP8 weights alone, of which each rank owns an equal shard."""

    def __init__(
        self, buckets: Sequence[Sequence[tuple[int, Shape, Scaling]]], axis: Axis, kernels: Fp8ParamGatherKernels
    ) -> None:
        """`buckets` has for each matrix of each bucket its offset, shape and scaling."""
        self._axis, self._kernels = axis, kernels
        self._buckets: list[list[tuple[int, ScaledMatrix]]] = []
        self._num_scales = 0
        for bucket in buckets:
            self._buckets.append([])
            for start, shape, scaling in bucket:
                matrix = ScaledMatrix.from_shape(shape, scaling, first_scale=self._num_scales)
                self._num_scales += matrix.num_scales
                self._buckets[-1].append((start, matrix))

    def compute_scales(self, owned: Sequence[Tensor]) -> Tensor:
        """Returns the scales of all buckets, from the shards that this rank owns."""
        parts = [part for index, values in enumerate(owned) for _, part in self._owned_shards(index, values)]
        return all_reduce_scales(parts, self._num_scales, self._axis, self._kernels, owned[0].device)

    def start_all_gather(self, index: int, out: Tensor, owned: Tensor, scales: Tensor) -> Handle:
        """Starts the all-gather of a bucket; `out` is filled in `wait`. Padding is unchanged."""
        sent = torch.empty(owned.numel(), dtype=torch.uint8, device=owned.device)
        for at, part in self._owned_shards(index, owned):
            quantize_shard(part, scales, sent[at : at + part.values.numel()], self._kernels)
        received = torch.empty(out.numel(), dtype=torch.uint8, device=out.device)
        after = partial(self._dequantize, index, out, received, scales)
        return collectives.start_all_gather(received, sent, self._axis, on_complete=after)

    def _owned_shards(self, index: int, owned: Tensor) -> Iterable[tuple[int, MatrixShard]]:
        """Returns this rank's shard of each matrix of a bucket, and its offset in the owned range."""
        begin = self._axis.rank * owned.numel()
        for start, matrix in self._buckets[index]:
            low, high = max(begin, start), min(begin + owned.numel(), start + matrix.size)
            if low < high:
                yield low - begin, MatrixShard(matrix, low - start, owned[low - begin : high - begin])

    def _dequantize(self, index: int, out: Tensor, received: Tensor, scales: Tensor) -> None:
        for start, matrix in self._buckets[index]:
            there = slice(start, start + matrix.size)
            dequantize_shards(matrix, received[there].view(1, -1), scales, out[there].view(1, -1), self._kernels)
