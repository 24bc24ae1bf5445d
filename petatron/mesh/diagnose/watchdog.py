"""A thread that leaves a report when its rank hangs, when the launcher asks for one, or when a rank elsewhere has failed.

A collective that some rank never joins ends by the backend's time limit. gloo raises in the waiting call then. NCCL's own watchdog would
end the process with SIGABRT and pages of C++ frames, and no Python would run any more: so this thread ends the process first, with
a report, and NCCL's limit is a little longer (`nccl.backstop`). It writes the report a while before the limit. It also does so when the
launcher has put a file beside the error file, which it does as soon as a rank has failed: then ranks that only wait for a dead one
have a report too, before they are stopped.

Under NCCL the host is not inside a collective: it starts operations and goes on until it needs a result. What this thread sees of a
hang there is a main thread that starts nothing any more while the device has unfinished work (a long compilation or a slow disk leaves
the device idle). It tells the last operation that was started and the place in the program where the main thread is. That may be far
ahead of the operation that hangs; which ranks are behind is told by comparing how many collectives each has started
(`failure.absent`).

A rank of another machine that fails leaves word in the store of the launch (`mesh/launch/rendezvous.py`); this thread looks for it and
ends its rank as well. If the store itself is gone, rank 0 is: whoever waits in communication then waits for ever, and is ended too.

A rank that goes on after all withdraws its report. Nothing is asked of the training thread but what the record holds anyway.
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
from petatron.mesh.comm_record import Event, Record, place_of
from petatron.mesh.diagnose.failure_report import Report, before, report_of, request, sentence
from petatron.mesh.launch.environment import error_file, write_error_file

_log = get_logger(__name__)
_POLL_S = 1.0
_MARGIN, _MARGIN_S = 0.2, 30.0
_SHORT_S = 15.0


class Peers(Protocol):
    """What the watchdog asks the rendezvous of other machines' ranks."""

    def raise_for_failure(self) -> None:
        """Raises what another rank has left, and an error of the store where that is gone."""


def _end_process(code: int) -> None:
    sys.stderr.flush()
    os._exit(code)


class Watchdog:
    """Watches one rank's record while it is entered; does nothing without peers."""

    def __init__(
        self,
        record: Record,
        *,
        timeout_s: float,
        path: str | None = None,
        busy: Callable[[], bool] | None = None,
        peers: Callable[[], Peers] | None = None,
        end: Callable[[int], object] = _end_process,
    ) -> None:
        """`timeout_s` is how long communication may take; `path` is the error file, else the one that the launcher named.

        `busy` says whether the device has unfinished work, for a backend whose collectives the host does not wait in. `peers` connects
        to where ranks of other machines leave word; `end` ends the process.
        """
        self._record, self._timeout_s = record, timeout_s
        self._path = path or error_file()
        self._busy, self._connect, self._end = busy, peers, end
        self._peers: Peers | None = None
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
            self._withdraw()

    def _watch(self) -> None:
        while not self._stop.wait(min(_POLL_S, self._timeout_s / 20)):
            if self._written_at is not None and self._written_at != self._record.count:
                self._withdraw()
            stalled_s, limit_s = self._stalled()
            if self._written_at is None and (stalled_s > limit_s - min(_MARGIN_S, _MARGIN * limit_s) or self._asked()):
                self._write()
            if self._busy is not None and self._waiting() is None and stalled_s > limit_s:
                self._end(1)  # the host is in no call that would raise
            self._look_for_failures(stalled_s)

    def _asked(self) -> bool:
        return self._path is not None and request(self._path).exists()

    def _write(self) -> None:
        self._written_at, report = self._record.count, self.report()
        text = "\n".join([sentence(report), *before(report)])
        if self._path is None:
            _log.error("%s", text)
        else:
            write_error_file(self._path, message=sentence(report), text=text, echo=True, report=report)

    def _withdraw(self) -> None:
        if self._written_at is not None and self._path is not None:
            Path(self._path).unlink(missing_ok=True)
        self._written_at = None

    def _stalled(self) -> tuple[float, float]:
        """For how many seconds this rank has waited for others, and how many that may be."""
        waiting, latest, now = self._waiting(), self._record.latest(), time.monotonic()
        if waiting is not None:
            return now - waiting.begun_s, self._record.timeout_of(waiting.axis)
        since_s = 0.0 if latest is None else now - latest.begun_s
        if self._busy is not None and (since_s < min(_SHORT_S, self._timeout_s / 2) or not self._busy()):
            since_s = 0.0  # nothing waits: it computes, compiles, reads
        return since_s, self._timeout_s

    def _waiting(self) -> Event | None:
        """The operation that the host is in; of two threads', the one that may take less long."""
        inside = [event for event in self._record.events() if event.inside]
        return min(inside, key=lambda event: self._record.timeout_of(event.axis), default=None)

    def _look_for_failures(self, stalled_s: float) -> None:
        if self._connect is None:
            return
        try:
            self._peers = self._peers or self._connect()
            self._peers.raise_for_failure()
        except PeerFailure as failed:
            self._give_up(str(failed))
        except (LaunchError, RuntimeError) as gone:  # torch's store errors are RuntimeErrors
            if stalled_s > _SHORT_S:
                self._give_up(f"The store of rank 0 is gone, and so is rank 0: {str(gone).splitlines()[0]}")

    def _give_up(self, text: str) -> None:
        """Another rank has failed and nobody else would end this one."""
        report = self.report()
        if self._path is None or not write_error_file(self._path, message=text, text=text, echo=True, report=report):
            _log.error("rank %d ends: %s", self._record.rank, text)
        self._end(1)

    def report(self) -> Report:
        """Where this rank is now."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        at = None if frame is None else place_of(frame)
        waiting = self._waiting()
        if waiting is not None:
            return report_of(self._record, waiting, state="waiting", at=at)
        state = "device" if self._busy is not None and self._busy() else "idle"
        return report_of(self._record, self._record.latest(), state=state, at=at)
