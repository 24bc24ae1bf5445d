"""The quickstart's length follows the speed of the machine, and its time is kept."""

from __future__ import annotations

import pytest

from petatron.quickstart.run_length import (
    MAX_EVALUATION_S,
    MAX_STEPS,
    MIN_STEPS,
    RANKS_OVERHEAD,
    choose_run_length,
    time_step,
)


class SlowMachine:
    """A machine with a clock of its own: a step takes some seconds there, the first ones more."""

    def __init__(self, step_s: float) -> None:
        self.now_s, self.steps, self._step_s = 0.0, 0, step_s

    def clock(self) -> float:
        return self.now_s

    def step(self) -> None:
        self.steps += 1
        self.now_s += self._step_s * (5 if self.steps <= 2 else 1)


@pytest.mark.parametrize(("step_s", "preparation_s"), [(0.03, 10), (0.08, 20), (0.2, 40), (0.4, 60), (0.8, 80)])
def test_everything_ends_within_three_minutes(step_s: float, preparation_s: float) -> None:
    machine = SlowMachine(step_s)
    machine.now_s = preparation_s
    measured_s = time_step(machine.step, clock=machine.clock)
    assert measured_s == pytest.approx(step_s)
    chosen = choose_run_length(minutes=3, elapsed_s=machine.now_s, step_s=measured_s, start_s=50 * step_s)
    training_s = 50 * step_s + chosen.steps * RANKS_OVERHEAD * step_s
    evaluation_s = min(60 * step_s, MAX_EVALUATION_S)
    assert machine.now_s + min(training_s, 60 * chosen.minutes) + evaluation_s <= 181
    assert MIN_STEPS <= chosen.steps <= MAX_STEPS and (chosen.steps == MAX_STEPS) == (step_s < 0.1)


def test_a_very_slow_machine_is_not_timed_for_long() -> None:
    machine = SlowMachine(6.0)
    assert time_step(machine.step, clock=machine.clock) > 0 and machine.steps == 1


def test_steps_of_the_user_are_kept_and_training_gets_some_time() -> None:
    chosen = choose_run_length(minutes=3, elapsed_s=175, step_s=1.0, start_s=20, steps=5000)
    assert (chosen.steps, chosen.minutes) == (5000, 0.5)
