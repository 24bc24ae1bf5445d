"""Gathering weights in eight bits: which scales they have, and what a rank sends and fills with what it gets.

A rank owns stretches of matrices that end wherever they end, inside a row or a square. So the ranks first agree on the largest
magnitude of each set of numbers with one scale, in one exchange for all weights; then each casts what it owns, and the bytes
travel. See `kernels/fp8/gather_cast.py` for why products do not see the difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from petatron.kernels.fp8.cast_and_gemm import BLOCK, E4M3, Scaling, power_of_two_scale
from petatron.kernels.fp8.gather_cast import GatherCastKernels
from petatron.mesh import collectives
from petatron.mesh.collectives import Handle
from petatron.mesh.mesh import Axis
from petatron.sharding.shard_spec import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weights:
    """The weights whose products are in eight bits and how each is scaled; `kernels` only where they also travel so."""

    scalings: Mapping[str, Scaling]
    kernels: GatherCastKernels | None = None


@dataclass(frozen=True, slots=True)
class ScaledMatrix:
    """A weight of `size` elements and its place in a table of scales; `columns` where each square of it has one."""

    size: int
    first_scale: int
    num_scales: int
    columns: int | None

    @classmethod
    def from_shape(cls, shape: Shape, scaling: Scaling, *, first_scale: int) -> ScaledMatrix:
        """`first_scale` is where its scales begin in the table."""
        if scaling == "tensor":
            return cls(math.prod(shape), first_scale, 1, None)
        assert scaling == "squares" and len(shape) == 2 and not any(size % BLOCK for size in shape), (
            f"{scaling} {shape}"
        )
        return cls(math.prod(shape), first_scale, math.prod(shape) // BLOCK**2, shape[1])

    def scales_in(self, scales: Tensor) -> Tensor:
        return scales[self.first_scale : self.first_scale + self.num_scales]


@dataclass(frozen=True, slots=True)
class MatrixShard:
    """Elements `begin` onwards of a matrix, which this rank has."""

    matrix: ScaledMatrix
    begin: int
    values: Tensor


def all_reduce_scales(
    shards: Iterable[MatrixShard], num_scales: int, axis: Axis, kernels: GatherCastKernels, device: torch.device
) -> Tensor:
    """The scales of all matrices, from the parts that each rank of the axis has of them."""
    amax = torch.zeros(num_scales, dtype=torch.float32, device=device)
    for part in shards:
        matrix = part.matrix
        kernels.update_shard_amax(part.values, matrix.scales_in(amax), begin=part.begin, columns=matrix.columns)
    # The bits of magnitudes order as they do, and lose no NaN.
    collectives.all_reduce(amax.view(torch.int32), axis, op="max")
    return power_of_two_scale(amax, E4M3)


def quantise_shard(shard: MatrixShard, scales: Tensor, out: Tensor, kernels: GatherCastKernels) -> None:
    """What this rank has of a matrix as bytes."""
    matrix = shard.matrix
    kernels.quantise_shard(
        shard.values, matrix.scales_in(scales), out.view(E4M3), begin=shard.begin, columns=matrix.columns
    )


def dequantise_shards(
    matrix: ScaledMatrix, received: Tensor, scales: Tensor, out: Tensor, kernels: GatherCastKernels
) -> None:
    """A matrix [parts, elements] from its bytes."""
    kernels.dequantise_shards(received.view(E4M3), matrix.scales_in(scales), out, columns=matrix.columns)


class BucketFp8Gather:
    """Gathers buckets that hold nothing but eight-bit weights, of which each rank owns an equal part."""

    def __init__(
        self, buckets: Sequence[Sequence[tuple[int, Shape, Scaling]]], axis: Axis, kernels: GatherCastKernels
    ) -> None:
        """`buckets` are where each matrix of each begins in its bucket, its shape, and how it is scaled."""
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
        """Of all buckets, from what this rank owns of each."""
        parts = [part for index, own in enumerate(owned) for _, part in self._owned_shards(index, own)]
        return all_reduce_scales(parts, self._num_scales, self._axis, self._kernels, owned[0].device)

    def start_all_gather(self, index: int, out: Tensor, owned: Tensor, scales: Tensor) -> Handle:
        """Begin to gather a bucket; `out` is filled when it is waited for. Padding stays as it is."""
        sent = torch.empty(owned.numel(), dtype=torch.uint8, device=owned.device)
        for at, part in self._owned_shards(index, owned):
            quantise_shard(part, scales, sent[at : at + part.values.numel()], self._kernels)
        received = torch.empty(out.numel(), dtype=torch.uint8, device=out.device)
        after = partial(self._dequantise, index, out, received, scales)
        return collectives.start_all_gather(received, sent, self._axis, on_complete=after)

    def _owned_shards(self, index: int, owned: Tensor) -> Iterable[tuple[int, MatrixShard]]:
        """What this rank has of each matrix of a bucket, and where in its part."""
        begin = self._axis.rank * owned.numel()
        for start, matrix in self._buckets[index]:
            low, high = max(begin, start), min(begin + owned.numel(), start + matrix.size)
            if low < high:
                yield low - begin, MatrixShard(matrix, low - start, owned[low - begin : high - begin])

    def _dequantise(self, index: int, out: Tensor, received: Tensor, scales: Tensor) -> None:
        for start, matrix in self._buckets[index]:
            there = slice(start, start + matrix.size)
            dequantise_shards(matrix, received[there].view(1, -1), scales, out[there].view(1, -1), self._kernels)
