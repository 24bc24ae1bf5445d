"""`ParallelMesh`: the named axes of this rank, built once from a layout and passed down.

An axis of size 1 has no process group, and every collective over it is the identity; so a single process needs no process
group at all, and no code asks whether a kind of parallelism is on.

Communicators. A process group is one NCCL communicator, and calls on one communicator run in order. So
  - axes over the same ranks share a group, but the axes whose collectives overlap everything else (`_AXES_WITH_OWN_COMMUNICATOR`)
    have groups of their own;
  - each neighbor of a pipeline rank has two groups of two ranks, one per direction (`Axis.channel`): a transfer waits for its peer
    only, never behind a transfer to another rank (`tests/nccl_rules/pipeline_program.py` proves that this cannot deadlock, and what the
    alternatives cost);
  - a group is created on first use, so unused ones do not exist. Under NCCL creating one is a rendezvous of its members, so
    `create_groups` creates all groups of a run at once, in one order, before the first step.

The default process group is gloo's in any case: it moves host memory, connects pairs on demand, and serves the control axis; device
memory moves over groups of `backend`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from petatron.base.format_text import count_with_noun
from petatron.config.nccl_communicators import CommunicatorOptions
from petatron.mesh.comm_record import CONTROL_AXES, CommRecord, Communicator
from petatron.mesh.launch.nccl_options import nccl_options, nccl_timeout
from petatron.mesh.launch.process_group import new_group
from petatron.mesh.rank_layout import AXES, Layout

_CONTROL_TIMEOUT = timedelta(hours=6)
_AXES_WITH_OWN_COMMUNICATOR = ("dp_cp", "shard", "edp", "edp_shard", *CONTROL_AXES)


@dataclass(frozen=True, slots=True)
class Axis:
    """One named axis as seen from one rank: its size, this rank's index on it, and its process group."""

    name: str
    size: int
    rank: int
    ranks: tuple[int, ...]
    open_group: Callable[[Axis], dist.ProcessGroup] | None = field(repr=False, compare=False)
    """Creates the process group on first use; None for an axis without communication."""
    record: CommRecord = field(repr=False, compare=False)
    communicator_name: str = ""
    """The name of a communicator that no other axis of the same ranks shares."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of the axis; None for a single rank."""
        return None if self.open_group is None or self.size == 1 else self.open_group(self)

    @property
    def communicator(self) -> Communicator:
        """The communicator: axes of the same ranks share one, but for those that have their own."""
        return Communicator(
            self.communicator_name or (self.name if self.name in _AXES_WITH_OWN_COMMUNICATOR else ""), self.ranks
        )

    def alone(self) -> Axis:
        """Returns an axis of this rank alone, for state that is not sharded over the axis."""
        return Axis(self.name, 1, 0, (self.ranks[self.rank],), None, self.record)

    def channel(self, source: int, destination: int) -> Axis:
        """Returns the axis of two ranks over a communicator for transfers from `source` to `destination` alone."""
        ranks = tuple(sorted((self.ranks[source], self.ranks[destination])))
        name, index = f"{self.name}:{source}>{destination}", ranks.index(self.ranks[self.rank])
        return Axis(self.name, 2, index, ranks, self.open_group, self.record, name)


class ParallelMesh:
    """Every axis of a layout for one rank.

    >>> mesh = ParallelMesh.single()
    >>> mesh.tp.size, mesh.tp.rank, mesh.world.size
    (1, 0, 1)
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        *,
        device: torch.device | None = None,
        backend: str | None = None,
        timeout_minutes: float = 10.0,
        options: CommunicatorOptions | None = None,
        first_rank: int = 0,
        record: CommRecord | None = None,
        label: str = "",
    ) -> None:
        """`backend` moves device memory between the ranks; default: that of the default process group.

        `timeout_minutes` is the time limit of a collective over any axis. `rank` counts from `first_rank` of all that were started: several
        meshes may have some of them each. A second mesh of a rank may share its `record`, with a `label` before the names of axes.
        """
        self.layout = layout
        self.rank = rank
        self.first_rank = first_rank
        self.device = device or torch.device("cpu")
        self.record = record or CommRecord(rank=first_rank + rank)
        self.backend = backend or (dist.get_backend() if dist.is_initialized() else "gloo")
        self._timeout_minutes, self._timeout = timeout_minutes, timedelta(minutes=timeout_minutes)
        self._options = options or CommunicatorOptions()
        self._groups: dict[Communicator, dist.ProcessGroup] = {}
        self._label = f"{label} " if label else ""
        self._set_axes()
        self.control = self._control_axis("control")

    def _set_axes(self, shared: Mapping[str, Axis] | None = None) -> None:
        """Makes the axes of the layout, but for those `shared` that have the same ranks."""
        layout, rank = self.layout, self.first_rank + self.rank
        ranks = {name: tuple(self.first_rank + at for at in layout.group_of(name, self.rank)) for name in AXES}
        # The first and the last pipeline rank share a tied embedding; other ranks are alone.
        ends = ranks["pp"][0], ranks["pp"][-1]
        ranks["ends"] = ends if rank in ends and ends[0] != ends[1] else (rank,)
        same = {name: axis for name, axis in (shared or {}).items() if axis.ranks == ranks[name]}
        self._axes = {name: same[name] if name in same else self._make_axis(name, ranks[name]) for name in ranks}
        self.tp, self.cp, self.dp, self.pp, self.ep = (self[name] for name in ("tp", "cp", "dp", "pp", "ep"))
        self.dp_cp = self["dp_cp"]  # ranks with the same dense weights and different tokens
        self.world = self["world"]

    @classmethod
    def single(cls, device: torch.device | None = None) -> ParallelMesh:
        """Returns the mesh of one process."""
        return cls(Layout(), 0, device=device)

    def with_layout(self, layout: Layout, *, label: str) -> ParallelMesh:
        """Returns the mesh of another layout of the same ranks, for work that never overlaps that of this one.

        Both share axes and communicators of the same ranks, the control axis and the record, where other axes have names with `label`.

        >>> mesh = ParallelMesh(Layout(tp=2, dp_shard=2), 3, backend="fake").with_layout(Layout(tp=4), label="rollout")
        >>> mesh.tp.name, mesh.tp.rank, mesh.dp.size
        ('rollout tp', 3, 1)
        """
        assert layout.world_size == self.layout.world_size, f"{layout} is of other ranks than {self.layout}"
        mesh = copy.copy(self)
        mesh.layout, mesh._label = layout, f"{label} "
        mesh._set_axes(self._axes)
        return mesh

    def of_all_ranks(self, count: int, *, label: str) -> ParallelMesh:
        """Returns a mesh of all ranks that were started, where this one has some of them; every rank calls it.

        Both share the record, where the axes of all ranks have names with `label`.

        >>> mesh = ParallelMesh(Layout(tp=2), 1, first_rank=4, backend="fake")
        >>> mesh.tp.ranks, mesh.of_all_ranks(6, label="all").world.ranks, mesh.of_all_ranks(6, label="all").rank
        ((4, 5), (0, 1, 2, 3, 4, 5), 5)
        """
        return ParallelMesh(
            Layout(dp_shard=count),
            self.first_rank + self.rank,
            device=self.device,
            backend=self.backend,
            timeout_minutes=self._timeout_minutes,
            options=self._options,
            record=self.record,
            label=label,
        )

    def _make_axis(self, name: str, ranks: tuple[int, ...]) -> Axis:
        name = self._label + name
        self.record.register_axis(name, ranks, timeout_s=self._timeout.total_seconds())
        return Axis(name, len(ranks), ranks.index(self.first_rank + self.rank), ranks, self._open_group, self.record)

    def _open_group(self, axis: Axis) -> dist.ProcessGroup:
        """Returns the process group of a communicator; its members alone create it."""
        key = axis.communicator
        group = self._groups.get(key)
        if group is None:
            timeout, device, options = self._timeout, None, None
            if self.backend == "nccl":
                timeout, device = nccl_timeout(self._timeout), self.device
                options = nccl_options(self._options.for_axis(axis.name.removeprefix(self._label)), timeout)
            group = self._groups[key] = new_group(
                key.owner, key.ranks, backend=self.backend, timeout=timeout, device=device, options=options
            )
        return group

    def create_groups(self, axes: Iterable[str]) -> None:
        """Creates the groups of these axes now, in this order on every rank, so that no step waits for a rendezvous.

        For `pp` the channels to both neighbors (and from the last rank to the first) are created as well.
        """
        for name in axes:
            axis = self.axis(name)
            if axis.size == 1:
                continue
            _ = axis.group
            if name == "pp":
                for pair in sorted({(min(r, n), max(r, n)) for r in range(axis.size) for n in [(r + 1) % axis.size]}):
                    if axis.rank in pair:
                        _ = axis.channel(*pair).group, axis.channel(*reversed(pair)).group

    @property
    def communicators(self) -> list[Communicator]:
        """The communicators of the groups created so far."""
        return list(self._groups)

    def background_control_axis(self) -> Axis:
        """Returns a second `control`, for a thread that communicates while the first is in use; every rank must call this."""
        return self._control_axis("background_control")

    def _control_axis(self, name: str) -> Axis:
        """Returns all ranks over a group that moves CPU memory, for control messages that no device should wait for.

        Its time limit is long: ranks wait on it while others write a checkpoint or build an index, which may take long and is no
        hang. A rank that dies breaks its connections, so the others notice at once all the same.
        """
        world = self._axes["world"]
        if world.size == 1 or self.backend == "fake":
            return world
        group = new_group(name, world.ranks, backend="gloo", timeout=_CONTROL_TIMEOUT)
        name = self._label + name
        self.record.register_axis(name, world.ranks, timeout_s=_CONTROL_TIMEOUT.total_seconds())
        return Axis(name, world.size, world.rank, world.ranks, lambda *_: group, self.record, name)

    def single_rank_group(self) -> dist.ProcessGroup:
        """Returns a group of this rank alone, for libraries that need one."""
        return self._open_group(Axis("alone", 1, 0, (self.first_rank + self.rank,), None, self.record))

    def __getitem__(self, name: str) -> Axis:
        return self._axes[name]

    def axis(self, name: str) -> Axis:
        """Returns an axis by name; `tp/2` is the axis of blocks of two of tp, `tp%2` the axis across these blocks."""
        parent, kind, block = re.fullmatch(r"(\w+)(?:([/%])(\d+))?", name).groups()  # pyright: ignore[reportOptionalMemberAccess]
        if kind is None:
            return self[parent]
        return self.blocks(parent, int(block)) if kind == "/" else self.strides(parent, int(block))

    def blocks(self, name: str, block: int) -> Axis:
        """Returns the axis of this rank's block of `block` adjacent ranks of another axis."""
        parent = self._axes[name]
        assert parent.size % block == 0, f"axis {name} of {parent.size} ranks has no blocks of {block}"
        if block == parent.size:
            return parent
        first = parent.rank // block * block
        return self._make_axis(f"{name}/{block}", parent.ranks[first : first + block])

    def strides(self, name: str, block: int) -> Axis:
        """Returns the axis of the ranks with this rank's position in their block of `block` ranks: across `blocks`."""
        parent = self._axes[name]
        assert parent.size % block == 0, f"axis {name} of {parent.size} ranks has no blocks of {block}"
        if block == 1:
            return parent
        return self._make_axis(f"{name}%{block}", parent.ranks[parent.rank % block :: block])

    def describe(self) -> str:
        """Describes the axes larger than one: `tp 2 x dp 4 (8 ranks)`."""
        sizes = [(name, self[name].size) for name in ("tp", "cp", "dp", "pp", "ep")]
        parts = [f"{name} {size}" for name, size in sizes if size > 1]
        return f"{' x '.join(parts) or 'one device'} ({count_with_noun(self.layout.world_size, 'rank')})"
