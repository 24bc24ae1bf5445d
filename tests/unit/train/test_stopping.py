"""Early ends: after which iteration a signal or a time limit is heeded, and what is said when a signal comes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from petatron.config import TrainConfig
from petatron.mesh.layout import Layout
from petatron.mesh.mesh import ParallelMesh
from petatron.train import loop as loop_module
from petatron.train.stopping import Stopping
from tests.dist import RankPool
from tests.heard import heard
from tests.unit.train.test_loop import SMALL, start, tiny_run

_PROMISE = "SIGINT: stopping after this step and saving; once more to stop at once"


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not happened():
        assert time.monotonic() < deadline, "nothing was said"
        time.sleep(0.01)


@pytest.fixture
def told() -> Iterator[list[str]]:
    with heard("petatron.train.stopping") as messages:
        yield messages


def test_one_rank_stops_after_the_step_that_a_signal_came_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[str]
):
    step = loop_module.train_step

    def interrupted(state, batches):
        if state.progress.iteration == 1:
            os.kill(os.getpid(), signal.SIGINT)
            until(lambda: _PROMISE in told)  # while the step is under way
        return step(state, batches)

    monkeypatch.setattr(loop_module, "train_step", interrupted)
    _, loop, sink = start(tiny_run(f"{SMALL} --train-iters 5 --save {tmp_path}"))
    outcome = loop.run()
    assert (outcome.iteration, outcome.stopped_early) == (2, "received SIGINT")
    assert sink.column("iteration") == [1, 2]
    messages = sink.column("message", "event")
    assert "stopping at iteration 2: received SIGINT" in messages and "saved checkpoint of iteration 2" in messages[-1]
    assert told.count(_PROMISE) == 1


@pytest.mark.parametrize(
    ("number", "saves", "said"),
    [
        (signal.SIGINT, True, _PROMISE),
        (signal.SIGINT, False, "SIGINT: stopping after this step; once more to stop at once"),
        (signal.SIGTERM, True, "SIGTERM: stopping after this step and saving"),
    ],
)
def test_a_signal_is_answered_once_and_at_once(told: list[str], number: signal.Signals, saves: bool, said: str):
    before = signal.getsignal(number), threading.active_count()
    with Stopping(TrainConfig(), ParallelMesh.single().control, saves=saves) as stopping:
        assert stopping.reason(1) is None
        os.kill(os.getpid(), number)
        until(lambda: bool(told))
        if number == signal.SIGINT:
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
        else:
            os.kill(os.getpid(), number)
        assert stopping.reason(2) == f"received {number.name}"
    assert told == [said]
    assert (signal.getsignal(number), threading.active_count()) == before and signal.set_wakeup_fd(-1) == -1


def test_it_is_said_while_the_main_thread_is_busy_elsewhere(told: list[str]):
    """A signal that another thread gets: Python's handler must wait for the main thread, the line need not."""
    with Stopping(TrainConfig(), ParallelMesh.single().control) as stopping:
        threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        lock = threading.Lock()
        lock.acquire()
        waiter = threading.Thread(target=lambda: (until(lambda: bool(told)), lock.release()))
        waiter.start()
        lock.acquire()  # a wait in a library, from which no bytecode is run
        waiter.join()
        assert stopping.reason(1) == "received SIGTERM"


def test_an_interrupt_between_two_others_is_not_forgotten():
    with Stopping(TrainConfig(), ParallelMesh.single().control):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_one_rank_heeds_a_time_limit_at_once():
    control = ParallelMesh.single().control
    with Stopping(TrainConfig(exit_duration_in_mins=1.0), control, started_s=time.monotonic() - 61) as stopping:
        assert stopping.reason(1) == "--exit-duration-in-mins 1 is over"


def _two_ranks() -> tuple[list[str | None], list[str]]:
    mesh = ParallelMesh(Layout(dp_shard=2), dist.get_rank())
    with heard("petatron.train.stopping") as said, Stopping(TrainConfig(), mesh.control) as stopping:
        if mesh.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            until(lambda: bool(said))
        reasons = [stopping.reason(iteration) for iteration in (1, 2)]
    return reasons, said


def test_several_ranks_agree_one_step_later(ranks: RankPool):
    """Only one of them got the signal."""
    first, second = ranks.run(_two_ranks, 2)
    assert first[0] == second[0] == [None, "received SIGTERM"]
    assert first[1] == ["SIGTERM: stopping after the next step and saving"] and second[1] == []
