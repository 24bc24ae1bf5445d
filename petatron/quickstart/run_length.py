"""Chooses how many steps the quickstart trains: as many as fit into its time at the speed that this machine has now.

Everything after the installation should end within `--minutes`, on idle cores and on busy ones. So a step is timed before training, on the
real model and data, in this one process; from it follows what training and the evaluation after it take. Ranks that share the model
wait for each other many times in a step, which takes longer where other programs use the cores too: `RANKS_OVERHEAD`. A learning
rate that has decayed to its end gives a better model than one that was cut off, hence a choice and not only a limit; the limit is
kept, since programs may come after the choice.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

MIN_STEPS, MAX_STEPS = 40, 800
"""Below the first, nothing is learned that a sample would show; the second takes about two minutes on two idle cores."""
RANKS_OVERHEAD = 1.5
EVALUATION_STEPS, MAX_EVALUATION_S = 60.0, 40.0
"""Evaluating the held-out files and sampling take about as long as this many steps, and end early after these seconds."""
VALIDATION_STEPS = 20.0
"""Evaluations during training take about as long as this many steps."""
_WARM_UP_STEPS, _TIMED_STEPS = 2, 5
_MAX_TIMING_S = 10.0


@dataclass(frozen=True, slots=True)
class RunLengthChoice:
    """The steps to train, and the minutes after which training stops even if some are left."""

    steps: int
    minutes: float


def choose_run_length(
    *, minutes: float, elapsed_s: float, step_s: float, start_s: float, steps: int | None = None
) -> RunLengthChoice:
    """Chooses from the time for everything, what of it is over, and the seconds that one step here and the start of ranks take.

    `steps` are the user's own, which only the limit applies to. Training gets half a minute at least, or nothing would be learned.

    >>> choose_run_length(minutes=3, elapsed_s=20, step_s=0.08, start_s=5)
    RunLengthChoice(steps=800, minutes=2.54)
    >>> choose_run_length(minutes=3, elapsed_s=60, step_s=0.3, start_s=15)
    RunLengthChoice(steps=173, minutes=1.57)
    """
    left_s, least_minutes = 60 * minutes - elapsed_s, min(0.5, minutes)
    training_s = max(0.0, left_s - min(EVALUATION_STEPS * step_s, MAX_EVALUATION_S))
    fitting = (training_s - start_s) / (RANKS_OVERHEAD * step_s) - VALIDATION_STEPS
    chosen = min(max(int(fitting), MIN_STEPS), MAX_STEPS) if steps is None else steps
    # The limit counts from a rank's first line, which comes after its imports: about half of its start.
    return RunLengthChoice(chosen, max(least_minutes, round((training_s - start_s / 2) / 60, 2)))


def time_step(run_step: Callable[[], object], *, clock: Callable[[], float] = time.monotonic) -> float:
    """Returns the seconds of a step: the median of some after the first ones, fewer on a machine that takes long for each."""
    started_s = clock()
    seconds: list[float] = []
    for number in range(_WARM_UP_STEPS + _TIMED_STEPS):
        before_s = clock()
        run_step()
        now_s = clock()
        if number >= _WARM_UP_STEPS or now_s - started_s > _MAX_TIMING_S:
            seconds.append(now_s - before_s)
        if seconds and now_s - started_s > _MAX_TIMING_S:
            break
    return statistics.median(seconds)


def step_runner(settings: str) -> Generator[None, None, None]:
    """Trains the model of a settings file in this process, from random weights, a step for each value; nothing is saved."""
    from petatron.pretrained.open_tokenizer import open_tokenizer
    from petatron.train.build_run import build_loaders, launch
    from petatron.train.state.train_state import TrainState
    from petatron.train.train_step import train_step
    from petatron.validate import load_config

    flags = ["--config", settings, "--tp", "1", "--num-workers", "0"]
    loaded, tokenizer = open_tokenizer(load_config(flags, world_size=1))
    run = loaded.config
    mesh = launch(run)
    state = TrainState.build(run, mesh)
    loader = build_loaders(run, mesh, tokenizer).train
    while True:
        train_step(state, loader.next_step(run.train.global_batch_size, state.progress.consumed_samples))
        yield
