"""Early stops by signal, time limit or interval, agreed on by all ranks."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from petatron.base.log import get_logger
from petatron.config import TrainConfig
from petatron.mesh import collectives
from petatron.mesh.diagnose.failure_report import CommunicationError
from petatron.mesh.mesh import Axis
from petatron.train.signal_deadline import SIGNALS, SignalThread

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

    A step that does not end within `--exit-signal-grace-s` of SIGTERM is not waited for (`signal_deadline.py`).
    """

    def __init__(
        self,
        config: TrainConfig,
        control: Axis,
        *,
        will_save: bool = True,
        started_s: float | None = None,
        is_saving: Callable[[], bool] = lambda: False,
        on_forced_end: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`is_saving` tells whether a checkpoint is being written, `on_forced_end` reports that the run ends within a step, and why."""
        self._config = config
        self._is_saving, self._on_forced_end = is_saving, on_forced_end
        self._control = control
        self._started_s = time.monotonic() if started_s is None else started_s
        self._stop_point = "after this step" if control.size == 1 else "after the next step"
        self._will_save = will_save
        self._received_signal = 0
        self._sigint_received = False
        self._pending_all_reduce: tuple[torch.Tensor, collectives.Handle] | None = None
        self._previous_handlers: dict[int, object] = {}
        self._signal_thread: SignalThread | None = None

    def __enter__(self) -> StopMonitor:
        for number in SIGNALS:
            self._previous_handlers[number] = signal.signal(number, self._handle_signal)
        self._signal_thread = SignalThread(
            rank=self._control.rank,
            grace_s=self._config.exit_signal_grace_s,
            on_signal=self._log_signal if self._control.rank == 0 else lambda number: None,
            is_saving=self._is_saving,
            on_forced_end=self._on_forced_end,
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        assert self._signal_thread is not None
        if isinstance(error, CommunicationError) and self._signal_thread.is_overdue():
            self._signal_thread.end("received SIGTERM, and other ranks have ended")  # they were overdue too
        self._signal_thread.close()
        if self._pending_all_reduce is not None and kind is None:
            self._pending_all_reduce[1].wait()  # leave no all-reduce pending
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def lift_deadline(self) -> None:
        """Ends no run any more: its last state is saved."""
        if self._signal_thread is not None:
            self._signal_thread.disarm()

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
        early, _ = self._poll(0)
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
        """Returns why to stop, by the all-reduced requests of the previous call, and the slowest rank's time; starts those of this one."""
        left_s = time_limit_left_s(self._config, self._started_s)
        overtime = left_s is not None and left_s < 0
        wishes = torch.tensor([self._received_signal, int(overtime), elapsed_ms])
        agreed = wishes if self._control.size == 1 else torch.zeros_like(wishes)
        if self._control.size > 1:
            if self._pending_all_reduce is not None:
                agreed, handle = self._pending_all_reduce
                handle.wait()
            self._pending_all_reduce = wishes, collectives.start_all_reduce(wishes, self._control, op="max")
        number, late, slowest_ms = agreed.tolist()
        if number:
            return f"received {signal.Signals(number).name}", slowest_ms
        limit = f"--exit-duration-in-mins {self._config.exit_duration_in_mins:g} is over" if late else None
        return limit, slowest_ms


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
