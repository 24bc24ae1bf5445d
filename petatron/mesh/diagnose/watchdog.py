"""A thread that writes a report when its rank hangs, when the launcher requests one, or when another rank has failed.

A collective that some rank never joins ends by the backend's time limit. gloo then raises in the waiting call. NCCL's own watchdog
would end the process with SIGABRT and pages of C++ frames, and no Python would run any more: so this thread ends the process first,
with a report, and NCCL's limit is a little longer (`nccl_options.nccl_timeout`). It writes the report a while before the limit. It
also does so when the launcher has created a file next to the error file, as soon as a rank has failed: then ranks that only wait
for a dead one have a report too, before they are stopped.

Under NCCL the host is not inside a collective: it starts operations and goes on until it needs a result. A hang there looks like a
main thread that starts nothing any more while the device has unfinished work (a long compilation or a slow disk leaves the device
idle). The report has the last operation that was started and where the main thread is. That may be far ahead of the operation that
hangs; which ranks are behind follows from how many collectives each has started (`failure_report.missing_ranks`).

A rank of another machine that fails reports it in the store of the launch (`mesh/launch/rendezvous.py`); this thread polls it and
ends its rank as well. If the store itself is gone, rank 0 is: a rank that then waits in communication waits for ever, and is ended.

A rank that goes on after all removes its report. The training thread does nothing for this but record its communication.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from petatron.base.errors import LaunchError, PeerFailure
from petatron.base.log import get_logger
from petatron.mesh.comm_record import CommEvent, CommRecord, frame_location
from petatron.mesh.diagnose.failure_report import (
    RankReport,
    build_rank_report,
    describe_rank,
    last_operations,
    report_request_path,
)
from petatron.mesh.launch.environment import error_file
from petatron.mesh.launch.rank_exit import write_error_file

_log = get_logger(__name__)
_POLL_S = 1.0
_MARGIN, _MARGIN_S = 0.2, 30.0
_SHORT_S = 15.0


class PeerFailureStore(Protocol):
    """What the watchdog needs of the rendezvous with other machines' ranks."""

    def raise_if_peer_failed(self) -> None:
        """Raises the failure that another rank has reported, and an error of the store where that is gone."""


def _exit_process(code: int) -> None:
    sys.stderr.flush()
    os._exit(code)


class Watchdog:
    """Watches one rank's record while it is entered; does nothing without peers."""

    def __init__(
        self,
        record: CommRecord,
        *,
        timeout_s: float,
        error_path: str | None = None,
        device_busy: Callable[[], bool] | None = None,
        connect_peers: Callable[[], PeerFailureStore] | None = None,
        exit_process: Callable[[int], object] = _exit_process,
    ) -> None:
        """`timeout_s` is the time limit of communication; `error_path` is the error file, default: the launcher's.

        `device_busy` says whether the device has unfinished work, for a backend whose collectives the host does not wait in.
        `connect_peers` connects to the store where ranks of other machines report failures; `exit_process` ends the process.
        """
        self._record, self._timeout_s = record, timeout_s
        self._error_path = error_path or error_file()
        self._device_busy, self._connect_peers, self._exit_process = device_busy, connect_peers, exit_process
        self._peers: PeerFailureStore | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._written_at: int | None = None

    def __enter__(self) -> Watchdog:
        if self._record.has_peers:
            self._thread = threading.Thread(target=self._watch, name="communication watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._remove_report()

    def _watch(self) -> None:
        while not self._stop.wait(min(_POLL_S, self._timeout_s / 20)):
            if self._written_at is not None and self._written_at != self._record.count:
                self._remove_report()
            stalled_s, limit_s = self._stalled_and_limit_s()
            is_late = stalled_s > limit_s - min(_MARGIN_S, _MARGIN * limit_s)
            is_requested = self._error_path is not None and report_request_path(self._error_path).exists()
            if self._written_at is None and (is_late or is_requested):
                self._write_report()
            if self._device_busy is not None and self._waiting_event() is None and stalled_s > limit_s:
                self._exit_process(1)  # the host is in no call that would raise
            self._check_peers(stalled_s)

    def _write_report(self) -> None:
        self._written_at, report = self._record.count, self.report()
        text = "\n".join([describe_rank(report), *last_operations(report)])
        if self._error_path is None:
            _log.error("%s", text)
        else:
            write_error_file(self._error_path, message=describe_rank(report), text=text, echo=True, report=report)

    def _remove_report(self) -> None:
        if self._written_at is not None and self._error_path is not None:
            Path(self._error_path).unlink(missing_ok=True)
        self._written_at = None

    def _stalled_and_limit_s(self) -> tuple[float, float]:
        """Returns how many seconds this rank has waited for others, and the limit."""
        waiting, latest, now = self._waiting_event(), self._record.latest(), time.monotonic()
        if waiting is not None:
            return now - waiting.started_s, self._record.timeout_of(waiting.axis)
        since_s = 0.0 if latest is None else now - latest.started_s
        if self._device_busy is not None and (since_s < min(_SHORT_S, self._timeout_s / 2) or not self._device_busy()):
            since_s = 0.0  # nothing waits: it computes, compiles, reads
        return since_s, self._timeout_s

    def _waiting_event(self) -> CommEvent | None:
        """Returns the operation that the host is in; of two threads', the one with the shorter limit."""
        inside = [event for event in self._record.events() if event.host_in_call]
        return min(inside, key=lambda event: self._record.timeout_of(event.axis), default=None)

    def _check_peers(self, stalled_s: float) -> None:
        if self._connect_peers is None:
            return
        try:
            self._peers = self._peers or self._connect_peers()
            self._peers.raise_if_peer_failed()
        except PeerFailure as failed:
            self._exit_after_peer_failure(str(failed))
        except (LaunchError, RuntimeError) as gone:  # torch's store errors are RuntimeErrors
            if stalled_s > _SHORT_S:
                self._exit_after_peer_failure(
                    f"The store of rank 0 is gone, and so is rank 0: {str(gone).splitlines()[0]}"
                )

    def _exit_after_peer_failure(self, text: str) -> None:
        """Ends this rank after another one has failed, since nothing else would."""
        report = self.report()
        if self._error_path is None or not write_error_file(
            self._error_path, message=text, text=text, echo=True, report=report
        ):
            _log.error("rank %d ends: %s", self._record.rank, text)
        self._exit_process(1)

    def report(self) -> RankReport:
        """Reports where this rank is now."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        at = None if frame is None else frame_location(frame)
        waiting = self._waiting_event()
        if waiting is not None:
            return build_rank_report(self._record, waiting, state="waiting", main_thread_at=at)
        state = "device" if self._device_busy is not None and self._device_busy() else "idle"
        return build_rank_report(self._record, self._record.latest(), state=state, main_thread_at=at)
