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

from petatron.kernels.fp8.cast_and_gemm import BLOCK, E4M3, Scaling, power_scale
from petatron.kernels.fp8.gather_cast import WireKernels
from petatron.mesh import collectives
from petatron.mesh.collectives import Handle
from petatron.mesh.mesh import Axis
from petatron.sharding.shard_spec import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class EightBitWeights:
    """The weights whose products are in eight bits and how each is scaled; `kernels` only where they also travel so."""

    scalings: Mapping[str, Scaling]
    kernels: WireKernels | None = None


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight of `size` elements and its place in a table of scales; `columns` where each square of it has one."""

    size: int
    first: int
    scales: int
    columns: int | None

    @classmethod
    def of(cls, shape: Shape, scaling: Scaling, *, first: int) -> Matrix:
        """`first` is where its scales begin in the table."""
        if scaling == "tensor":
            return cls(math.prod(shape), first, 1, None)
        assert scaling == "squares" and len(shape) == 2 and not any(size % BLOCK for size in shape), (
            f"{scaling} {shape}"
        )
        return cls(math.prod(shape), first, math.prod(shape) // BLOCK**2, shape[1])

    def among(self, table: Tensor) -> Tensor:
        return table[self.first : self.first + self.scales]


@dataclass(frozen=True, slots=True)
class Owned:
    """Elements `begin` onwards of a matrix, which this rank has."""

    matrix: Matrix
    begin: int
    values: Tensor


def agree_on_scales(
    parts: Iterable[Owned], count: int, axis: Axis, kernels: WireKernels, device: torch.device
) -> Tensor:
    """The scales of all matrices, from the parts that each rank of the axis has of them."""
    amax = torch.zeros(count, dtype=torch.float32, device=device)
    for part in parts:
        matrix = part.matrix
        kernels.raise_largest(part.values, matrix.among(amax), begin=part.begin, columns=matrix.columns)
    # The bits of magnitudes order as they do, and lose no NaN.
    collectives.all_reduce(amax.view(torch.int32), axis, op="max")
    return power_scale(amax, E4M3)


def narrow(part: Owned, table: Tensor, out: Tensor, kernels: WireKernels) -> None:
    """What this rank has of a matrix as bytes."""
    matrix = part.matrix
    kernels.narrow(part.values, matrix.among(table), out.view(E4M3), begin=part.begin, columns=matrix.columns)


def restore(matrix: Matrix, received: Tensor, table: Tensor, out: Tensor, kernels: WireKernels) -> None:
    """A matrix [parts, elements] from its bytes."""
    kernels.restore(received.view(E4M3), matrix.among(table), out, columns=matrix.columns)


class BucketWire:
    """Gathers buckets that hold nothing but eight-bit weights, of which each rank owns an equal part."""

    def __init__(
        self, buckets: Sequence[Sequence[tuple[int, Shape, Scaling]]], axis: Axis, kernels: WireKernels
    ) -> None:
        """`buckets` are where each matrix of each begins in its bucket, its shape, and how it is scaled."""
        self._axis, self._kernels = axis, kernels
        self._buckets: list[list[tuple[int, Matrix]]] = []
        self._count = 0
        for bucket in buckets:
            self._buckets.append([])
            for start, shape, scaling in bucket:
                matrix = Matrix.of(shape, scaling, first=self._count)
                self._count += matrix.scales
                self._buckets[-1].append((start, matrix))

    def scales(self, owned: Sequence[Tensor]) -> Tensor:
        """Of all buckets, from what this rank owns of each."""
        parts = [part for index, own in enumerate(owned) for _, part in self._parts(index, own)]
        return agree_on_scales(parts, self._count, self._axis, self._kernels, owned[0].device)

    def start(self, index: int, out: Tensor, own: Tensor, table: Tensor) -> Handle:
        """Begin to gather a bucket; `out` is filled when it is waited for. Padding stays as it is."""
        sent = torch.empty(own.numel(), dtype=torch.uint8, device=own.device)
        for at, part in self._parts(index, own):
            narrow(part, table, sent[at : at + part.values.numel()], self._kernels)
        received = torch.empty(out.numel(), dtype=torch.uint8, device=out.device)
        after = partial(self._fill, index, out, received, table)
        return collectives.start_all_gather(received, sent, self._axis, after=after)

    def _parts(self, index: int, own: Tensor) -> Iterable[tuple[int, Owned]]:
        """What this rank has of each matrix of a bucket, and where in its part."""
        begin = self._axis.rank * own.numel()
        for start, matrix in self._buckets[index]:
            low, high = max(begin, start), min(begin + own.numel(), start + matrix.size)
            if low < high:
                yield low - begin, Owned(matrix, low - start, own[low - begin : high - begin])

    def _fill(self, index: int, out: Tensor, received: Tensor, table: Tensor) -> None:
        for start, matrix in self._buckets[index]:
            there = slice(start, start + matrix.size)
            restore(matrix, received[there].view(1, -1), table, out[there].view(1, -1), self._kernels)
