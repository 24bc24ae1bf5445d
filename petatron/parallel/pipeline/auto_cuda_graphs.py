"""`--cuda-graphs auto`: whether the steps of a run are captured is decided after a few of them, once for all ranks.

    step 1          runs as it is: kernels are compiled, plans made
    steps 2 and 3   are measured (`device_idle.py`), from and to an idle device
    then            nothing is captured if the device was idle for at most a tenth of them, if memory would not suffice, or if a
                    step draws random numbers in a way that a replay would not
    step 4          warms up the capture stream
    step 5          is captured and replayed
    steps 6 and 7   are replayed and timed

A replay launches all its kernels at once, so its time is the time that the device needs, and the rest of an ordinary step's time
was idle. If that was a tenth or less, the graph is dropped. So the rule holds in the end by what was measured, and the bound before
it only saves large steps the attempt.

Every decision is that of all ranks, by the maximum over them: a collective of a captured step meets those of captured steps. A
capture that fails is undone, and the step runs as it is. All of this changes no bit: captured or not, a step launches the same
kernels on the same numbers.

Memory: activations of a captured step hold theirs between steps. What a step took beyond what was allocated when it began, plus a
quarter for what runs beside it (the optimizer), must be available beside its gradients.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from petatron.base.log import get_logger
from petatron.models.batch import Batch
from petatron.parallel.pipeline.cuda_graph import CaptureError, GraphedSteps
from petatron.parallel.pipeline.device_idle import IdleMeter, StepTime
from petatron.parallel.pipeline.executor import LossScales, StepResult
from petatron.schedule import RankSchedule

_log = get_logger(__name__)

MIN_IDLE = 0.1
"""The share of a step that the device must have been idle for a capture to pay."""
_FIRST_STEPS = 1
"""Steps that compile, and are not measured."""
_MEASURED_STEPS = 2
_TIMED_REPLAYS = 2
_MEMORY_MARGIN = 1.25
_GIB = 1 << 30

RunStep = Callable[..., StepResult]
StepArguments = tuple[RankSchedule, Sequence[Batch], LossScales | None]
MaxOverRanks = Callable[[Sequence[float]], list[float]]
"""Returns the maximum of each number over all ranks."""


class CudaMemory:
    """The memory of a CUDA device by its allocator, in bytes: allocated now, the most that ever was, and what could be allocated now."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def available_bytes(self) -> int:
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return torch.cuda.mem_get_info(self._device)[0] + cached


@dataclass(frozen=True, slots=True)
class CaptureInputs:
    """What decides: the meter of steps, memory, the states of all random streams, and whether passes are recomputed."""

    meter: IdleMeter
    memory: CudaMemory
    random_states: Callable[[], Mapping[str, Tensor]]
    recomputes: bool
    max_over_ranks: MaxOverRanks = list


class AutoGraphedSteps:
    """Runs training steps like `PipelineExecutor.run`, and decides whether they are captured."""

    def __init__(
        self, run: RunStep, graphed: GraphedSteps, inputs: CaptureInputs, *, restart_step: Callable[[int], None]
    ) -> None:
        """`run` runs a step as it is. `restart_step` starts a step again after a failed capture, given its number of micro-batches."""
        self._run_plain, self._graphed, self._inputs, self._restart_step = run, graphed, inputs, restart_step
        self._run_step: RunStep = self._measure
        self._num_steps = 0
        self._measured: list[StepTime] = []
        self._replays: list[StepTime] = []
        self._first_replay = 0

    def run(self, *step: *StepArguments, clock: Callable[[], float] | None = None) -> StepResult:
        """Runs a training step; one that is timed by action runs as it is and decides nothing."""
        if clock is not None:
            return self._run_plain(*step, clock=clock)
        self._num_steps += 1
        return self._run_step(*step)

    def run_evaluation(self, forward: RunStep, schedule: RankSchedule, batches: Sequence[Batch]) -> StepResult:
        """Runs the forward passes of an evaluation, captured if training steps are."""
        if self._run_step != self._run_graphed:
            return forward(schedule, batches)
        try:
            return self._graphed.run_evaluation(forward, schedule, batches)
        except CaptureError as error:
            reason = error.reason
        self._turn_off(f"an evaluation could not be captured: {reason.strip().splitlines()[0]}")
        gc.collect()
        return forward(schedule, batches)

    def _measure(self, *step: *StepArguments) -> StepResult:
        if self._num_steps <= _FIRST_STEPS:
            return self._run_plain(*step)
        inputs, before = self._inputs, self._inputs.random_states()
        base_bytes = inputs.memory.allocated_bytes()  # without the gradients that a step of one micro-batch frees
        with inputs.meter.measure() as measured:
            result = self._run_plain(*step)
        self._measured.append(measured)
        if len(self._measured) == _MEASURED_STEPS:
            reason = self._reason_against(before, inputs.random_states(), base_bytes)
            if reason is None:
                self._run_step = self._try
            else:
                self._turn_off(reason)
        return result

    def _reason_against(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor], base_bytes: int) -> str | None:
        """Returns why nothing should be captured, the same on all ranks."""
        inputs = self._inputs
        drawn = {name for name, state in before.items() if not torch.equal(state, after[name])}
        needed, available = _MEMORY_MARGIN * (inputs.memory.peak_bytes() - base_bytes), inputs.memory.available_bytes()
        idle = sum(step.idle_s for step in self._measured) / sum(step.step_s for step in self._measured)
        on_host, set_back = float("cpu" in drawn), float(bool(drawn) and inputs.recomputes)
        maxima = inputs.max_over_ranks([idle, needed - available, needed, on_host, set_back])
        idle, missing, needed, on_host, set_back = maxima
        if idle <= MIN_IDLE:
            return f"the device was idle at most {100 * idle:.0f} % of a step"
        if missing > 0:
            return f"a captured step needs {needed / _GIB:.1f} GiB between steps, {missing / _GIB:.1f} GiB more than is free"
        if on_host:
            return "the host draws random numbers in a step"
        return "the host would set random states back to recompute" if set_back else None

    def _try(self, *step: *StepArguments) -> StepResult:
        """Warms up, captures and times replays; keeps the graph if they are faster."""
        captured = self._graphed.num_captured
        with self._inputs.meter.time() as replayed:
            result = self._run_graphed(*step)
        if self._run_step != self._try or not self._graphed.num_captured:  # it failed, or warmed up
            return result
        if not captured:
            self._first_replay = self._num_steps
        self._replays.append(replayed)
        if len(self._replays) > _TIMED_REPLAYS:  # the first time is that of the capture too
            self._decide()
        return result

    def _decide(self) -> None:
        steps, replays = [step.step_s for step in self._measured], [step.step_s for step in self._replays[1:]]
        step_s, replay_s = self._inputs.max_over_ranks([min(steps), min(replays)])
        idle = 1.0 - replay_s / step_s
        if idle <= MIN_IDLE:
            self._turn_off(f"the device was idle {100 * max(idle, 0.0):.0f} % of a step")
            return
        self._run_step = self._run_graphed
        _log.info("CUDA graphs: on from step %d: the device was idle %.0f %% of a step", self._first_replay, 100 * idle)

    def _run_graphed(self, *step: *StepArguments) -> StepResult:
        try:
            return self._graphed.run(*step)
        except CaptureError as error:
            reason = error.reason
        self._turn_off(f"a step could not be captured: {reason.strip().splitlines()[0]}")
        gc.collect()  # the error's frames hold what the capture allocated
        self._restart_step(len(step[1]))
        return self._run_plain(*step)

    def _turn_off(self, reason: str) -> None:
        self._graphed.stop()
        self._run_step = self._run_plain
        _log.info("CUDA graphs: off: %s", reason)
