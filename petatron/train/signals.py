"""Early stops by signal, time limit or interval, agreed on by all ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from petatron.base.log import get_logger
from petatron.config import TrainConfig
from petatron.mesh import collectives
from petatron.mesh.mesh import Axis

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_EVALUATION_CHECK_INTERVAL_S = 0.5
_log = get_logger(__name__)


def time_limit_left_s(config: TrainConfig, started_s: float) -> float | None:
    """Returns the seconds until `--exit-duration-in-mins`, negative after it; None without a limit."""
    minutes = config.exit_duration_in_mins
    return None if minutes is None else started_s + minutes * 60.0 - time.monotonic()


class StopMonitor:
    """Handles SIGTERM and SIGINT while it is entered, and agrees on stopping with all ranks once per iteration.

    A signal may reach ranks at different iterations, or only some of them; requests are all-reduced over a CPU group, so that no
    device waits, and every rank decides the same at the same iteration. The all-reduce overlaps the next iteration, so large worlds
    do not wait for it either, and a signal takes effect one iteration later. A single rank needs no all-reduce and stops after the
    iteration in which the signal came.

    An evaluation may last for hours, so ranks poll within it too (`evaluation_stop_check`), over the same group and in the same way.
    """

    def __init__(
        self, config: TrainConfig, control: Axis, *, will_save: bool = True, started_s: float | None = None
    ) -> None:
        self._config = config
        self._control = control
        self._started_s = time.monotonic() if started_s is None else started_s
        self._stop_point = "after this step" if control.size == 1 else "after the next step"
        self._will_save = will_save
        self._received_signal = 0
        self._sigint_received = False
        self._pending_all_reduce: tuple[torch.Tensor, collectives.Handle] | None = None
        self._previous_handlers: dict[int, object] = {}
        self._signal_logger: _SignalLogger | None = None

    def __enter__(self) -> StopMonitor:
        for number in _SIGNALS:
            self._previous_handlers[number] = signal.signal(number, self._handle_signal)
        if self._control.rank == 0:
            self._signal_logger = _SignalLogger(self._log_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._signal_logger is not None:
            self._signal_logger.close()
        if self._pending_all_reduce is not None and exception[0] is None:
            self._pending_all_reduce[1].wait()  # leave no all-reduce pending
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _handle_signal(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT and self._sigint_received:
            raise KeyboardInterrupt  # a second signal: do not wait for the end of the step
        self._sigint_received |= signum == signal.SIGINT
        self._received_signal = signum

    def _log_signal(self, signum: int) -> None:
        again = "; once more to stop at once" if signum == signal.SIGINT else ""
        saving = " and saving" if self._will_save else ""
        _log.warning("%s: stopping %s%s%s", signal.Signals(signum).name, self._stop_point, saving, again)

    def stop_reason(self, iteration: int) -> str | None:
        """Returns why to stop after this iteration, or None; every rank must call it."""
        interval = self._config.exit_interval
        early = self._describe_stop(self._all_reduce_requests(0)[:2])
        if early is None and interval and iteration % interval == 0:
            return f"--exit-interval {interval}"
        return early

    @contextmanager
    def evaluation_stop_check(self, *, will_save: bool) -> Iterator[EvaluationStopCheck]:
        """While entered, signals stop an evaluation; `will_save` tells whether a checkpoint follows it."""
        before = self._stop_point, self._will_save
        self._stop_point, self._will_save = "the evaluation", will_save
        try:
            yield EvaluationStopCheck(self._poll, multi_rank=self._control.size > 1)
        finally:
            self._stop_point, self._will_save = before

    def _poll(self, elapsed_ms: int) -> tuple[str | None, int]:
        number, late, slowest_ms = self._all_reduce_requests(elapsed_ms)
        return self._describe_stop((number, late)), slowest_ms

    def _describe_stop(self, reduced: tuple[int, int]) -> str | None:
        number, late = reduced
        if number:
            return f"received {signal.Signals(number).name}"
        return f"--exit-duration-in-mins {self._config.exit_duration_in_mins:g} is over" if late else None

    def _all_reduce_requests(self, elapsed_ms: int) -> tuple[int, int, int]:
        """Returns the all-reduced requests of the previous call, and starts the all-reduce of the current ones."""
        left_s = time_limit_left_s(self._config, self._started_s)
        overtime = left_s is not None and left_s < 0
        wishes = torch.tensor([self._received_signal, int(overtime), elapsed_ms])
        agreed = torch.zeros_like(wishes)
        if self._control.size == 1:
            agreed = wishes
        else:
            if self._pending_all_reduce is not None:
                agreed, handle = self._pending_all_reduce
                handle.wait()
            self._pending_all_reduce = wishes, collectives.start_all_reduce(wishes, self._control, op="max")
        number, late, slowest_ms = agreed.tolist()
        return number, late, slowest_ms


class EvaluationStopCheck:
    """Decides before each evaluation batch whether to stop; all ranks stop at the same batch.

    Batches may take a millisecond or a minute, and clocks differ between ranks, so ranks agree on the batches at which they poll:
    every `stride`-th, where the stride follows from the slowest rank's time, which is reduced with the requests and therefore the same
    on all ranks. It aims at two polls per second and at most doubles each time, since the first batches of a GPU are only launched and
    seem to take no time. A single rank checks at every batch.
    """

    def __init__(self, poll: Callable[[int], tuple[str | None, int]], *, multi_rank: bool) -> None:
        self._poll, self._multi_rank = poll, multi_rank
        self._stride, self._previous_stride = 1, 1
        self._next_check_batch = 0
        self._last_check_s = time.monotonic()

    def stop_reason(self, batch: int) -> str | None:
        """Returns why to stop before this batch, or None; every rank must call it, for every batch in order."""
        if self._multi_rank and batch < self._next_check_batch:
            return None
        now_s = time.monotonic()
        elapsed_ms = 0 if batch == 0 else max(1, round((now_s - self._last_check_s) * 1000))
        reason, slowest_ms = self._poll(elapsed_ms)
        stride = self._stride
        if batch > 0 and slowest_ms:  # the first batch's answer was requested before the evaluation
            fitting = int(self._previous_stride * _EVALUATION_CHECK_INTERVAL_S * 1000 / slowest_ms)
            stride = max(1, min(fitting, 2 * self._stride))
        self._last_check_s, self._previous_stride, self._stride = now_s, self._stride, stride
        self._next_check_batch = batch + stride
        return reason


class _SignalLogger:
    """A thread that logs each signal once.

    A handler would be the wrong place. Python runs it on the main thread after the current library call returns, which may wait for the
    device for seconds; and it may interrupt a write to the terminal, where another write is an error. The wake-up file descriptor gets
    the signal number at once, and a thread may write freely.
    """

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        self._on_signal = on_signal
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)  # as `set_wakeup_fd` requires
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        logged: set[int] = set()
        while True:
            for number in os.read(self._read_fd, 64):
                if number == 0:
                    return
                if number in _SIGNALS and number not in logged:
                    logged.add(number)
                    self._on_signal(number)

    def close(self) -> None:
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        os.write(self._write_fd, b"\0")  # no signal has the number 0
        self._thread.join()
        os.close(self._read_fd)
        os.close(self._write_fd)
