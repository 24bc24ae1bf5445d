"""Deadlines of tests are in seconds of an idle machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import load_deadline
from tests.load_deadline import Deadline, load_factor, scaled, wait_until, within


class FakeMachine:
    def __init__(self) -> None:
        self.now_s, self.factor = 100.0, 1.0

    def deadline(self, seconds: float) -> Deadline:
        return Deadline(seconds, clock=lambda: self.now_s, factor=lambda: self.factor)


def test_a_deadline_counts_the_seconds_of_an_idle_machine() -> None:
    machine = FakeMachine()
    deadline = machine.deadline(5.0)
    machine.now_s += 3.0
    assert not deadline.is_over and deadline.left_s() == pytest.approx(2.0)
    machine.factor = 10.0  # others came
    machine.now_s += 15.0
    assert not deadline.is_over and deadline.left_s() == pytest.approx(0.5)
    machine.factor = 1.0  # and went
    machine.now_s += 0.6
    assert deadline.is_over


def busy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, load: float, running: int, cores: int = 2) -> None:
    (tmp_path / "loadavg").write_text(f"{load} 1.0 1.0 {running}/800 4242\n")
    monkeypatch.setattr(load_deadline, "_LOAD", tmp_path / "loadavg")
    monkeypatch.setattr(load_deadline.os, "getloadavg", lambda: (load, 1.0, 1.0))
    monkeypatch.setattr(load_deadline.os, "sched_getaffinity", lambda pid: set(range(cores)))


@pytest.mark.parametrize(
    ("load", "running", "factor", "limit"),
    [(0.1, 1, 1.0, 10.0), (20.0, 3, 10.0, 200.0), (1.0, 8, 4.0, 80.0), (900.0, 900, 30.0, 300.0)],
)
def test_the_factor_is_the_programs_per_core(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, load: float, running: int, factor: float, limit: float
) -> None:
    busy(monkeypatch, tmp_path, load=load, running=running)
    assert (load_factor(), scaled(10.0)) == (factor, limit)


def test_what_never_holds_and_what_is_too_slow_fail_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    busy(monkeypatch, tmp_path, load=0.0, running=1)
    with pytest.raises(AssertionError, match=r"waited 0\.05 s of an idle machine for a miracle"):
        wait_until(lambda: False, "a miracle", seconds=0.05)
    with pytest.raises(AssertionError, match=r"reading took .* load factor 1\.0"), within(0.0, "reading"):
        load_factor()
    busy(monkeypatch, tmp_path, load=40.0, running=1)
    with within(1e-1):
        load_factor()
