"""`ParallelMesh`: the named axes this rank lives on, built once from a layout and handed down.

An axis of size 1 has no process group, and every collective over it is the identity; so a single process needs no process
group at all, and no code asks whether a kind of parallelism is on.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from petatron.base.words import counted
from petatron.mesh.layout import AXES, Layout
from petatron.mesh.record import Record

_PATIENCE = timedelta(hours=6)
_IN_THE_BACKGROUND = ("dp_cp", "shard", "edp", "edp_shard")


@dataclass(frozen=True, slots=True)
class Axis:
    """One named axis seen from one rank: its size, this rank's place on it, and the group to talk over."""

    name: str
    size: int
    rank: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None
    record: Record = field(repr=False, compare=False)


class ParallelMesh:
    """Every axis of a layout for one rank.

    >>> mesh = ParallelMesh.single()
    >>> mesh.tp.size, mesh.tp.rank, mesh.world.size
    (1, 0, 1)
    """

    def __init__(
        self, layout: Layout, rank: int, *, device: torch.device | None = None, timeout_minutes: float = 10.0
    ) -> None:
        """Create the process groups; every rank of the world must call this, in the same order.

        `timeout_minutes` is how long a collective over any axis may wait.
        """
        self.layout = layout
        self.rank = rank
        self.device = device or torch.device("cpu")
        self.record = Record(rank=rank)
        self._timeout = timedelta(minutes=timeout_minutes)
        self._groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        self._axes = {name: self._axis(name, layout.group_of(name, rank)) for name in AXES}
        self.tp, self.cp, self.dp, self.pp, self.ep = (self[name] for name in ("tp", "cp", "dp", "pp", "ep"))
        self.dp_cp = self["dp_cp"]  # ranks that hold the same dense weights and see different tokens
        self._axes["ends"] = self._ends()
        self.world = self["world"]
        self.control = self._control_axis()

    @classmethod
    def single(cls, device: torch.device | None = None) -> ParallelMesh:
        """The mesh of one process."""
        return cls(Layout(), 0, device=device)

    def _axis(self, name: str, ranks: tuple[int, ...]) -> Axis:
        self.record.know(name, ranks, timeout_s=self._timeout.total_seconds())
        return Axis(name, len(ranks), ranks.index(self.rank), ranks, self._group(name, ranks), self.record)

    def _group(self, name: str, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """One process group per set of ranks; only its members take part in making it, so large worlds start fast.

        NCCL runs what one group does in order, so the axes whose gathers and reductions should overlap with everything
        else have groups of their own there.
        """
        if len(ranks) == 1:
            return None
        apart = name in _IN_THE_BACKGROUND and dist.get_backend() == "nccl"
        key = (name if apart else "", ranks)
        if key not in self._groups:
            whole_world = len(ranks) == self.layout.world_size and not apart
            make = partial(dist.new_group, list(ranks), use_local_synchronization=True, timeout=self._timeout)
            self._groups[key] = dist.group.WORLD if whole_world else make()  # pyright: ignore[reportArgumentType]
        return self._groups[key]

    def another_control(self) -> Axis:
        """A second `control`, for a thread that talks while the first is in use; every rank must call this."""
        return self._control_axis()

    def _control_axis(self) -> Axis:
        """All ranks over a group that moves CPU memory, for questions that no device should wait for.

        It is patient: ranks wait on it while others write a checkpoint or build an index, which may take long and is no
        hang. A rank that dies breaks its connections, so the others notice at once all the same.
        """
        world = self._axes["world"]
        if world.group is None or dist.get_backend() == "fake":
            return world
        self.record.know("control", world.ranks, timeout_s=_PATIENCE.total_seconds())
        return replace(world, name="control", group=dist.new_group(backend="gloo", timeout=_PATIENCE))

    def __getitem__(self, name: str) -> Axis:
        return self._axes[name]

    def _ends(self) -> Axis:
        """The first and the last pipeline rank, which share a tied embedding; every other rank is alone."""
        first, last = self.pp.ranks[0], self.pp.ranks[-1]
        together = first != last and self.rank in (first, last)
        return self._axis("ends", (first, last) if together else (self.rank,))

    def axis(self, name: str) -> Axis:
        """An axis by name; `tp/2` is the axis of blocks of two of tp."""
        parent, _, block = name.partition("/")
        return self.blocks(parent, int(block)) if block else self[parent]

    def blocks(self, name: str, block: int) -> Axis:
        """The axis of `block` neighbouring ranks of another axis that this rank is one of."""
        parent = self._axes[name]
        assert parent.size % block == 0, f"axis {name} of {parent.size} ranks has no blocks of {block}"
        if block == parent.size:
            return parent
        first = parent.rank // block * block
        return self._axis(f"{name}/{block}", parent.ranks[first : first + block])

    def strides(self, name: str, block: int) -> Axis:
        """The axis of the ranks that have this rank's place in their block of `block` neighbours: across `blocks`."""
        parent = self._axes[name]
        assert parent.size % block == 0, f"axis {name} of {parent.size} ranks has no blocks of {block}"
        if block == 1:
            return parent
        return self._axis(f"{name}%{block}", parent.ranks[parent.rank % block :: block])

    def describe(self) -> str:
        """`tp 2 x dp 4 (8 ranks)`: the dimensions that are larger than one."""
        sizes = [(name, self[name].size) for name in ("tp", "cp", "dp", "pp", "ep")]
        parts = [f"{name} {size}" for name, size in sizes if size > 1]
        return f"{' x '.join(parts) or 'one device'} ({counted(self.layout.world_size, 'rank')})"
