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
- Packed documents are entries of one array, of each sequence of a batch. Its length is part of a capture, and entries beyond the
  documents are empty.
- Another number of micro-batches, or another shape, is another capture. All share one memory pool: its content is needed only
  until a replay ends, but for the result, which is read before the next begins.
- Warm-up steps run on the capture stream: autograd remembers the stream on which a parameter was first used, and a captured
  backward must not use another.
- An eager step would need memory for its activations a second time, besides the pool. So before a kind of step runs for the
  first time, captures of other kinds are dropped; they need no second warm-up.

Communication over NCCL is captured with the rest: its kernels join the capture where they wait for the step's stream, and leave it
where the step waits for them. All ranks capture the same step, so a collective meets those of captured steps. Gradients that are
reduced during the backward pass are, to their end, in the graph; others are reduced after it.

Which configs can be captured is in `validate/cuda_graphs.py`; `auto_cuda_graphs.py` decides whether it pays.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from petatron.base.cublas_workspaces import workspaces_in_graph_pool
from petatron.base.errors import TrainError
from petatron.base.log import get_logger
from petatron.kernels.attention.document_layout import Documents
from petatron.kernels.size_limits import MIN_PADDED_DOCUMENT
from petatron.models.batch import Batch
from petatron.parallel.data.gradient_reduction import GradientReducer
from petatron.parallel.pipeline.executor import LossScales, StepResult
from petatron.schedule import RankSchedule

_log = get_logger(__name__)

WARM_UP_STEPS = 3
"""Eager steps of each kind before the capture."""
MAX_GRAPHS = 4
"""Graphs in the cache: those of a batch-size ramp are not used again, and each holds every kernel of its step."""
_MIN_DOCUMENTS = 8
"""Room for documents in a captured step; from there on by powers of two."""
_MIN_CAPABILITY = (8, 0)
"""Older devices have no FlashAttention, and its replacement needs the host."""

StepFunction = Callable[[], StepResult]
RunBatches = Callable[[list[Batch], LossScales | None], StepResult]
Replay = Callable[[], None]
_BatchShape = tuple[tuple[str, torch.Size, torch.dtype], ...]
_StepKey = tuple[bool, tuple[_BatchShape, ...]]
"""Whether the step trains, and the shapes of its micro-batches."""


def unsupported_device(device: torch.device) -> list[str]:
    """Returns why nothing can be captured on a CUDA device, if so."""
    capability, needed = torch.cuda.get_device_capability(device), _MIN_CAPABILITY
    if capability >= needed:
        return []
    present = f"{capability[0]}.{capability[1]}"
    return [f"it needs a GPU of compute capability {needed[0]}.{needed[1]} (Ampere) or later; this one has {present}"]


class CaptureError(TrainError):
    """A step that could not be captured; nothing of it is left."""

    def __init__(self, reason: str, message: str | None = None) -> None:
        """`reason` is short; `message` says what to do, by default to leave graphs out."""
        default = f"This step cannot be captured as a CUDA graph. Leave --cuda-graphs out, or say auto. What torch says: {reason}"
        super().__init__(message or default)
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
        # torch 2.13 finds out by itself which generators a graph draws from.
        register = getattr(graph, "register_generator_state", lambda generator: None)
        for generator in self._generators:
            register(generator)
        stream = torch.cuda.current_stream(self._device)
        generators = [torch.cuda.default_generators[self._device.index or 0], *self._generators]
        states = [generator.clone_state() for generator in generators]
        try:
            # Other threads go on: loaders pin memory, savers copy, NCCL queries its events.
            with (
                workspaces_in_graph_pool(),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                result = step()
        except RuntimeError as error:
            first = error.__context__ or error  # ending a failed capture fails as well
            del graph
            torch.cuda.set_stream(stream)
            for generator, state in zip(generators, states, strict=True):
                generator.graphsafe_set_state(state)
            with contextlib.suppress(RuntimeError):  # torch ends it only after a capture that succeeds, or had ended it
                torch._C._cuda_endAllocateToPool(self._device.index or 0, self._pool)
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
    """A captured step: its static inputs, its result, and the parameters that get gradients. An evaluation has no scales."""

    batches: list[Batch]
    scales: LossScales | None
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
        prepare: Callable[..., None] = lambda *, trains, captured: None,
        undo_point: Callable[[], Callable[[], None]] | None = None,
        warm_up_steps: int = WARM_UP_STEPS,
        any_rank: Callable[[bool], bool] | None = None,
    ) -> None:
        """`prepare` is called before a step (one that `trains`, or an evaluation) is captured or replayed: it completes what was started
        outside the graph and is used in it. `any_rank` returns whether something is so
        on any rank: with it, a capture that fails for whatever reason on some rank is a `CaptureError` on all, and what `undo_point`
        returned before it undoes what the host has noted."""
        self._run = run
        self._gradient_reducer = gradient_reducer
        self._graph_capture = graph_capture
        self._prepare = prepare
        self._num_warm_ups, self._any_rank, self._undo_point = warm_up_steps, any_rank, undo_point
        self._captured_steps: dict[_StepKey, _CapturedStep] = {}
        self._num_warm_up_steps: Counter[tuple[bool, frozenset[_BatchShape]]] = Counter()
        self._evaluated: set[_StepKey] = set()
        self._documents_room = _MIN_DOCUMENTS

    def run(
        self,
        schedule: RankSchedule,
        batches: Sequence[Batch],
        scales: LossScales | None = None,
        *,
        clock: Callable[[], float] | None = None,
    ) -> StepResult:
        """Runs a training step; one that is timed by action is not replayed. Router statistics are valid until the next step."""
        assert scales is not None, "an evaluation has a method of its own"
        self._gradient_reducer.keep_grads_allocated()
        shapes = self._shapes(batches)
        if clock is None and (True, shapes) in self._captured_steps:
            return self._replay((True, shapes), batches, scales)
        # From the second micro-batch on gradients are accumulated, by kernels that a step of one never calls. Room for more
        # documents is the same kind of step.
        plain = [replace(batch, documents=None, source_documents=None) for batch in batches]
        kind = (len(batches) > 1, frozenset(self._shapes(plain)))
        if clock is not None or self._num_warm_up_steps[kind] < self._num_warm_ups:
            if self._num_warm_up_steps[kind] == 0:
                self.clear()
            self._num_warm_up_steps[kind] += 1
            return self._graph_capture.run(partial(self._run, schedule, batches, scales, clock=clock))
        self._add((True, shapes), partial(self._run, schedule), batches, scales)
        return self._replay((True, shapes), batches, scales)

    def run_evaluation(
        self, forward: Callable[..., StepResult], schedule: RankSchedule, batches: Sequence[Batch]
    ) -> StepResult:
        """Runs the forward passes of an evaluation. They are captured where training steps are, in the memory of these."""
        if not self._captured_steps or any(_is_planned_by_host(batch) for batch in batches):
            return forward(schedule, batches)
        key = (False, self._shapes(batches))
        if key not in self._captured_steps:
            if key not in self._evaluated:
                self._evaluated.add(key)
                return self._graph_capture.run(partial(forward, schedule, batches))
            self._add(key, lambda batches, scales: forward(schedule, batches), batches, None)
        return self._replay(key, batches, None)

    def _add(self, key: _StepKey, run: RunBatches, batches: Sequence[Batch], scales: LossScales | None) -> None:
        while len(self._captured_steps) >= MAX_GRAPHS:
            del self._captured_steps[next(iter(self._captured_steps))]
        self._captured_steps[key] = self._capture_on_all_ranks(run, batches, scales)
        kind = "a step" if scales is not None else "an evaluation"
        _log.debug("%s of %d micro-batches is captured, and replayed from now on", kind, len(batches))

    def _shapes(self, batches: Sequence[Batch]) -> tuple[_BatchShape, ...]:
        """Returns what a capture of these micro-batches depends on: their shapes, and the room for documents, which only grows."""
        counts = [documents.num_documents for batch in batches for _, documents in _documents_of(batch)]
        most = max(counts, default=1)
        self._documents_room = max(self._documents_room, 1 << (most - 1).bit_length())
        return tuple(_batch_shape(batch, self._documents_room) for batch in batches)

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
        self._evaluated.clear()
        self._graph_capture.reset_pool()

    def _capture_on_all_ranks(
        self, run: RunBatches, batches: Sequence[Batch], scales: LossScales | None
    ) -> _CapturedStep:
        if self._any_rank is None:
            return self._capture(run, batches, scales)
        captured, error = None, None
        undo = None if self._undo_point is None else self._undo_point()
        try:
            captured = self._capture(run, batches, scales)
        except CaptureError as capture_error:
            error = capture_error
        except torch.OutOfMemoryError:
            error = CaptureError("memory does not suffice")
        if self._any_rank(error is not None) or captured is None:
            del captured
            if undo is not None:
                undo()
            raise error or CaptureError("another rank could not")
        return captured

    def _capture(self, run: RunBatches, batches: Sequence[Batch], scales: LossScales | None) -> _CapturedStep:
        self._prepare(trains=scales is not None, captured=True)
        static_batches, static_scales = list(map(_static_batch, batches, self._shapes(batches))), None
        if scales is not None:
            static_scales = LossScales(token_loss=scales.token_loss.clone(), aux_loss=scales.aux_loss.clone())
        result, replay = self._graph_capture.capture(partial(run, static_batches, static_scales))
        return _CapturedStep(static_batches, static_scales, result, replay, self._gradient_reducer.params_with_grad())

    def _replay(self, key: _StepKey, batches: Sequence[Batch], scales: LossScales | None) -> StepResult:
        self._captured_steps[key] = captured = self._captured_steps.pop(key)  # most recently used
        if captured.scales is not None and scales is not None:
            captured.scales.token_loss.copy_(scales.token_loss)
            captured.scales.aux_loss.copy_(scales.aux_loss)
        for static, batch in zip(captured.batches, batches, strict=True):
            for name, target in static.arrays.items():
                target.copy_(batch[name], non_blocking=True)
            for (_, target), (_, documents) in zip(_documents_of(static), _documents_of(batch), strict=True):
                target.copy_(documents)
            if static.key_spans is not None and batch.key_spans is not None:
                static.key_spans.copy_(batch.key_spans)
        self._prepare(trains=scales is not None, captured=False)
        captured.replay()
        if scales is not None:
            self._gradient_reducer.mark_written(captured.params_with_grad)
        return StepResult(captured.result.sums.clone(), dict(captured.result.router_statistics))


def _is_planned_by_host(batch: Batch) -> bool:
    """Whether attention of a batch reads the lengths of its documents on the host."""
    return any(
        documents.padded_rows is not None or documents.prefix_ends_BS is not None
        for _, documents in _documents_of(batch)
    )


def _documents_of(batch: Batch) -> list[tuple[str, Documents]]:
    """Returns the documents of each sequence of a batch, by their names in it."""
    named = (("documents", batch.documents), ("source_documents", batch.source_documents))
    return [(name, documents) for name, documents in named if documents is not None]


def _batch_shape(batch: Batch, most_documents: int) -> _BatchShape:
    """Returns the names, shapes and dtypes that a capture depends on."""
    shapes = tuple((name, x.shape, x.dtype) for name, x in batch.arrays.items())
    described = (_documents_shape(name, documents, most_documents) for name, documents in _documents_of(batch))
    spans = () if batch.key_spans is None else (("key_spans", batch.key_spans.stop_BS.shape, torch.int64),)
    return (*shapes, *spans, *described)


def _documents_shape(name: str, documents: Documents, most_documents: int) -> tuple[str, torch.Size, torch.dtype]:
    """Returns what a capture depends on of the documents of one sequence."""
    if documents.padded_rows is not None:
        raise CaptureError(
            "attention of long packed documents is planned from their lengths",
            f"A step over packed documents of {MIN_PADDED_DOCUMENT} tokens or more cannot be captured as a CUDA graph: attention is "
            "planned from their lengths. Leave --cuda-graphs out, or --reset-attention-mask.",
        )
    if documents.prefix_ends_BS is not None:
        raise CaptureError(
            "attention in prefixes is planned from their lengths",
            "A step over samples with a prefix cannot be captured as a CUDA graph: attention is planned from the lengths of prefixes. "
            "Leave --cuda-graphs out.",
        )
    return name, torch.Size((documents.equal_length or 0, most_documents)), documents.cu_seqlens.dtype


def _static_batch(batch: Batch, shape: _BatchShape) -> Batch:
    """Returns a copy that other batches of this shape can be copied into."""
    static, rooms = batch.clone(), {name: size[-1] for name, size, _ in shape}
    bounded = {name: documents.bounded(rooms[name]) for name, documents in _documents_of(batch)}
    spans = None if batch.key_spans is None else batch.key_spans.clone()
    return replace(static, **bounded, key_spans=spans)
