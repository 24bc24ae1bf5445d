"""Where the ranks of a launch find each other: a store that all of them reach, a roll call, and word of a rank that failed.

Ranks that our launcher starts on one machine share a file in its private folder (`Environment.store_file`); others share a TCP store
that rank 0, or torchrun's agent, hosts at the master address.

The roll call comes before anything else, so that a rank that never starts is named, and a rank that fails before it could join ends
the others at once instead of leaving them waiting for the time limit. Such a rank leaves a word in the store (`tell_failure`); rank 0, who
hosts the store, stays until all have read it, or a few seconds. Later on the watchdog of every rank looks for that word.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from petatron.base.errors import LaunchError, PeerFailure
from petatron.base.log import get_logger
from petatron.base.words import counted
from petatron.mesh.failure import rank_list
from petatron.mesh.launch import STORE_FILE, Environment

_log = get_logger(__name__)
_PATIENCE = timedelta(hours=6)
_LINGER_S = 10.0
_NOTICE_S = 30.0
_POLL_S = (0.01, 1.0)
_LONGEST_TEXT = 4_000


class Rendezvous:
    """The store of a launch, seen by one rank. Rank 0 is a member of every group and leaves last."""

    def __init__(self, environment: Environment, *, timeout: timedelta = timedelta(minutes=5)) -> None:
        """`timeout` is how long to wait for whoever hosts the store."""
        self.rank = environment.rank
        self._environment, self._world_size = environment, environment.world_size
        try:
            self.store = _open_store(environment, timeout)
        except dist.DistError as error:
            raise LaunchError(
                f"Rank {self.rank} of {self._world_size} could not join the others at {self._where}: "
                f"{str(error).splitlines()[0]} Check that every rank was started, that the address reaches rank 0's machine "
                "and that the port is free there."
            ) from error

    @property
    def _where(self) -> str:
        return self._environment.store_file or f"{self._environment.master_addr}:{self._environment.master_port}"

    def roll_call(self, timeout: timedelta) -> None:
        """Returns when all ranks are here; raises when one has failed, or when some have not come in time."""
        self.store.set(f"present/{self.rank}", "")
        present, started, pause, notice_s = self.store.add("present", 1), time.monotonic(), _POLL_S[0], _NOTICE_S
        while present < self._world_size:
            self.raise_for_failure()
            waited = time.monotonic() - started
            if waited > timeout.total_seconds():
                raise LaunchError(
                    f"{counted(present, 'rank')} of {self._world_size} came to {self._where} within "
                    f"{waited:.0f} s; missing: {self._missing()}. Check that every rank was started, and how those ended."
                )
            if self.rank == 0 and waited > notice_s:
                _log.info("waiting for %s (%.0f s)", self._missing(), waited)
                notice_s *= 2
            time.sleep(pause)
            pause = min(_POLL_S[1], 1.5 * pause)
            present = self.store.add("present", 0)

    def _missing(self) -> str:
        absent = [rank for rank in range(self._world_size) if not self.store.check([f"present/{rank}"])]
        return f"{'rank' if len(absent) == 1 else 'ranks'} {rank_list(absent)}"

    def tell_failure(self, text: str) -> None:
        """Leave word of this rank's failure for the others. Only the first word counts."""
        self.store.compare_set("failed", "", json.dumps({"rank": self.rank, "text": text[-_LONGEST_TEXT:]}))
        self._acknowledge()

    def failure(self) -> str | None:
        """What the first rank that failed has left."""
        if not self.store.check(["failed"]):
            return None
        told = json.loads(self.store.get("failed"))
        return f"Rank {told['rank']} of {self._world_size} failed:\n{told['text']}"

    def raise_for_failure(self) -> None:
        """If another rank has failed, so does this one."""
        text = self.failure()
        if text is not None:
            self._acknowledge()
            raise PeerFailure(text)

    def _acknowledge(self) -> None:
        """This rank knows of the failure. Rank 0 waits a while for the others: the store may end with it."""
        told, deadline = self.store.add("told", 1), time.monotonic() + _LINGER_S
        while self.rank == 0 and told < self._world_size and time.monotonic() < deadline:
            time.sleep(0.05)
            told = self.store.add("told", 0)

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
        store, timeout = dist.PrefixStore(name, self.store), timedelta(minutes=timeout_minutes)
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
        self._gather(self.store, "closed", self._world_size, _PATIENCE)

    def _gather(self, store: dist.Store, word: str, world_size: int, timeout: timedelta) -> None:
        """Every rank says the word; rank 0 waits until all have."""
        store.set(f"{word}-{self.rank}", "")
        if self.rank == 0:
            store.wait([f"{word}-{rank}" for rank in range(world_size)], timeout)


def _open_store(environment: Environment, timeout: timedelta) -> dist.Store:
    if environment.store_file is not None:
        if not _is_private(environment.store_file):
            raise LaunchError(
                f"The folder of {environment.store_file} ({STORE_FILE}) is open to other users, who could pass for a rank. "
                "Its mode has to be 0700, and its owner you."
            )
        store: dist.Store = dist.FileStore(environment.store_file)
    else:
        attempt, address, port = environment.agent_attempt, environment.master_addr, environment.master_port
        hosts = environment.rank == 0 and attempt is None
        # Several stores of one process share a server. Nobody waits here: the roll call does, and can say for whom.
        store = dist.TCPStore(
            address, port, is_master=hosts, timeout=timeout, multi_tenant=True, wait_for_workers=False
        )
        if attempt is not None:  # the agent's own entries are in the same store
            store = dist.PrefixStore(f"petatron/attempt-{attempt}", store)
    store.set_timeout(timeout)
    return store


def tell_peers(environment: Environment, text: str) -> None:
    """Leave word of a failure for ranks that no launcher of this machine would end; a best effort that takes some seconds at most.

    On one machine the launcher ends them; across machines, or under srun, nobody might.
    """
    try:
        Rendezvous(environment, timeout=timedelta(seconds=_LINGER_S)).tell_failure(text)
    except (LaunchError, dist.DistError, OSError, RuntimeError) as error:
        _log.debug("the other ranks could not be told: %s", error)


def _is_private(path: str) -> bool:
    """Whether only this user may read or change what is in the folder of a file."""
    status = os.lstat(os.path.dirname(path))
    return status.st_uid == os.getuid() and not status.st_mode & 0o077
