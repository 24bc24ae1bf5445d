"""One set of ranks, many process groups in turn: for running layout after layout without starting processes again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from petatron.mesh.launch import Environment

_PATIENCE = timedelta(hours=6)


class Rendezvous:
    """Where the ranks of one launch meet. Rank 0 is the host and a member of every group."""

    def __init__(self, environment: Environment) -> None:
        self.rank = environment.rank
        self._world_size = environment.world_size
        address, port = environment.master_addr, environment.master_port
        self._store = dist.TCPStore(address, port, is_master=self.rank == 0, timeout=timedelta(minutes=5))

    @contextmanager
    def group(self, name: str, world_size: int, *, timeout_minutes: float) -> Iterator[None]:
        """While open, the first `world_size` ranks form a gloo process group of their own; rank 0 leaves it last.

        Ranks wait for rank 0 as long as it takes, since it may have work of its own between two groups; once it is
        there, they wait for each other, and in every collective, only `timeout_minutes`. After a failure the group is
        left as it is: taking it down could wait for ranks that are gone, and the process is to end anyway.
        """
        assert self.rank < world_size, "only members may join"
        if world_size == 1:
            yield
            return
        store, timeout = dist.PrefixStore(name, self._store), timedelta(minutes=timeout_minutes)
        if self.rank == 0:
            store.set("open", "")
        else:
            store.wait(["open"], _PATIENCE)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=world_size, timeout=timeout)
        yield
        self._gather(store, "left", world_size, timeout)
        dist.destroy_process_group()

    def close(self) -> None:
        """The host may only go when no rank needs it any more."""
        self._gather(self._store, "closed", self._world_size, _PATIENCE)

    def _gather(self, store: dist.Store, word: str, world_size: int, timeout: timedelta) -> None:
        """Every rank says the word; rank 0 waits until all have."""
        store.set(f"{word}-{self.rank}", "")
        if self.rank == 0:
            store.wait([f"{word}-{rank}" for rank in range(world_size)], timeout)
