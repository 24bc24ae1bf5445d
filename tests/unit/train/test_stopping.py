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
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.train import training_loop as loop_module
from petatron.train.stop_monitor import StopMonitor
from tests.dist import RankPool
from tests.heard import heard
from tests.load_deadline import wait_until
from tests.unit.train.test_loop import SMALL, start, tiny_run

_PROMISE = "SIGINT: stopping after this step and saving; once more to stop at once"


def until(happened: Callable[[], bool]) -> None:
    wait_until(happened, "a word")


@pytest.fixture
def told() -> Iterator[list[str]]:
    with heard("petatron.train.stop_monitor") as messages:
        yield messages


def test_one_rank_stops_after_the_step_that_a_signal_came_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[str]
):
    step = loop_module.train_step

    def interrupted(state, batches, *more, **named):
        if state.progress.iteration == 1:
            os.kill(os.getpid(), signal.SIGINT)
            until(lambda: _PROMISE in told)  # while the step is under way
        return step(state, batches, *more, **named)

    monkeypatch.setattr(loop_module, "train_step", interrupted)
    _, loop, writer = start(tiny_run(f"{SMALL} --train-iters 5 --save {tmp_path}"))
    outcome = loop.run()
    assert (outcome.iteration, outcome.stop_reason) == (2, "received SIGINT")
    assert writer.column("iteration") == [1, 2]
    messages = writer.column("message", "event")
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
    with StopMonitor(TrainConfig(), ParallelMesh.single().control, will_save=saves) as stopping:
        assert stopping.stop_reason(1) is None
        os.kill(os.getpid(), number)
        until(lambda: bool(told))
        if number == signal.SIGINT:
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
        else:
            os.kill(os.getpid(), number)
        assert stopping.stop_reason(2) == f"received {number.name}"
    assert told == [said]
    assert (signal.getsignal(number), threading.active_count()) == before and signal.set_wakeup_fd(-1) == -1


def test_it_is_said_while_the_main_thread_is_busy_elsewhere(told: list[str]):
    """A signal that another thread gets: Python's handler must wait for the main thread, the line need not."""
    with StopMonitor(TrainConfig(), ParallelMesh.single().control) as stopping:
        threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        lock = threading.Lock()
        lock.acquire()
        waiter = threading.Thread(target=lambda: (until(lambda: bool(told)), lock.release()))
        waiter.start()
        lock.acquire()  # a wait in a library, from which no bytecode is run
        waiter.join()
        assert stopping.stop_reason(1) == "received SIGTERM"


def test_an_interrupt_between_two_others_is_not_forgotten():
    with StopMonitor(TrainConfig(), ParallelMesh.single().control):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_one_rank_heeds_a_time_limit_at_once():
    control = ParallelMesh.single().control
    with StopMonitor(TrainConfig(exit_duration_in_mins=1.0), control, started_s=time.monotonic() - 61) as stopping:
        assert stopping.stop_reason(1) == "--exit-duration-in-mins 1 is over"


def _two_ranks() -> tuple[list[str | None], list[str]]:
    mesh = ParallelMesh(Layout(dp_shard=2), dist.get_rank())
    with heard("petatron.train.stop_monitor") as said, StopMonitor(TrainConfig(), mesh.control) as stopping:
        if mesh.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            until(lambda: bool(said))
        reasons = [stopping.stop_reason(iteration) for iteration in (1, 2)]
    return reasons, said


def test_several_ranks_agree_one_step_later(ranks: RankPool):
    """Only one of them got the signal."""
    first, second = ranks.run(_two_ranks, 2)
    assert first[0] == second[0] == [None, "received SIGTERM"]
    assert first[1] == ["SIGTERM: stopping after the next step and saving"] and second[1] == []


def test_one_rank_stops_an_evaluation_at_the_next_batch_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    state, loop, writer = start(
        tiny_run(f"{SMALL} --train-iters 9 --eval-interval 2 --eval-iters 50 --save {tmp_path}")
    )
    look, seen = state.model.evaluate_objective, []

    def interrupted(batches):
        seen.append(1)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return look(batches)

    monkeypatch.setattr(state.model, "evaluate_objective", interrupted)
    outcome = loop.run()
    assert (outcome.iteration, outcome.stop_reason, outcome.valid_loss, len(seen)) == (2, "received SIGINT", None, 3)
    assert not writer.column("lm_loss", "valid")
    assert writer.column("message", "event")[-3:] == [
        "the evaluation (valid) was interrupted after 3 of 50 batches and reports no loss",
        "stopping at iteration 2: received SIGINT",
        f"saved checkpoint of iteration 2 to {tmp_path}",
    ]


@pytest.mark.parametrize("split", ["valid", "test"])
def test_the_evaluations_after_the_last_step_are_interrupted_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[str], split: str
):
    state, loop, writer = start(tiny_run(f"{SMALL} --train-iters 3 --eval-iters 4 --save {tmp_path}"))
    look, seen = state.model.evaluate_objective, []

    def interrupted(batches):
        seen.append(1)
        if len(seen) == {"valid": 2, "test": 6}[split]:
            os.kill(os.getpid(), signal.SIGTERM)
            until(lambda: bool(told))
        return look(batches)

    monkeypatch.setattr(state.model, "evaluate_objective", interrupted)
    assert loop.run().stop_reason == "received SIGTERM"
    assert told == ["SIGTERM: stopping the evaluation"], "what is saved was saved before it"
    assert len(writer.column("split", "valid")) == (split == "test")


def _asked_at(slow_ms: list[float]) -> tuple[list[int], str | None, int]:
    """The batches at which a rank of two asks, when rank 1 gets a signal at batch 60 and ranks are unequally slow."""
    mesh = ParallelMesh(Layout(dp_shard=2), dist.get_rank())
    with StopMonitor(TrainConfig(), mesh.control) as stopping, stopping.evaluation_stop_check(will_save=True) as watch:
        asked: list[int] = []
        for batch in range(10_000):
            before = mesh.record.count
            reason = watch.stop_reason(batch)
            if mesh.record.count > before:
                asked.append(batch)
            if reason is not None:
                return asked, reason, batch
            if batch == 60 and mesh.rank == 1:
                os.kill(os.getpid(), signal.SIGINT)
            time.sleep(slow_ms[mesh.rank] / 1000)
    return asked, None, -1


def test_two_ranks_stop_an_evaluation_at_the_same_batch_and_ask_seldom(ranks: RankPool):
    first, second = ranks.run(_asked_at, 2, [0.0, 5.0])
    assert first == second and first[1] == "received SIGINT"
    asked, _, stopped = first
    assert asked[:5] == [0, 1, 2, 4, 8], "the distance doubles from 1 on"
    assert len(asked) < 16 and 60 < stopped < 600
