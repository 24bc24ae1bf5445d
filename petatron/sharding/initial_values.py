"""Initial weights as a pure function of (seed, logical tensor name, element index): no layout changes a weight.

A logical matrix is drawn in square blocks, each from a generator of its own keyed by a stable hash of (seed, name, block), so a rank
draws only the blocks it holds, whichever dimension is split, on as many threads as it has cores. Draws are made in float32 on the
CPU: the same weights on every device and in every precision.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from petatron.mesh.rng import stable_seed
from petatron.sharding.shard_spec import Shape, TensorShard

_BLOCK = 1024
_MOST_THREADS = 16  # beyond these, memory is the limit


class InitialValues(Protocol):
    """Initial values of a parameter; must not depend on which part of a logical tensor a rank has."""

    def fill(self, out: Tensor, shard: TensorShard, *, seed: int) -> None:
        """Fills this rank's part of a logical tensor."""


@dataclass(frozen=True, slots=True)
class ConstantValues:
    """One value for all elements."""

    value: float

    def fill(self, out: Tensor, shard: TensorShard, *, seed: int) -> None:
        out.fill_(self.value)


@dataclass(frozen=True, slots=True)
class NormalValues:
    """Normal draws of mean 0."""

    std: float

    def fill(self, out: Tensor, shard: TensorShard, *, seed: int) -> None:
        out.copy_(draw_normal_shard(shard, seed=seed, std=self.std))


@dataclass(frozen=True, slots=True)
class UniformValues:
    """Uniform draws in [low, high)."""

    low: float
    high: float

    def fill(self, out: Tensor, shard: TensorShard, *, seed: int) -> None:
        out.copy_(draw_uniform_shard(shard, seed=seed) * (self.high - self.low) + self.low)


@dataclass(frozen=True, slots=True)
class XavierValues:
    """Uniform draws within sqrt(6 / (rows + columns)) of zero (Glorot and Bengio), the sizes being those of one GEMM's whole weight."""

    rows: int
    columns: int

    def fill(self, out: Tensor, shard: TensorShard, *, seed: int) -> None:
        # The normal distribution's own function makes uniform draws of normal ones, which are drawn block by block.
        normal = draw_normal_shard(shard, seed=seed, std=1.0)
        out.copy_(torch.erf(normal / math.sqrt(2.0)) * math.sqrt(6.0 / (self.rows + self.columns)))


ZEROS, ONES = ConstantValues(0.0), ConstantValues(1.0)


def draw_uniform_shard(shard: TensorShard, *, seed: int) -> Tensor:
    """Returns this shard's box of a logical tensor of uniform draws in [0, 1); the whole tensor is drawn, so it should be small."""
    generator = torch.Generator().manual_seed(stable_seed(seed, shard.name))
    return torch.rand(shard.logical_shape, generator=generator)[shard.logical_slices()]


def draw_normal_shard(shard: TensorShard, *, seed: int, std: float) -> Tensor:
    """Returns this shard's box of a logical tensor of normal draws (mean 0).

    A tensor of more than two dimensions is a stack of matrices, each drawn under a name of its own.
    """
    out = torch.empty(shard.shape)
    if len(shard.shape) == 2:
        blocks = list(_draw_blocks(shard.name, shard.logical_shape, shard.start, out))
    else:
        blocks = [
            block
            for index, matrix in enumerate(out, start=shard.start[0])
            for block in _draw_blocks(f"{shard.name}[{index}]", shard.logical_shape[1:], shard.start[1:], matrix)
        ]
    # Drawing releases the interpreter's lock, and a block depends on no other: the order they are drawn in is free.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = min(cores, _MOST_THREADS, len(blocks))
    if threads <= 1:
        for block in blocks:
            block.draw(seed, std)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda block: block.draw(seed, std), blocks))
    return out


@dataclass(frozen=True, slots=True)
class _DrawBlock:
    """One block of a logical matrix, the part of it that is wanted, and the memory that part goes to."""

    name: str
    coordinate: tuple[int, int]
    shape: tuple[int, int]
    wanted: tuple[slice, slice]
    out: Tensor

    def draw(self, seed: int, std: float) -> None:
        generator = torch.Generator().manual_seed(stable_seed(seed, self.name, *self.coordinate))
        drawn = torch.randn(self.shape, generator=generator)
        # NumPy, because a copy by torch would start a team of threads in every thread of the pool.
        np.multiply(drawn.numpy()[self.wanted], np.float32(std), out=self.out.numpy())


def _draw_blocks(name: str, logical_shape: Shape, start: Shape, out: Tensor) -> Iterator[_DrawBlock]:
    """Yields the blocks of a logical matrix that a box at `start` overlaps; `out` is the memory of the whole box."""
    rows, columns = logical_shape
    (top, left), (height, width) = start, out.shape
    for block_row in range(top // _BLOCK, (top + height - 1) // _BLOCK + 1):
        for block_column in range(left // _BLOCK, (left + width - 1) // _BLOCK + 1):
            y, x = block_row * _BLOCK, block_column * _BLOCK
            shape = (min(_BLOCK, rows - y), min(_BLOCK, columns - x))
            from_y, from_x = max(top, y), max(left, x)
            to_y, to_x = min(top + height, y + shape[0]), min(left + width, x + shape[1])
            wanted = (slice(from_y - y, to_y - y), slice(from_x - x, to_x - x))
            part = out[from_y - top : to_y - top, from_x - left : to_x - left]
            yield _DrawBlock(name, (block_row, block_column), shape, wanted, part)
