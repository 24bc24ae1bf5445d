"""What ends a run whose step does not: the bound after SIGTERM, a second SIGTERM, and neither while a checkpoint is saved."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from petatron.mesh.launch import received_signals
from petatron.train.signal_deadline import SignalThread
from tests.heard import heard
from tests.load_deadline import wait_until

SIGTERM_CODE = 128 + signal.SIGTERM


class Ends:
    """What a thread would have done to the process."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.codes: list[int] = []
        self.texts: list[str] = []

    def exit(self, code: int, text: str) -> None:
        self.codes.append(code)
        self.texts.append(text)

    def watch(self, *, grace_s: float, rank: int = 0, is_saving: Callable[[], bool] = lambda: False) -> SignalThread:
        return SignalThread(
            rank=rank,
            grace_s=grace_s,
            on_signal=lambda number: None,
            is_saving=is_saving,
            on_forced_end=self.said.append,
            exit_process=self.exit,
        )


@pytest.fixture(autouse=True)
def _handled() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_step_that_does_not_end_is_ended_at_the_bound() -> None:
    ends = Ends()
    watch = ends.watch(grace_s=0.2)
    started = time.monotonic()
    os.kill(os.getpid(), signal.SIGTERM)
    wait_until(lambda: bool(ends.codes), "the end")
    assert time.monotonic() - started >= 0.2
    watch.close()
    assert ends.codes[0] == SIGTERM_CODE
    assert ends.said[0] == "received SIGTERM 0.2 s ago (--exit-signal-grace-s)" and "rank 0: received" in ends.texts[0]


@pytest.mark.parametrize(("grace_s", "disarmed"), [(0.0, False), (0.1, True)])
def test_no_bound_ends_nothing(grace_s: float, disarmed: bool) -> None:
    ends = Ends()
    watch = ends.watch(grace_s=grace_s)
    if disarmed:
        watch.disarm()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.3)
    watch.close()
    assert not ends.codes and not watch.is_overdue()


def test_a_save_that_has_begun_is_not_cut_off_and_the_wait_is_told() -> None:
    ends, saved = Ends(), threading.Event()
    with heard("petatron.train.signal_deadline") as told:
        watch = ends.watch(grace_s=0.1, is_saving=lambda: not saved.is_set())
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: bool(told), "a word about the save")
        time.sleep(0.3)
        assert not ends.codes and watch.is_overdue()
        saved.set()
        wait_until(lambda: bool(ends.codes), "the end")
        watch.close()
    assert len(told) == 1 and "a checkpoint is being saved: the run ends after it" in told[0]


def test_a_second_sigterm_ends_at_once_and_one_that_came_twice_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends()
    watch = ends.watch(grace_s=1000.0, is_saving=lambda: True)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.2)
    assert not ends.codes
    monkeypatch.setattr(received_signals, "REPEATED_SIGTERM_S", 0.1)
    os.kill(os.getpid(), signal.SIGTERM)
    wait_until(lambda: bool(ends.codes), "the end")
    watch.close()
    assert ends.codes == [SIGTERM_CODE] and ends.said == ["received SIGTERM a second time"]


def test_last_words_that_block_hold_up_nothing() -> None:
    """The main thread may hang while it holds what a report needs, for instance in a write to a terminal that nobody reads."""
    ends = Ends()
    watch = ends.watch(grace_s=0.1)
    watch._on_forced_end = lambda reason: threading.Event().wait(1000)  # pyright: ignore[reportAttributeAccessIssue]
    os.kill(os.getpid(), signal.SIGTERM)
    wait_until(lambda: bool(ends.codes), "the end")
    watch.close()
