"""Ends a run that a signal cannot stop in time: a thread sees signals at once, and ends the process after a bound.

A signal stops a run between two steps. A step may take minutes, or hang for ever in a collective whose peer is gone, and schedulers send
SIGKILL 30 s after SIGTERM, after which nothing can be said. So `--exit-signal-grace-s` after SIGTERM this rank ends by itself: it says
which checkpoint is the last one and how many steps are lost, and exits with 128 + SIGTERM as every process that a signal ends.

Why a thread: Python runs a signal's handler on the main thread, between two bytecodes. A main thread that waits in a library (a
collective, the device, a disk) runs none. The wake-up file descriptor (`signal.set_wakeup_fd`) gets the number of every signal at
once, whichever thread the kernel has chosen, and a thread that reads it runs as soon as the library has released the GIL.

A save that has begun is not cut off: it publishes a whole checkpoint or nothing, whoever ends it, and no step is lost if it succeeds.

A second SIGTERM means "now". It counts only some time after the first, since one signal may come twice: SLURM signals a launcher and its
ranks, and the launcher forwards it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable

from petatron.base.log import get_logger
from petatron.mesh.launch.rank_exit import exit_rank
from petatron.mesh.launch.received_signals import is_repeated_sigterm

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_OTHER_RANKS_DELAY_S = 1.0
"""Rank 0 speaks for the run, and would fail in communication if its peers ended first."""
_REPORT_S = 2.0
_SAVE_POLL_S = 0.1
_log = get_logger(__name__)


class SignalThread:
    """Reads signals while it exists: tells each kind once, ends the process after the bound, and at once on a second SIGTERM."""

    def __init__(
        self,
        *,
        rank: int,
        grace_s: float,
        on_signal: Callable[[int], None],
        is_saving: Callable[[], bool],
        on_forced_end: Callable[[str], None],
        exit_process: Callable[[int, str], object] = exit_rank,
    ) -> None:
        """`grace_s` 0 means no bound. `on_forced_end` gets the reason and may take a moment to report it; rank 0 alone calls it."""
        self._rank, self._grace_s = rank, grace_s
        self._on_signal, self._is_saving, self._on_forced_end = on_signal, is_saving, on_forced_end
        self._exit_process = exit_process
        self._sigterm_s: float | None = None
        self._disarmed = False
        self._waiting_told = False
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)  # as `set_wakeup_fd` requires
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        os.write(self._write_fd, b"\0")  # no signal has the number 0
        self._thread.join()
        os.close(self._read_fd)
        os.close(self._write_fd)

    def disarm(self) -> None:
        """Lifts the bound: the run has saved its last state and only has to leave."""
        self._disarmed = True

    def is_overdue(self) -> bool:
        """Whether the bound is over; ranks whose peers have ended by it fail in communication at about that time."""
        return self._left_s() == 0.0

    def end(self, reason: str) -> None:
        """Reports on rank 0, and ends the process; a report that blocks (a full pipe, a lock of the main thread) is left behind."""
        if self._rank == 0:
            reporting = threading.Thread(target=self._report, args=(reason,), daemon=True)
            reporting.start()
            reporting.join(_REPORT_S)
        self._exit_process(128 + signal.SIGTERM, f"rank {self._rank}: {reason}")

    def _report(self, reason: str) -> None:
        with contextlib.suppress(Exception):
            self._on_forced_end(reason)

    def _left_s(self) -> float | None:
        """Returns the seconds until the bound; None without one."""
        if self._sigterm_s is None or self._grace_s == 0 or self._disarmed:
            return None
        extra_s = 0.0 if self._rank == 0 else _OTHER_RANKS_DELAY_S
        return max(0.0, self._sigterm_s + self._grace_s + extra_s - time.monotonic())

    def _listen(self) -> None:
        told: set[int] = set()
        while True:
            left_s = self._left_s()
            if left_s == 0.0:
                self._end_unless_saving()
                left_s = _SAVE_POLL_S
            if not select.select([self._read_fd], [], [], left_s)[0]:
                continue
            for number in os.read(self._read_fd, 64):
                if number == 0:
                    return
                if number in SIGNALS and number not in told:
                    told.add(number)
                    self._on_signal(number)
                if number != signal.SIGTERM:
                    continue
                if self._sigterm_s is None:
                    self._sigterm_s = time.monotonic()
                elif is_repeated_sigterm(self._sigterm_s):
                    self.end("received SIGTERM a second time")

    def _end_unless_saving(self) -> None:
        if not self._is_saving():
            self.end(f"received SIGTERM {self._grace_s:g} s ago (--exit-signal-grace-s)")
        elif not self._waiting_told:
            self._waiting_told = True
            if self._rank == 0:
                _log.warning(
                    "SIGTERM came %g s ago (--exit-signal-grace-s), and a checkpoint is being saved: the run ends after it, "
                    "or now by another SIGTERM",
                    self._grace_s,
                )
