"""Randomness: initial weights that no layout changes, and dropout streams that each layout gets right.

Initial weights are a pure function of (seed, logical tensor name, element index). A logical matrix is drawn in square
blocks, each from a generator of its own keyed by a stable hash of (seed, name, block), so a rank draws only the blocks it
holds, whichever dimension is split. Draws are made in float32 on the CPU: the same weights on every device and in every precision.

Dropout uses two streams per rank. The default generator is the `own` stream: it differs on every rank and serves what is
split over ranks (attention heads, sequence-parallel activations). The `shared` stream is equal on the ranks of one
tensor-parallel group, and serves activations that those ranks hold in common and must drop alike.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.spec import Piece, Shape

_BLOCK = 1024


def stable_seed(*parts: object) -> int:
    """A 63-bit seed from the printed form of its parts, equal on every machine and in every process."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def normal_piece(piece: Piece, *, seed: int, std: float) -> Tensor:
    """The part of a logical tensor of normal draws (mean 0) that lies in this piece's box.

    A tensor of more than two dimensions is a stack of matrices, each drawn under a name of its own.
    """
    if len(piece.shape) == 2:
        return _normal_box(piece.name, piece.logical_shape, piece.start, piece.shape, seed).mul_(std)
    out = torch.empty(piece.shape)
    for index in range(piece.shape[0]):
        name = f"{piece.name}[{piece.start[0] + index}]"
        out[index] = _normal_box(name, piece.logical_shape[1:], piece.start[1:], piece.shape[1:], seed)
    return out.mul_(std)


def _normal_box(name: str, logical_shape: Shape, start: Shape, shape: Shape, seed: int) -> Tensor:
    rows, columns = logical_shape
    (top, left), (height, width) = start, shape
    out = torch.empty(height, width)
    for block_row in range(top // _BLOCK, (top + height - 1) // _BLOCK + 1):
        for block_column in range(left // _BLOCK, (left + width - 1) // _BLOCK + 1):
            y, x = block_row * _BLOCK, block_column * _BLOCK
            generator = torch.Generator().manual_seed(stable_seed(seed, name, block_row, block_column))
            block = torch.randn(min(_BLOCK, rows - y), min(_BLOCK, columns - x), generator=generator)
            from_y, from_x = max(top, y), max(left, x)
            to_y, to_x = min(top + height, y + block.shape[0]), min(left + width, x + block.shape[1])
            out[from_y - top : to_y - top, from_x - left : to_x - left] = block[
                from_y - y : to_y - y, from_x - x : to_x - x
            ]
    return out


@dataclass(frozen=True, slots=True)
class RandomStreams:
    """The two dropout streams of a rank."""

    device: torch.device
    shared: torch.Generator

    @classmethod
    def start(cls, seed: int, mesh: ParallelMesh) -> RandomStreams:
        """Seed both streams, the default generator included."""
        torch.manual_seed(stable_seed(seed, "own", mesh.rank))
        shared = torch.Generator(device="cpu" if mesh.device.type == "meta" else mesh.device)
        shared.manual_seed(stable_seed(seed, "shared", mesh.dp.rank, mesh.cp.rank, mesh.pp.rank))
        return cls(mesh.device, shared)

    def state(self) -> dict[str, Tensor]:
        """Every generator's state as bytes, for a checkpoint."""
        states = {"cpu": torch.get_rng_state(), "shared": self.shared.get_state()}
        if self.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self.device)
        return states

    def restore(self, states: dict[str, Tensor]) -> None:
        torch.set_rng_state(states["cpu"])
        self.shared.set_state(states["shared"])
        if self.device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], self.device)
