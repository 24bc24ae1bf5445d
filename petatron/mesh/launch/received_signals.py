"""Interprets the signals that a launcher or a rank has received: the first, repeated, and SIGTERM."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field

REPEATED_SIGTERM_S = 1.0
"""One SIGTERM may come twice within a moment, from a scheduler that signals every process; later it is a second one."""


@dataclass(slots=True)
class ReceivedSignals:
    """Signals this process received while the ranks ran."""

    signals: list[signal.Signals] = field(default_factory=list)
    sigterm_s: float | None = None
    """When SIGTERM or SIGHUP came first."""
    sigterm_repeated: bool = False

    def add(self, number: signal.Signals) -> None:
        self.signals.append(number)
        if number != signal.SIGINT:
            self.sigterm_repeated |= self.sigterm_s is not None and is_repeated_sigterm(self.sigterm_s)
            self.sigterm_s = time.monotonic() if self.sigterm_s is None else self.sigterm_s

    @property
    def killing(self) -> bool:
        """Whether a second Ctrl-C or SIGTERM has killed the ranks."""
        return self.sigterm_repeated or self.signals.count(signal.SIGINT) > 1

    def caused_exit(self, code: int) -> bool:
        """Whether a rank with this exit code died of a forwarded signal, which needs no error report.

        Ranks die of it in many ways: by the signal itself, as Python exits on Ctrl-C, or because their peers did. Only the
        kernel's SIGKILL is never the result of a signal that can be caught.
        """
        if not self.signals:
            return False
        if code == -signal.SIGKILL:
            return self.killing
        return code < 0 or code in {128 + number for number in self.signals}

    @property
    def exit_code(self) -> int:
        """The exit code of a program that such a signal ended: 128 + the one that killed, or the one that was forwarded."""
        return 128 + (signal.SIGINT if self.signals.count(signal.SIGINT) > 1 else self.signals[0])


def is_repeated_sigterm(first_s: float) -> bool:
    """Whether a SIGTERM now is a second one, when the first came at a time of the monotonic clock."""
    return time.monotonic() - first_s >= REPEATED_SIGTERM_S
