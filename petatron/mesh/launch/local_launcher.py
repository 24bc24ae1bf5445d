"""Starts the ranks of one machine, watches them, and prints one report when one of them fails.

Why not torch's elastic agent: it gives the surviving ranks 30 s before it kills them and mixes every rank's traceback.
Here the first failure ends the run within `grace_s` plus a moment, and the user reads the first cause once.

Signals. Ranks run in a session of their own, so Ctrl-C in a terminal reaches only this process, which forwards it
exactly once: a rank that handles it as "save and exit" is not interrupted again while saving, and may take as long as it needs.
A second Ctrl-C means "now", and kills; so does a second SIGTERM, a moment after it has been forwarded for ranks to say what is lost.
SIGHUP (a closed terminal) is forwarded as SIGTERM. A run that a signal ended before its
ranks could end by themselves has the exit code 128 + that signal, however its ranks died.

Orphans. If this process is killed in a way nothing can catch, the kernel kills the ranks (PR_SET_PDEATHSIG, Linux);
ranks that train on with no one to stop them would occupy the devices for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from petatron.base.errors import LaunchError
from petatron.base.loopback_address import is_default_loopback
from petatron.base.terminal_escape import escaped_output, raw_stream
from petatron.mesh.diagnose import failure_report
from petatron.mesh.launch.environment import RankEnvironment, rank_variables, secret_from_env
from petatron.mesh.launch.received_signals import ReceivedSignals
from petatron.mesh.launch.scratch_folder import RANKS_PREFIX, scratch_folder

POLL_INTERVAL_S = 0.05
TERMINATE_GRACE_S = 2.0
PR_SET_PDEATHSIG = 1


def run_ranks(
    command: Sequence[str],
    *,
    nproc: int,
    nnodes: int = 1,
    node_rank: int = 0,
    master_addr: str = "127.0.0.1",
    master_port: int | None = None,
    grace_s: float = 3.0,
    interactive: bool = False,
) -> int:
    """Runs `command` once per local rank and returns the exit code: 0, the first failure's, or 128 + the signal that ended it.

    `interactive`: rank 0 reads this process's input, and every Ctrl-C is forwarded to it alone, which decides what to stop.
    """
    environments = _rank_environments(
        nproc=nproc, nnodes=nnodes, node_rank=node_rank, master_addr=master_addr, master_port=master_port
    )
    with scratch_folder(RANKS_PREFIX) as folder:
        if nnodes == 1:
            meeting = {"store_file": str(folder / "store")}
        else:
            given = secret_from_env()  # else rank 0 writes one under this name, and the others read it
            name = None if given else f"{master_addr}-{master_port}".replace("/", "_")
            meeting = {"secret": given, "secret_name": name}
        environments = [replace(environment, **meeting) for environment in environments]
        ranks: list[RankProcess] = []
        with _forward_signals(ranks, interactive=interactive) as received:
            try:
                for environment in environments:
                    reads = interactive and environment.rank == 0
                    error_file = folder / f"rank-{environment.rank}.json"
                    ranks.append(
                        _start_rank(command, environment, error_file, stdin=None if reads else subprocess.DEVNULL)
                    )
                first = _wait_for_ranks(ranks, grace_s=grace_s)
            finally:
                _stop_ranks(ranks)
        if nnodes > 1 and first is not None:
            _notify_other_nodes(first, environments)
        with escaped_output():  # reports of failed ranks may contain untrusted text
            return _report_and_exit_code(ranks, first, received, world_size=environments[0].world_size)


@dataclass(slots=True)
class RankProcess:
    """One child process and its error file."""

    rank: int
    process: subprocess.Popen[bytes]
    error_file: Path
    ended_at: float | None = None
    """When we first saw that it had ended (unix time)."""
    stopped_by_launcher: bool = False
    """Whether we ended it because another rank failed."""

    def running(self) -> bool:
        if self.ended_at is None and self.process.poll() is not None:
            self.ended_at = time.time()
        return self.ended_at is None


def _rank_environments(
    *, nproc: int, nnodes: int, node_rank: int, master_addr: str, master_port: int | None
) -> list[RankEnvironment]:
    if nproc < 1:
        raise LaunchError(f"--nproc-per-node {nproc} starts no rank. Give at least 1.")
    if not 0 <= node_rank < nnodes:
        raise LaunchError(f"--node-rank {node_rank} is not below --nnodes {nnodes}. Machines count from 0.")
    if master_port is None and nnodes > 1:
        raise LaunchError(f"--nnodes {nnodes} needs --master-port: all machines must agree on it. Try 29500.")
    if nnodes > 1 and is_default_loopback(master_addr):
        raise LaunchError(
            f"--nnodes {nnodes} needs --master-addr: {master_addr} means a different machine on each of them. "
            "Give the name or address of the machine with --node-rank 0."
        )
    if master_port is None:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("127.0.0.1", 0))
            master_port = int(probe.getsockname()[1])
    return [
        RankEnvironment(
            rank=node_rank * nproc + local_rank,
            local_rank=local_rank,
            world_size=nnodes * nproc,
            local_world_size=nproc,
            master_addr=master_addr,
            master_port=master_port,
            launcher="petatron",
        )
        for local_rank in range(nproc)
    ]


def _notify_other_nodes(first: RankProcess, environments: Sequence[RankEnvironment]) -> None:
    """Notifies other machines of a rank that was killed and could not itself; where rank 0 is gone, peers notice the lost store."""
    place = next(environment for environment in environments if environment.rank == first.rank)
    if first.process.returncode >= 0 or first.rank == 0 or place.secret is None:
        return
    from petatron.mesh.launch import rendezvous

    rendezvous.notify_peers(place, f"It was ended by {signal.Signals(-first.process.returncode).name}.")


def _start_rank(
    command: Sequence[str], environment: RankEnvironment, error_file: Path, *, stdin: int | None = subprocess.DEVNULL
) -> RankProcess:
    try:
        process = subprocess.Popen(
            list(command),
            env=rank_variables(environment, error_file=str(error_file)),
            stdin=stdin,
            start_new_session=True,
            preexec_fn=_die_with_parent(),
        )
    except OSError as error:
        raise LaunchError(f"Cannot start rank {environment.rank} with {command[0]!r}: {error}.") from error
    return RankProcess(rank=environment.rank, process=process, error_file=error_file)


def _die_with_parent() -> Callable[[], None] | None:
    """Returns a hook for the child, between fork and exec, that makes the kernel kill it when this process is gone."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)  # loaded here: between fork and exec as little as possible should happen
    parent = os.getpid()

    def hook() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before prctl took effect
            os._exit(1)

    return hook


@contextlib.contextmanager
def _forward_signals(ranks: list[RankProcess], *, interactive: bool = False) -> Iterator[ReceivedSignals]:
    """Forwards SIGINT, SIGTERM and SIGHUP to the ranks while open; a second one ends them at once, unless rank 0 decides."""
    received = ReceivedSignals()
    if threading.current_thread() is not threading.main_thread():
        yield received  # only the main thread may install handlers
        return

    def handle(number: int, _frame: FrameType | None) -> None:
        already = bool(received.signals)
        received.add(signal.Signals(number))
        if interactive and number == signal.SIGINT:
            _signal_all(ranks[:1], signal.SIGINT)
        elif received.killing and number != signal.SIGINT:
            _signal_all(ranks, signal.SIGTERM)
            kill = threading.Timer(TERMINATE_GRACE_S, _signal_all, (ranks, signal.SIGKILL))
            kill.daemon = True
            kill.start()
        elif received.killing:
            _signal_all(ranks, signal.SIGKILL)
        elif not already:
            _signal_all(ranks, signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    # nohup, and shells that start background jobs, ignore signals on purpose.
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    wanted = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in wanted}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal_all(ranks: Sequence[RankProcess], number: signal.Signals) -> None:
    for rank in ranks:
        if rank.running():
            rank.process.send_signal(number)


def _wait_for_ranks(ranks: Sequence[RankProcess], *, grace_s: float) -> RankProcess | None:
    """Waits until all ranks ended well (None), or one failed and the others had `grace_s` to end by themselves."""
    first: RankProcess | None = None
    deadline = float("inf")
    while _num_running(ranks) and time.monotonic() < deadline:
        if first is None:
            first = _first_failed(ranks)
            if first is not None:
                deadline = time.monotonic() + grace_s
                failure_report.report_request_path(first.error_file).touch()
        time.sleep(POLL_INTERVAL_S)
    return first or _first_failed(ranks)


def _num_running(ranks: Sequence[RankProcess]) -> int:
    return sum(rank.running() for rank in ranks)  # a sum, not any(): it polls every rank


def _first_failed(ranks: Sequence[RankProcess]) -> RankProcess | None:
    failed = [rank for rank in ranks if rank.process.returncode not in (None, 0)]
    return min(failed, key=lambda rank: rank.ended_at or 0.0, default=None)


def _stop_ranks(ranks: Sequence[RankProcess]) -> None:
    """Sends SIGTERM, then SIGKILL after a grace period, and reaps; a rank that has ended is left alone."""
    for rank in ranks:
        rank.stopped_by_launcher = rank.running()
    _signal_all(ranks, signal.SIGTERM)
    deadline = time.monotonic() + TERMINATE_GRACE_S
    while _num_running(ranks) and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL_S)
    _signal_all(ranks, signal.SIGKILL)
    for rank in ranks:
        rank.process.wait()


def _report_and_exit_code(
    ranks: Sequence[RankProcess], first: RankProcess | None, received: ReceivedSignals, *, world_size: int
) -> int:
    """Returns the exit code of the run, after printing a report if it failed."""
    if first is None:
        return 0
    if sys.stderr.isatty():
        raw_stream(sys.stderr).write("\x1b[?25h")  # a killed rank may have left the cursor hidden
    if received.caused_exit(first.process.returncode):
        names = " and ".join(dict.fromkeys(number.name for number in received.signals))
        _say(f"Stopped by {names} before the run could end by itself.")
        return received.exit_code
    culprit, report, gave_up = _root_cause(ranks)
    if report and all((rank_report := _read_report(rank.error_file)) and rank_report.text == report for rank in ranks):
        _say(report)  # every rank has the same error: it is the input's, not a rank's
        return _exit_code(culprit)
    stopped = sum(rank.stopped_by_launcher for rank in ranks)
    followed = sum(rank.process.returncode != 0 and not rank.stopped_by_launcher for rank in ranks) - 1
    outcome = "gave up" if gave_up else "failed"
    _say(f"\nRank {culprit.rank} of {world_size} {outcome} first{_exit_description(culprit)}")
    if report:
        _say(f"\n{report}\n")
    reports = [rank_report for rank in ranks if (rank_report := _read_report(rank.error_file)) is not None]
    communication = [rank_report.communication for rank_report in reports if rank_report.communication is not None]
    for line in failure_report.combine_reports(communication, failed_rank=culprit.rank):
        _say(line)
    others = [f"{stopped} stopped"] * bool(stopped) + [f"{followed} failed after it"] * bool(followed)
    if others:
        _say(f"Other ranks on this machine: {', '.join(others)}.")
    return _exit_code(culprit)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _root_cause(ranks: Sequence[RankProcess]) -> tuple[RankProcess, str, bool]:
    """Returns the rank that failed first, its text, and whether it only gave up waiting for another.

    An error of its own beats a death without report, because NCCL's watchdog aborts ranks whose peer failed; both beat
    a report of a broken connection. Within a class the earliest wins.
    """
    causes: list[tuple[int, float, RankProcess, str]] = []
    for rank in ranks:
        if rank.stopped_by_launcher or rank.process.returncode == 0:
            continue
        report = _read_report(rank.error_file)
        if report is None or (report.waiting and rank.process.returncode not in (1, -signal.SIGABRT)):
            causes.append((1, rank.ended_at or 0.0, rank, ""))
        else:
            causes.append((2 if report.echo else 0, report.time, rank, report.text))
    kind, _, culprit, text = min(causes, key=lambda cause: cause[:2])
    return culprit, text, kind == 2


@dataclass(frozen=True, slots=True)
class RankErrorReport:
    """The report of a failed rank, or of one that waits for it."""

    text: str
    time: float
    echo: bool
    communication: failure_report.RankReport | None = None

    @property
    def waiting(self) -> bool:
        """Whether it was written from outside the rank's main thread, which may have ended later."""
        return self.communication is not None and self.communication["state"] != "failed"


def _read_report(path: Path) -> RankErrorReport | None:
    try:
        details = json.loads(path.read_text())["message"]["extraInfo"]
        return RankErrorReport(
            text=details["py_callstack"],
            time=float(details.get("time", details["timestamp"])),
            echo=bool(details.get("echo")),
            communication=details.get("communication"),
        )
    except (OSError, ValueError, KeyError, TypeError):  # it died while writing, or never wrote
        return None


def _exit_description(rank: RankProcess) -> str:
    code = rank.process.returncode
    if code >= 0:
        return ":" if rank.error_file.exists() else f", with exit code {code} and no report."
    hint = " The kernel does that when memory runs out." if -code == signal.SIGKILL else ""
    return f": it was ended by {signal.Signals(-code).name}.{hint}"


def _exit_code(rank: RankProcess) -> int:
    code = rank.process.returncode
    return 128 - code if code < 0 else code
