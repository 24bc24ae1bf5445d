"""The rendezvous of a launch: a store that all ranks reach, a roll call, and reports of ranks that failed.

Who can write to the store belongs to the run: it is a file in the launcher's private folder, or a server that answers only who knows the
secret of the run (`open_rendezvous_store.py`).

The roll call comes first, so that a rank that never starts is named, and a rank that fails before it joins ends the others at once
instead of leaving them waiting for the time limit. Such a rank writes its failure to the store (`report_failure`); rank 0, beside which
the store is, stays until all have read it, or a few seconds. Later the watchdog of every rank polls for it.
"""

from __future__ import annotations

import atexit
import json
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from petatron.base.errors import LaunchError, OtherRunError, PeerFailure
from petatron.base.log import get_logger
from petatron.mesh.diagnose.failure_report import format_ranks
from petatron.mesh.launch.connection_guard import GuardedStore
from petatron.mesh.launch.environment import (
    SECRET,
    RankEnvironment,
    record_joined_store,
    set_default_variables,
    trusted_networks_from_env,
)
from petatron.mesh.launch.nat_and_trusted_networks import describe_translations, plain_address
from petatron.mesh.launch.open_rendezvous_store import open_store
from petatron.mesh.launch.rendezvous_store_client import RendezvousStoreClient
from petatron.mesh.launch.shared_secret import remove_secret

_log = get_logger(__name__)
_GROUP_TIMEOUT = timedelta(hours=6)
_LINGER_S = 10.0
_NOTICE_S = 30.0
_POLL_S = (0.01, 1.0)
_MAX_TEXT_CHARS = 4_000
_TRANSLATED = "translated"


class Rendezvous:
    """The store of a launch, as seen by one rank. Rank 0 is a member of every group and leaves last."""

    def __init__(self, environment: RankEnvironment, *, timeout: timedelta = timedelta(minutes=5)) -> None:
        """`timeout` is how long to wait for the host of the store."""
        self.rank = environment.rank
        self._environment, self._world_size = environment, environment.world_size
        self._missing_ranks, self._num_refused = set(range(1, self._world_size)), 0
        self._trusted_networks, self._group_store = trusted_networks_from_env(), None
        self._token = secrets.token_hex(16)
        try:
            self.store = open_store(environment, timeout)
        except dist.DistError as error:
            raise LaunchError(
                f"Rank {self.rank} of {self._world_size} could not join the others at {self._address}: "
                f"{str(error).splitlines()[0]} Check that every rank was started, that the address reaches rank 0's machine, "
                "that the port is free there and that all ranks have the same secret."
            ) from error
        if self.rank == 0:
            self._export_secret()

    @property
    def _address(self) -> str:
        return self._environment.store_file or f"{self._environment.master_addr}:{self._environment.master_port}"

    def wait_for_all_ranks(self, timeout: timedelta) -> None:
        """Returns when all ranks are here; raises when one has failed, or when some have not arrived in time."""
        started, pause, notice_s = time.monotonic(), _POLL_S[0], _NOTICE_S
        if self.rank:
            self._claim_rank()
            self._report_translation()
            self.store.set(f"present/{self.rank}", str(self._world_size))
        while not (self._all_present() if self.rank == 0 else self.store.check(["admitted"])):
            self.raise_if_peer_failed()
            waited = time.monotonic() - started
            if waited > timeout.total_seconds():
                raise LaunchError(
                    f"Rank {self.rank} of {self._world_size} waited {waited:.0f} s at {self._address} for {self._describe_missing()}. "
                    "Check that every rank was started, and how those ended."
                )
            if self.rank == 0 and waited > notice_s:
                _log.info("waiting for %s (%.0f s)", self._describe_missing(), waited)
                notice_s *= 2
            time.sleep(pause)
            pause = min(_POLL_S[1], 1.5 * pause)
        self._check_admission()
        self._export_secret()
        if self.rank == 0:
            lines = self._read(_TRANSLATED).splitlines() if self.store.check([_TRANSLATED]) else ()
            if (warning := describe_translations(lines, self._trusted_networks)) is not None:
                _log.warning(warning)
            if self._environment.secret_name is not None:
                remove_secret(self._environment.secret_name)

    def _export_secret(self) -> None:
        """Exports the secret for other users of the store in this process, such as the watchdog."""
        if isinstance(self.store, RendezvousStoreClient) and self.store.secret:
            set_default_variables({SECRET: self.store.secret})

    def _all_present(self) -> bool:
        """On rank 0: returns whether all others are here, and tells them so."""
        self._warn_of_strangers()
        for rank in sorted(self._missing_ranks):
            if not self.store.check([f"present/{rank}"]):
                continue
            if (world_size := self._read(f"present/{rank}")) != str(self._world_size):
                raise LaunchError(
                    f"Rank {rank} was started as one of {world_size} ranks, rank 0 as one of {self._world_size}. Start all with the "
                    "same numbers of machines and of ranks per machine."
                )
            self._missing_ranks.remove(rank)
        if self._missing_ranks:
            return False
        self.store.set("random", secrets.token_hex(8))
        self.store.set("admitted", str(self._world_size))
        return True

    def _warn_of_strangers(self) -> None:
        """Warns of connections without the secret: of the first one, and when there are ten times as many."""
        if not isinstance(self.store, RendezvousStoreClient):
            return
        status = self.store.status()
        if status.num_refused >= max(1, 10 * self._num_refused):
            self._num_refused = status.num_refused
            _log.warning(
                "connections without the secret of this run were refused: %d so far, the last one from %s",
                status.num_refused,
                status.last_refused,
            )

    def _claim_rank(self) -> None:
        """Claims the number of this rank: where two runs share a port and a secret, their ranks must not mix."""
        if not isinstance(self.store, RendezvousStoreClient):
            return
        if self.store.compare_set(f"member/{self.rank}", "", self._token) != self._token.encode():
            raise OtherRunError(
                f"Another process is rank {self.rank} at {self._address} already. Two runs with the same secret use this address and port: "
                "choose another one with --master-port or MASTER_PORT, or end the other run."
            )

    def _check_admission(self) -> None:
        """Raises where rank 0 has admitted the ranks of another run; else records which run this process has joined."""
        if not isinstance(self.store, RendezvousStoreClient):
            return
        if (world_size := self._read("admitted")) != str(self._world_size):
            raise OtherRunError(
                f"Rank {self.rank} was started as one of {self._world_size} ranks, and rank 0 at {self._address} as one of {world_size}. "
                "Start all with the same numbers of machines and of ranks per machine, and every run with a port of its own."
            )
        assert self.store.identity is not None
        record_joined_store(self._environment, self.store.identity)

    def _report_translation(self) -> None:
        """Reports to rank 0 where its server sees this rank at another address than its own."""
        if not isinstance(self.store, RendezvousStoreClient):
            return
        local, seen = plain_address(self.store.own_address), plain_address(self.store.status().seen_address)
        if local != seen:
            self.store.append(_TRANSLATED, f"{self.rank} {local} {seen}\n")

    def _read(self, key: str) -> str:
        return self.store.get(key).decode(errors="replace")

    def _describe_missing(self) -> str:
        if self.rank:
            absent = [rank for rank in range(1, self._world_size) if not self.store.check([f"present/{rank}"])] or [0]
        else:
            absent = sorted(self._missing_ranks)
        return f"{'rank' if len(absent) == 1 else 'ranks'} {format_ranks(absent)}"

    def report_failure(self, text: str) -> None:
        """Reports this rank's failure to the others. Only the first report counts."""
        self.store.compare_set("failed", "", json.dumps({"rank": self.rank, "text": text[-_MAX_TEXT_CHARS:]}))
        self._acknowledge()

    def first_failure(self) -> str | None:
        """Returns the report of the first rank that failed, if any."""
        if not self.store.check(["failed"]):
            return None
        failure = json.loads(self._read("failed"))
        return f"Rank {failure['rank']} of {self._world_size} failed:\n{failure['text']}"

    def raise_if_peer_failed(self) -> None:
        """Raises `PeerFailure` if another rank has failed."""
        text = self.first_failure()
        if text is not None:
            self._acknowledge()
            raise PeerFailure(text)

    def _acknowledge(self) -> None:
        """Acknowledges the failure. Rank 0 waits a while for the others: the store may end with it."""
        num_acknowledged, deadline = self.store.add("told", 1), time.monotonic() + _LINGER_S
        while self.rank == 0 and num_acknowledged < self._world_size and time.monotonic() < deadline:
            time.sleep(0.05)
            num_acknowledged = self.store.add("told", 0)

    def random_number(self) -> int:
        """Returns a number of 64 bits that the ranks of this launch know and nobody else; after the roll call."""
        return int(self._read("random"), 16)

    def process_group_store(self) -> dist.Store:
        """Returns the store of process groups, which call it from C++ until this process ends."""
        return dist.PrefixStore("groups", self._guarded_store())

    def _guarded_store(self) -> dist.Store:
        """Returns the store in whose sight gloo connects ranks; one for all groups, since a guard watches until the process ends."""
        if self._group_store is None:
            guarded = sys.platform == "linux"
            self._group_store = GuardedStore(self.store, self._trusted_networks) if guarded else self.store
            # C++ holds no reference to the Python part of a store; this one does, until the process ends.
            atexit.register(id, self._group_store)
        return self._group_store

    @contextmanager
    def process_group(self, name: str, world_size: int, *, timeout_minutes: float) -> Iterator[None]:
        """Opens a gloo process group of the first `world_size` ranks; rank 0 leaves it last.

        Ranks wait for rank 0 as long as it takes, since it may have other work between two groups; once it is there, they wait
        for each other, and in every collective, only `timeout_minutes`. After a failure the group is left as it is: destroying
        it could wait for ranks that are gone, and the process ends anyway.
        """
        assert self.rank < world_size, "only members may join"
        if world_size == 1:
            yield
            return
        store, timeout = dist.PrefixStore(name, self._guarded_store()), timedelta(minutes=timeout_minutes)
        if self.rank == 0:
            store.set("open", "")
        else:
            store.wait(["open"], _GROUP_TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=world_size, timeout=timeout)
        yield
        self._wait_at_first_rank(store, "left", world_size, timeout)
        dist.destroy_process_group()

    def close(self) -> None:
        """Closes the rendezvous: the host leaves when no rank needs the store any more."""
        self._wait_at_first_rank(self.store, "closed", self._world_size, _GROUP_TIMEOUT)

    def _wait_at_first_rank(self, store: dist.Store, key: str, world_size: int, timeout: timedelta) -> None:
        """Sets this rank's key; rank 0 waits until all have."""
        store.set(f"{key}-{self.rank}", "")
        if self.rank == 0:
            store.wait([f"{key}-{rank}" for rank in range(world_size)], timeout)


def notify_peers(environment: RankEnvironment, text: str) -> None:
    """Reports a failure to ranks that no launcher of this machine would end; a best effort that takes some seconds at most.

    On one machine the launcher ends them; across machines, or under srun, nothing might.
    """
    try:
        Rendezvous(environment, timeout=timedelta(seconds=_LINGER_S)).report_failure(text)
    except (LaunchError, dist.DistError, OSError, RuntimeError) as error:
        _log.debug("the other ranks could not be told: %s", error)
