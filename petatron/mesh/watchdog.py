"""A thread that leaves a report when its rank hangs, or when the launcher asks for one.

A collective that some rank never joins ends by the backend's time limit. gloo raises in the waiting call then; NCCL's watchdog ends the
process with SIGABRT, and no Python runs any more. So a while before the limit this thread writes where the rank is to its error file. It
also does so when the launcher has put a file beside that one, which it does as soon as a rank has failed: then ranks that only
wait for a dead one have a report too, before they are stopped.

Under NCCL the host is not inside a collective: it starts operations and goes on until it needs a result. What this thread sees of a
hang there is a main thread that starts nothing any more, and it tells the last operation that was started and the place in the
program where the main thread waits for the device. That may be far ahead of the operation that hangs; which ranks are behind is told
by comparing how many collectives each has started (`failure.absent`).

A rank that goes on after all withdraws its report. Nothing is asked of the training thread but what the record holds anyway.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from petatron.mesh.failure import Report, before, report_of, request, sentence
from petatron.mesh.launch import error_file, write_error_file
from petatron.mesh.record import Event, Record, place_of

_POLL_S = 1.0
_MARGIN, _MARGIN_S = 0.2, 30.0


class Watchdog:
    """Watches one rank's record while it is entered; does nothing without an error file, or without peers."""

    def __init__(self, record: Record, *, timeout_s: float, path: str | None = None) -> None:
        """`timeout_s` is the backend's time limit; `path` is the error file, else the one that the launcher named."""
        self._record, self._timeout_s = record, timeout_s
        self._path = path or error_file()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._written_at: int | None = None

    def __enter__(self) -> Watchdog:
        if self._path is not None and self._record.has_peers:
            self._thread = threading.Thread(target=self._watch, name="communication watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._withdraw()

    def _watch(self) -> None:
        assert self._path is not None
        while not self._stop.wait(min(_POLL_S, self._timeout_s / 20)):
            if self._written_at is not None and self._written_at != self._record.count:
                self._withdraw()
            if self._written_at is None and (self._hangs() or request(self._path).exists()):
                self._write()

    def _write(self) -> None:
        assert self._path is not None
        self._written_at, report = self._record.count, self.report()
        text = "\n".join([sentence(report), *before(report)])
        write_error_file(self._path, message=sentence(report), text=text, echo=True, report=report)

    def _withdraw(self) -> None:
        if self._written_at is not None and self._path is not None:
            Path(self._path).unlink(missing_ok=True)
            self._written_at = None

    def _hangs(self) -> bool:
        event = self._waiting()
        timeout_s = self._timeout_s if event is None else self._record.timeout_of(event.axis)
        event = event or self._record.latest()
        limit_s = timeout_s - min(_MARGIN_S, _MARGIN * timeout_s)
        return event is not None and time.monotonic() - event.begun_s > limit_s

    def _waiting(self) -> Event | None:
        """The operation that the host is in; of two threads', the one that may take less long."""
        inside = [event for event in self._record.events() if event.inside]
        return min(inside, key=lambda event: self._record.timeout_of(event.axis), default=None)

    def report(self) -> Report:
        """Where this rank is now."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        at = None if frame is None else place_of(frame)
        waiting = self._waiting()
        if waiting is not None:
            return report_of(self._record, waiting, state="waiting", at=at)
        return report_of(self._record, self._record.latest(), state="idle", at=at)
