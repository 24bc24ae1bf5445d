"""Captures a step's forward and backward passes as a CUDA graph once, and replays it from then on.

The host needs some microseconds to launch a kernel, however short the kernel is, and more to determine the next one. Where kernels
are shorter than that (small models, short sequences) the device waits. A graph is launched as a whole.

    warm-up steps run eagerly: kernels are compiled, plans made, tables moved to the device
    one step      is captured, which computes nothing, and replayed
    all others    copy their batches and scales into the captured step's tensors, and replay

A replay repeats kernels with the launch parameters and addresses of the capture, and no Python runs. Hence:

- Inputs and outputs have static memory. Weights are in flat buffers that never move, and gradients are told not to.
- Python-side state is updated after a replay: gradients are marked as written (`GradientReducer.mark_written`). Weights cast to
  FP8 are dropped before and after every step, so the cast is in the graph, and evaluation never uses its memory.
- Random numbers are those of a run without graphs: a replay reads the generator's seed and offset from memory, and torch
  advances the offset. That holds for the default generator and those that are registered: the stream that tensor-parallel
  ranks share.
- Another number of micro-batches, or another shape, is another capture. All share one memory pool: its content is needed only
  until a replay ends, but for the result, which is read before the next begins.
- Warm-up steps run on the capture stream: autograd remembers the stream on which a parameter was first used, and a captured
  backward must not use another.
- An eager step would need memory for its activations a second time, besides the pool. So before a kind of step runs for the
  first time, captures of other kinds are dropped; they need no second warm-up.

Communication over NCCL is captured with the rest: its kernels join the capture where they wait for the step's stream, and leave it
where the step waits for them. All ranks capture the same step, so a collective meets those of captured steps. Gradients that are
reduced during the backward pass are, to their end, in the graph; others are reduced after it.

Which configs can be captured is in `config/checks/cuda_graphs.py`; `auto_cuda_graphs.py` decides whether it pays.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

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
"""Eager steps of each kind before the capture."""
MAX_GRAPHS = 4
"""Graphs in the cache: those of a batch-size ramp are not used again, and each holds every kernel of its step."""
_MIN_CAPABILITY = (8, 0)
"""Older devices have no FlashAttention, and its replacement needs the host."""

StepFunction = Callable[[], StepResult]
Replay = Callable[[], None]
_BatchShape = tuple[tuple[str, torch.Size, torch.dtype], ...]


def unsupported_device(device: torch.device) -> list[str]:
    """Returns why nothing can be captured on a CUDA device, if so."""
    found, needed = torch.cuda.get_device_capability(device), _MIN_CAPABILITY
    if found >= needed:
        return []
    return [
        f"it needs a GPU of compute capability {needed[0]}.{needed[1]} (Ampere) or later; this one has {found[0]}.{found[1]}"
    ]


class CaptureError(TrainError):
    """A step that could not be captured; nothing of it is left."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"This step cannot be recorded as a CUDA graph. Leave --cuda-graphs out, or say auto. What torch says: {reason}"
        )
        self.reason = reason


class CudaGraphCapture:
    """Runs a step's passes eagerly, or captures them as a CUDA graph."""

    def __init__(self, device: torch.device, *, generators: Sequence[torch.Generator] = ()) -> None:
        """`generators` are those that steps draw from, besides the default one."""
        for reason in unsupported_device(device):
            raise TrainError(f"--cuda-graphs cannot be used: {reason}. Leave it out.")
        self._device = device
        self._generators = generators
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, step: StepFunction) -> StepResult:
        """Runs the step eagerly, on the capture stream."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = step()
        current.wait_stream(self._stream)
        return result

    def capture(self, step: StepFunction) -> tuple[StepResult, Replay]:
        """Captures the step; returns its result tensors, and the replay that fills them: before the first one they hold nothing."""
        gc.collect()  # garbage collected during the capture might free what must not be freed then
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            _register_generator(graph, generator)
        stream = torch.cuda.current_stream(self._device)
        generators = [torch.cuda.default_generators[self._device.index or 0], *self._generators]
        states = [generator.clone_state() for generator in generators]
        try:
            # Other threads go on: loaders pin memory, savers copy, NCCL queries its events.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = step()
        except RuntimeError as error:
            first = error.__context__ or error  # ending a failed capture fails as well
            del graph
            torch.cuda.set_stream(stream)
            for generator, state in zip(generators, states, strict=True):
                generator.graphsafe_set_state(state)
            _end_pool_allocation(self._device, self._pool)
            self.reset_pool()
            if isinstance(first, torch.OutOfMemoryError):
                raise first from None
            raise CaptureError(str(first)) from first
        return result, graph.replay

    def reset_pool(self) -> None:
        """Starts a new memory pool: no captured graph will be replayed any more."""
        self._pool = torch.cuda.graph_pool_handle()


@dataclass(frozen=True, slots=True)
class _CapturedStep:
    """A captured step: its static inputs, its result, and the parameters that get gradients."""

    batches: list[Batch]
    scales: LossScales
    result: StepResult
    replay: Replay
    params_with_grad: frozenset[Tensor]


class GraphedSteps:
    """Runs training steps like `PipelineExecutor.run`, from captured graphs once there are some."""

    def __init__(
        self,
        run: Callable[..., StepResult],
        gradient_reducer: GradientReducer,
        graph_capture: CudaGraphCapture,
        *,
        before_replay: Callable[[], None] = lambda: None,
        warm_up_steps: int = WARM_UP_STEPS,
        any_rank: Callable[[bool], bool] | None = None,
    ) -> None:
        """`before_replay` completes what was started outside the graph and is used in it. `any_rank` returns whether something is so
        on any rank: with it, a capture that fails for whatever reason on some rank is a `CaptureError` on all."""
        self._run = run
        self._gradient_reducer = gradient_reducer
        self._graph_capture = graph_capture
        self._before_replay = before_replay
        self._num_warm_ups, self._any_rank = warm_up_steps, any_rank
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
        """Runs a training step; one that is timed by action is not replayed. Router statistics are valid until the next step."""
        assert scales is not None, "there is nothing to record in an evaluation"
        self._gradient_reducer.keep_grads_allocated()
        shapes = tuple(_batch_shape(batch) for batch in batches)
        if clock is None and shapes in self._captured_steps:
            self._captured_steps[shapes] = captured = self._captured_steps.pop(shapes)  # most recently used
            return self._replay(captured, batches, scales)
        # From the second micro-batch on gradients are accumulated, by kernels that a step of one never calls.
        kind = (len(batches) > 1, frozenset(shapes))
        if clock is not None or self._num_warm_up_steps[kind] < self._num_warm_ups:
            if self._num_warm_up_steps[kind] == 0:
                self.clear()
            self._num_warm_up_steps[kind] += 1
            return self._graph_capture.run(partial(self._run, schedule, batches, scales, clock=clock))
        while len(self._captured_steps) >= MAX_GRAPHS:
            del self._captured_steps[next(iter(self._captured_steps))]
        captured = self._capture_on_all_ranks(schedule, batches, scales)
        self._captured_steps[shapes] = captured
        _log.debug("a step of %d micro-batches is recorded, and replayed from now on", len(batches))
        return self._replay(captured, batches, scales)

    @property
    def num_captured(self) -> int:
        """How many captured steps there are."""
        return len(self._captured_steps)

    def stop(self) -> None:
        """Drops what was captured; gradients may move again."""
        self.clear()
        self._gradient_reducer.let_grads_be_freed()

    def clear(self) -> None:
        """Drops all captured steps, and their memory."""
        self._captured_steps.clear()
        self._graph_capture.reset_pool()

    def _capture_on_all_ranks(
        self, schedule: RankSchedule, batches: Sequence[Batch], scales: LossScales
    ) -> _CapturedStep:
        if self._any_rank is None:
            return self._capture(schedule, batches, scales)
        captured, error = None, None
        try:
            captured = self._capture(schedule, batches, scales)
        except CaptureError as found:
            error = found
        except torch.OutOfMemoryError:
            error = CaptureError("memory does not suffice")
        if self._any_rank(error is not None) or captured is None:
            del captured
            raise error or CaptureError("another rank could not")
        return captured

    def _capture(self, schedule: RankSchedule, batches: Sequence[Batch], scales: LossScales) -> _CapturedStep:
        self._before_replay()
        static_batches = [batch.clone() for batch in batches]
        static_scales = LossScales(token_loss=scales.token_loss.clone(), aux_loss=scales.aux_loss.clone())
        result, replay = self._graph_capture.capture(partial(self._run, schedule, static_batches, static_scales))
        return _CapturedStep(static_batches, static_scales, result, replay, self._gradient_reducer.params_with_grad())

    def _replay(self, captured: _CapturedStep, batches: Sequence[Batch], scales: LossScales) -> StepResult:
        captured.scales.token_loss.copy_(scales.token_loss)
        captured.scales.aux_loss.copy_(scales.aux_loss)
        for static, batch in zip(captured.batches, batches, strict=True):
            for name, target in static.arrays.items():
                target.copy_(batch[name], non_blocking=True)
        self._before_replay()
        captured.replay()
        self._gradient_reducer.mark_written(captured.params_with_grad)
        return StepResult(captured.result.loss_sums.clone(), dict(captured.result.router_statistics))


def _batch_shape(batch: Batch) -> _BatchShape:
    """Returns the names, shapes and dtypes that a capture depends on."""
    if batch.documents is not None:
        raise TrainError(
            "A step over packed documents cannot be recorded as a CUDA graph: attention is planned from their boundaries. Leave "
            "--cuda-graphs out, or --reset-attention-mask."
        )
    return tuple((name, x.shape, x.dtype) for name, x in batch.arrays.items())


def _end_pool_allocation(device: torch.device, pool: object) -> None:
    """Ends the allocation to a pool that a failed capture began: torch does so only after one that succeeds."""
    with contextlib.suppress(RuntimeError):  # it had been ended
        torch._C._cuda_endAllocateToPool(device.index or 0, pool)


def _register_generator(graph: torch.cuda.CUDAGraph, generator: torch.Generator) -> None:
    """Lets a replay draw new numbers from a generator. torch 2.13 finds out by itself which ones a graph draws from."""
    register = getattr(graph, "register_generator_state", None)
    if register is not None:
        register(generator)
