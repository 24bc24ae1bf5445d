"""A step as a CUDA graph: its forward and backward passes are recorded once, and replayed from then on.

The host needs some microseconds to start a kernel, however short the kernel is, and more to find out which comes next. Where
kernels are shorter than that (small models, short sequences) the device waits. A graph is started as a whole.

    first steps   run as they are: kernels are compiled, plans made, tables moved to the device
    then one      is recorded, which computes nothing, and replayed
    all others    are copied to where the recorded one's batches and scales lie, and replayed

A replay repeats kernels with the launch parameters and addresses of the recording, and no Python runs. Hence:

- What goes in and comes out has memory of its own. Weights and gradients lie in flat buffers that never move.
- What Python would have noted is put right: gradients count as come (`GradientReducer.mark_written`). Weights that were cast to
  eight bits are forgotten before and after every step, so the cast is in the graph, and evaluation never meets its memory.
- Random numbers are those of a run without graphs: a replay reads the generator's seed and offset from memory, and torch moves
  the offset on. That is so for the default generator, the only one that ranks without tensor parallelism draw from.
- Another number of micro-batches, or another shape, is another recording. All share one pool of memory: what is in it is
  needed only until a replay ends, but for the outcome, which is read before the next begins.
- First steps run on the stream that recordings are made on: autograd remembers the stream on which a parameter was first met,
  and a recorded backward pass must not meet another.
- Beside the pool, a step that runs as it is would need memory for its activations a second time. So before a kind of step runs
  for the first time, recordings of other kinds are dropped; they need no second warm-up.

Which configs can be recorded is in `config/checks/cuda_graphs.py`.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from petatron.base.errors import TrainError
from petatron.base.log import get_logger
from petatron.models.batch import Batch
from petatron.parallel.data.gradient_reduction import GradientReducer
from petatron.parallel.pipeline.executor import LossScales, StepResult
from petatron.schedule import RankSchedule

_log = get_logger(__name__)

WARM_UP_STEPS = 3
"""Steps of each kind that run as they are."""
MAX_GRAPHS = 4
"""Recordings that are kept: those of a ramp of the batch size never come back, and each knows every kernel of its step."""
_MIN_CAPABILITY = (8, 0)
"""Older devices have no FlashAttention, and the host plays a part in what takes its place."""

StepFunction = Callable[[], StepResult]
Replay = Callable[[], None]
_BatchShape = tuple[tuple[torch.Size, torch.dtype] | None, ...]


class GraphCapture(Protocol):
    """Runs a step's passes, or records them."""

    def run(self, step: StepFunction) -> StepResult:
        """As it is, where a recording of it would be made."""
        ...

    def capture(self, step: StepFunction) -> tuple[StepResult, Replay]:
        """The outcome, in memory that every call of the second fills; before the first of these it holds nothing."""
        ...

    def reset_pool(self) -> None:
        """Nothing that was recorded will be replayed any more."""
        ...


class CudaGraphCapture:
    """Records what a CUDA device is told to do."""

    def __init__(self, device: torch.device) -> None:
        capability = torch.cuda.get_device_capability(device)
        if capability < _MIN_CAPABILITY:
            raise TrainError(
                f"--cuda-graphs needs a GPU of compute capability {_MIN_CAPABILITY[0]}.{_MIN_CAPABILITY[1]} (Ampere) "
                "or later, and this one has "
                f"{capability[0]}.{capability[1]}. Leave it out."
            )
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, step: StepFunction) -> StepResult:
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            outcome = step()
        here.wait_stream(self._stream)
        return outcome

    def capture(self, step: StepFunction) -> tuple[StepResult, Replay]:
        gc.collect()  # garbage that is found in the middle of a recording might free what must not be freed then
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads go on: loaders lock pages, savers copy, NCCL looks at its events.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                outcome = step()
        except RuntimeError as error:
            first = error.__context__ or error  # ending a recording that failed fails as well
            if isinstance(first, torch.OutOfMemoryError):
                raise first from None
            raise TrainError(
                f"This step cannot be recorded as a CUDA graph. Leave --cuda-graphs out. What torch says: {first}"
            ) from first
        return outcome, graph.replay

    def reset_pool(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()


@dataclass(frozen=True, slots=True)
class _CapturedStep:
    """A step's passes, what they read, what they fill, and the parameters that get gradients."""

    batches: list[Batch]
    scales: LossScales
    result: StepResult
    replay: Replay
    params_with_grad: frozenset[Tensor]


class GraphedSteps:
    """Runs training steps like `PipelineExecutor.run`, from recordings once it has some."""

    def __init__(
        self, run: Callable[..., StepResult], gradient_reducer: GradientReducer, graph_capture: GraphCapture
    ) -> None:
        self._run = run
        self._gradient_reducer = gradient_reducer
        self._graph_capture = graph_capture
        self._captured_steps: dict[tuple[_BatchShape, ...], _CapturedStep] = {}
        self._num_warm_up_steps: Counter[tuple[bool, frozenset[_BatchShape]]] = Counter()

    def run(
        self,
        schedule: RankSchedule,
        batches: Sequence[Batch],
        scales: LossScales | None = None,
        *,
        clock: Callable[[], float] | None = None,
    ) -> StepResult:
        """A training step; one that is timed action by action is not replayed. Reports are good until the next step."""
        assert scales is not None, "there is nothing to record in an evaluation"
        shapes = tuple(_batch_shape(batch) for batch in batches)
        if clock is None and shapes in self._captured_steps:
            self._captured_steps[shapes] = recording = self._captured_steps.pop(shapes)  # the last to be dropped
            return self._replay(recording, batches, scales)
        # From the second micro-batch on gradients are added, by kernels that a step of one never calls.
        kind = (len(batches) > 1, frozenset(shapes))
        if clock is not None or self._num_warm_up_steps[kind] < WARM_UP_STEPS:
            if self._num_warm_up_steps[kind] == 0:
                self._captured_steps.clear()
                self._graph_capture.reset_pool()
            self._num_warm_up_steps[kind] += 1
            return self._graph_capture.run(partial(self._run, schedule, batches, scales, clock=clock))
        while len(self._captured_steps) >= MAX_GRAPHS:
            del self._captured_steps[next(iter(self._captured_steps))]
        self._captured_steps[shapes] = recording = self._capture(schedule, batches, scales)
        _log.info("a step of %d micro-batches is recorded, and replayed from now on", len(batches))
        return self._replay(recording, batches, scales)

    def _capture(self, schedule: RankSchedule, batches: Sequence[Batch], scales: LossScales) -> _CapturedStep:
        own = [Batch(*(None if x is None else x.clone() for x in _tensors(batch))) for batch in batches]
        own_scales = LossScales(token_loss=scales.token_loss.clone(), aux_loss=scales.aux_loss.clone())
        outcome, replay = self._graph_capture.capture(partial(self._run, schedule, own, own_scales))
        return _CapturedStep(own, own_scales, outcome, replay, self._gradient_reducer.params_with_grad())

    def _replay(self, captured: _CapturedStep, batches: Sequence[Batch], scales: LossScales) -> StepResult:
        captured.scales.token_loss.copy_(scales.token_loss)
        captured.scales.aux_loss.copy_(scales.aux_loss)
        for own, batch in zip(captured.batches, batches, strict=True):
            for mine, given in zip(_tensors(own), _tensors(batch), strict=True):
                if mine is not None and given is not None:
                    mine.copy_(given, non_blocking=True)
        captured.replay()
        self._gradient_reducer.mark_written(captured.params_with_grad)
        return StepResult(captured.result.loss_sum.clone(), dict(captured.result.router_statistics))


def _tensors(batch: Batch) -> tuple[Tensor | None, ...]:
    """All of a batch but its documents."""
    return tuple(getattr(batch, field.name) for field in fields(batch) if field.name != "documents")


def _batch_shape(batch: Batch) -> _BatchShape:
    """What a recording depends on."""
    if batch.documents is not None:
        raise TrainError(
            "A step over packed documents cannot be recorded as a CUDA graph: attention is planned by where they lie. Leave "
            "--cuda-graphs out, or --reset-attention-mask."
        )
    return tuple(None if x is None else (x.shape, x.dtype) for x in _tensors(batch))
