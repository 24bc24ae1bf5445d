"""RNG streams: seeds that are equal on every machine, and the dropout streams of a rank.

Dropout uses two streams per rank. The default generator is the `own` stream: it differs on every rank, for activations that are
sharded over ranks (attention heads, sequence parallelism). The `shared` stream is equal on the ranks of one tensor-parallel group,
for activations that those ranks have in common and must drop alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from petatron.mesh.mesh import ParallelMesh


def stable_seed(*parts: object) -> int:
    """Returns a 63-bit seed from the printed form of its parts, equal on every machine and in every process."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True, slots=True)
class RandomStreams:
    """The two dropout streams of a rank; `used_in_step` says whether training steps use them at all."""

    device: torch.device
    tp_shared: torch.Generator
    used_in_step: bool = True

    @classmethod
    def seeded(cls, seed: int, mesh: ParallelMesh, *, used_in_step: bool = True) -> RandomStreams:
        """Seeds both streams, the default generator included."""
        torch.manual_seed(stable_seed(seed, "own", mesh.rank))
        shared = torch.Generator(device="cpu" if mesh.device.type == "meta" else mesh.device)
        shared.manual_seed(stable_seed(seed, "shared", mesh.dp.rank, mesh.cp.rank, mesh.pp.rank))
        return cls(mesh.device, shared, used_in_step)

    def state(self) -> dict[str, Tensor]:
        """Returns every generator's state as bytes, for a checkpoint."""
        states = {"cpu": torch.get_rng_state(), "shared": self.tp_shared.get_state()}
        if self.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self.device)
        return states

    def snapshot(self) -> dict[str, Tensor]:
        """Returns the state of both streams inside a step; empty if steps use none, and during the capture of a CUDA graph, where it
        cannot be read: a step that uses them to recompute is not captured."""
        captured = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return self.state() if self.used_in_step and not captured else {}

    @contextmanager
    def at_snapshot(self, snapshot: dict[str, Tensor]) -> Iterator[None]:
        """Sets both streams to a snapshot inside, and restores them afterwards."""
        before = self.snapshot()
        if snapshot:
            self.restore(snapshot)
        try:
            yield
        finally:
            if before:
                self.restore(before)

    def restore(self, states: dict[str, Tensor]) -> None:
        torch.set_rng_state(states["cpu"])
        self.tp_shared.set_state(states["shared"])
        if self.device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], self.device)
