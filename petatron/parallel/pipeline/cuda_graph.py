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
  advances the offset. That holds for the default generator, the only one that ranks without tensor parallelism use.
- Another number of micro-batches, or another shape, is another capture. All share one memory pool: its content is needed only
  until a replay ends, but for the result, which is read before the next begins.
- Warm-up steps run on the capture stream: autograd remembers the stream on which a parameter was first used, and a captured
  backward must not use another.
- An eager step would need memory for its activations a second time, besides the pool. So before a kind of step runs for the
  first time, captures of other kinds are dropped; they need no second warm-up.

Which configs can be captured is in `config/checks/cuda_graphs.py`.
"""

from __future__ import annotations

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


class CudaGraphCapture:
    """Runs a step's passes eagerly, or captures them as a CUDA graph."""

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
        try:
            # Other threads go on: loaders pin memory, savers copy, NCCL queries its events.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = step()
        except RuntimeError as error:
            first = error.__context__ or error  # ending a failed capture fails as well
            if isinstance(first, torch.OutOfMemoryError):
                raise first from None
            raise TrainError(
                f"This step cannot be recorded as a CUDA graph. Leave --cuda-graphs out. What torch says: {first}"
            ) from first
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
        self, run: Callable[..., StepResult], gradient_reducer: GradientReducer, graph_capture: CudaGraphCapture
    ) -> None:
        self._run = run
        self._gradient_reducer = gradient_reducer
        gradient_reducer.keep_grads_allocated()
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
        """Runs a training step; one that is timed by action is not replayed. Router statistics are valid until the next step."""
        assert scales is not None, "there is nothing to record in an evaluation"
        shapes = tuple(_batch_shape(batch) for batch in batches)
        if clock is None and shapes in self._captured_steps:
            self._captured_steps[shapes] = captured = self._captured_steps.pop(shapes)  # most recently used
            return self._replay(captured, batches, scales)
        # From the second micro-batch on gradients are accumulated, by kernels that a step of one never calls.
        kind = (len(batches) > 1, frozenset(shapes))
        if clock is not None or self._num_warm_up_steps[kind] < WARM_UP_STEPS:
            if self._num_warm_up_steps[kind] == 0:
                self._captured_steps.clear()
                self._graph_capture.reset_pool()
            self._num_warm_up_steps[kind] += 1
            return self._graph_capture.run(partial(self._run, schedule, batches, scales, clock=clock))
        while len(self._captured_steps) >= MAX_GRAPHS:
            del self._captured_steps[next(iter(self._captured_steps))]
        self._captured_steps[shapes] = captured = self._capture(schedule, batches, scales)
        _log.info("a step of %d micro-batches is recorded, and replayed from now on", len(batches))
        return self._replay(captured, batches, scales)

    def _capture(self, schedule: RankSchedule, batches: Sequence[Batch], scales: LossScales) -> _CapturedStep:
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
