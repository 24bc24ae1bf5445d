"""When to stop before the end: a signal, a time limit, an interval; decided by all ranks together."""

from __future__ import annotations

import signal
import time
from types import FrameType

import torch

from petatron.config import TrainConfig
from petatron.mesh import collectives
from petatron.mesh.mesh import Axis


class Stopping:
    """Listens for SIGTERM and SIGINT while it is entered, and asks all ranks once per iteration.

    A signal may reach ranks at different iterations, or only some of them; the question goes round over a CPU group, so
    that no device waits, and every rank gives the same answer at the same iteration. It travels while the next iteration
    runs, so at large worlds nobody waits for it either, and a signal is heeded one iteration later.
    """

    def __init__(self, config: TrainConfig, control: Axis, *, started_s: float | None = None) -> None:
        self._config = config
        self._control = control
        self._started_s = time.monotonic() if started_s is None else started_s
        self._signal = 0
        self._asked: tuple[torch.Tensor, collectives.Handle] | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Stopping:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._asked is not None and exception[0] is None:
            self._asked[1].wait()  # leave no question on the wire
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._signal == number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice: do not wait for the end of the step
        self._signal = number

    def reason(self, iteration: int) -> str | None:
        """Why to stop after this iteration, or None; every rank must ask."""
        minutes = self._config.exit_duration_in_mins
        overtime = minutes is not None and time.monotonic() - self._started_s > minutes * 60.0
        number, late = self._answer()
        wishes = torch.tensor([self._signal, int(overtime)])
        self._asked = wishes, collectives.start_all_reduce(wishes, self._control, op="max")
        if number:
            return f"received {signal.Signals(number).name}"
        if late:
            return f"--exit-duration-in-mins {minutes:g} is over"
        interval = self._config.exit_interval
        if interval and iteration % interval == 0:
            return f"--exit-interval {interval}"
        return None

    def _answer(self) -> tuple[int, int]:
        """What the ranks wished when they were last asked."""
        if self._asked is None:
            return 0, 0
        wishes, handle = self._asked
        handle.wait()
        number, late = wishes.tolist()
        return number, late
