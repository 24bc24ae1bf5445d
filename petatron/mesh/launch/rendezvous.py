"""The rendezvous of a launch: a store that all ranks reach, a roll call, and reports of ranks that failed.

Ranks that our launcher starts on one machine share a file in its private folder (`RankEnvironment.store_file`); others share a TCP store
that rank 0, or torchrun's agent, hosts at the master address. Whoever reaches that address can write into the store, so ranks prove
by a shared secret (`shared_secret.py`) that they belong to the run, and authenticate their failure reports by it.

The roll call comes first, so that a rank that never starts is named, and a rank that fails before it joins ends the others at once
instead of leaving them waiting for the time limit. Such a rank writes its failure to the store (`report_failure`); rank 0, which hosts
the store, stays until all have read it, or a few seconds. Later the watchdog of every rank polls for it.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from petatron.base.errors import LaunchError, PeerFailure
from petatron.base.log import get_logger
from petatron.base.safe_files import is_private_folder
from petatron.mesh.diagnose.failure_report import format_ranks
from petatron.mesh.launch.environment import SECRET, STORE_FILE, RankEnvironment, set_default_variables
from petatron.mesh.launch.shared_secret import compute_hmac, secret_folder, verify_hmac, wait_for_secret, write_secret

_log = get_logger(__name__)
_GROUP_TIMEOUT = timedelta(hours=6)
_LINGER_S = 10.0
_NOTICE_S = 30.0
_POLL_S = (0.01, 1.0)
_MAX_TEXT_CHARS = 4_000


class Rendezvous:
    """The store of a launch, as seen by one rank. Rank 0 is a member of every group and leaves last."""

    def __init__(self, environment: RankEnvironment, *, timeout: timedelta = timedelta(minutes=5)) -> None:
        """`timeout` is how long to wait for the host of the store."""
        self.rank = environment.rank
        self._environment, self._world_size = environment, environment.world_size
        self._missing_ranks, self._refused = set(range(1, self._world_size)), set[str]()
        try:
            self._secret = _secret_of(environment, timeout_s=timeout.total_seconds())
            if self.rank == 0:
                self._export_secret()
            self.store = _open_store(environment, timeout)
        except dist.DistError as error:
            raise LaunchError(
                f"Rank {self.rank} of {self._world_size} could not join the others at {self._address}: "
                f"{str(error).splitlines()[0]} Check that every rank was started, that the address reaches rank 0's machine "
                "and that the port is free there."
            ) from error

    @property
    def _address(self) -> str:
        return self._environment.store_file or f"{self._environment.master_addr}:{self._environment.master_port}"

    def wait_for_all_ranks(self, timeout: timedelta) -> None:
        """Returns when all ranks are here and have proven that they belong to this run; raises when one has failed, or when some have
        not arrived in time."""
        if self.rank == 0:
            self.store.set("nonce", secrets.token_hex(16))
        started, pause, notice_s = time.monotonic(), _POLL_S[0], _NOTICE_S
        while not (self._all_admitted() if self.rank == 0 else self._admitted()):
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
        self._export_secret()
        if self.rank == 0 and self._environment.secret_name is not None:
            (secret_folder() / self._environment.secret_name).unlink(missing_ok=True)

    def _export_secret(self) -> None:
        """Exports the secret for other users of the store in this process, such as the watchdog."""
        if self._secret:
            set_default_variables({SECRET: self._secret})

    def _admitted(self) -> bool:
        """On every rank but the first: announces this rank, and returns whether rank 0 has admitted all."""
        if not self.store.check(["nonce"]):
            return False
        nonce = self._read("nonce")
        with contextlib.suppress(
            LaunchError
        ):  # an earlier run may have left another secret, which is gone once all are admitted
            self._secret = _secret_of(self._environment, timeout_s=0.0)
        own = f"present/{self.rank}", compute_hmac(self._secret, nonce, "rank", self.rank, self._world_size)
        if not self.store.check([own[0]]) or self._read(own[0]) != own[1]:
            self.store.set(*own)
        digest = self._read("admitted") if self.store.check(["admitted"]) else ""
        return verify_hmac(digest, self._secret, nonce, "admitted", self._world_size)

    def _all_admitted(self) -> bool:
        """On rank 0: returns whether all others are here; a process without the secret neither counts nor blocks the real rank."""
        nonce = self._read("nonce")
        for rank in sorted(self._missing_ranks):
            if not self.store.check([f"present/{rank}"]):
                continue
            digest = self._read(f"present/{rank}")
            if verify_hmac(digest, self._secret, nonce, "rank", rank, self._world_size):
                self._missing_ranks.remove(rank)
            elif digest not in self._refused:
                self._refused.add(digest)
                _log.warning("somebody without the secret of this run says to be rank %d, and is not admitted", rank)
        if self._missing_ranks:
            return False
        self.store.set("admitted", compute_hmac(self._secret, nonce, "admitted", self._world_size))
        return True

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
        text = text[-_MAX_TEXT_CHARS:]
        failure = {"rank": self.rank, "text": text, "proof": compute_hmac(self._secret, "failed", self.rank, text)}
        self.store.compare_set("failed", "", json.dumps(failure))
        self._acknowledge()

    def first_failure(self) -> str | None:
        """Returns the report of the first rank that failed, if any."""
        if not self.store.check(["failed"]):
            return None
        try:
            failure = json.loads(self._read("failed"))
            rank, text, digest = int(failure["rank"]), str(failure["text"]), str(failure["proof"])
        except (ValueError, KeyError, TypeError):
            return None
        return (
            f"Rank {rank} of {self._world_size} failed:\n{text}"
            if verify_hmac(digest, self._secret, "failed", rank, text)
            else None
        )

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

    def process_group_store(self) -> dist.Store:
        """Returns the store of process groups, after the roll call: under a name that requires the secret."""
        return dist.PrefixStore(compute_hmac(self._secret, self._read("nonce"), "groups"), self.store)

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
        store, timeout = dist.PrefixStore(name, self.store), timedelta(minutes=timeout_minutes)
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


def _secret_of(environment: RankEnvironment, *, timeout_s: float) -> str:
    """Returns the secret; empty where ranks share only a private file, or torchrun."""
    if environment.secret is not None or environment.secret_name is None:
        return environment.secret or ""
    if environment.rank == 0:
        return write_secret(environment.secret_name, secret_folder())
    return wait_for_secret(environment.secret_name, secret_folder(), timeout_s=timeout_s)


def _open_store(environment: RankEnvironment, timeout: timedelta) -> dist.Store:
    if environment.store_file is not None:
        if not is_private_folder(Path(environment.store_file).parent):
            raise LaunchError(
                f"The folder of {environment.store_file} ({STORE_FILE}) is open to other users, who could pass for a rank. "
                "Its mode has to be 0700, and its owner you."
            )
        store: dist.Store = dist.FileStore(environment.store_file)
    else:
        attempt, address, port = environment.restart_count, environment.master_addr, environment.master_port
        hosts = environment.rank == 0 and attempt is None
        # Several stores of one process share a server. Nothing waits here: the roll call does, and can name missing ranks.
        store = dist.TCPStore(
            address, port, is_master=hosts, timeout=timeout, multi_tenant=True, wait_for_workers=False
        )
        if attempt is not None:  # the agent's own entries are in the same store
            store = dist.PrefixStore(f"petatron/attempt-{attempt}", store)
    store.set_timeout(timeout)
    return store


def notify_peers(environment: RankEnvironment, text: str) -> None:
    """Reports a failure to ranks that no launcher of this machine would end; a best effort that takes some seconds at most.

    On one machine the launcher ends them; across machines, or under srun, nothing might.
    """
    try:
        Rendezvous(environment, timeout=timedelta(seconds=_LINGER_S)).report_failure(text)
    except (LaunchError, dist.DistError, OSError, RuntimeError) as error:
        _log.debug("the other ranks could not be told: %s", error)
