"""A step as a CUDA graph: its forward and backward passes are recorded once, and replayed from then on.

The host needs some microseconds to start a kernel, however short the kernel is, and more to find out which comes next. Where
kernels are shorter than that (small models, short sequences) the device waits. A graph is started as a whole.

    first steps   run as they are: kernels are compiled, plans made, tables moved to the device
    then one      is recorded, which computes nothing, and replayed
    all others    are copied to where the recorded one's batches and scales lie, and replayed

A replay repeats kernels with the launch parameters and addresses of the recording, and no Python runs. Hence:

- What goes in and comes out has memory of its own. Weights and gradients lie in flat buffers that never move.
- What Python would have noted is put right: gradients count as come (`GradientSync.assume_written`). Weights that were cast to
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
from petatron.parallel.data.gradient_reduction import GradientSync
from petatron.parallel.pipeline.executor import Outcome, Scales
from petatron.schedule import RankSchedule

_log = get_logger(__name__)

WARM_UP = 3
"""Steps of each kind that run as they are."""
KEPT = 4
"""Recordings that are kept: those of a ramp of the batch size never come back, and each knows every kernel of its step."""
_OLDEST = (8, 0)
"""Older devices have no FlashAttention, and the host plays a part in what takes its place."""

Work = Callable[[], Outcome]
Replay = Callable[[], None]
_Shape = tuple[tuple[torch.Size, torch.dtype] | None, ...]


class Recorder(Protocol):
    """Runs a step's passes, or records them."""

    def run(self, work: Work) -> Outcome:
        """As it is, where a recording of it would be made."""
        ...

    def record(self, work: Work) -> tuple[Outcome, Replay]:
        """The outcome, in memory that every call of the second fills; before the first of these it holds nothing."""
        ...

    def forget(self) -> None:
        """Nothing that was recorded will be replayed any more."""
        ...


class CudaRecorder:
    """Records what a CUDA device is told to do."""

    def __init__(self, device: torch.device) -> None:
        capability = torch.cuda.get_device_capability(device)
        if capability < _OLDEST:
            raise TrainError(
                f"--cuda-graphs needs a GPU of compute capability {_OLDEST[0]}.{_OLDEST[1]} (Ampere) or later, and this one has "
                f"{capability[0]}.{capability[1]}. Leave it out."
            )
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, work: Work) -> Outcome:
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            outcome = work()
        here.wait_stream(self._stream)
        return outcome

    def record(self, work: Work) -> tuple[Outcome, Replay]:
        gc.collect()  # garbage that is found in the middle of a recording might free what must not be freed then
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads go on: loaders lock pages, savers copy, NCCL looks at its events.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                outcome = work()
        except RuntimeError as error:
            first = error.__context__ or error  # ending a recording that failed fails as well
            if isinstance(first, torch.OutOfMemoryError):
                raise first from None
            raise TrainError(
                f"This step cannot be recorded as a CUDA graph. Leave --cuda-graphs out. What torch says: {first}"
            ) from first
        return outcome, graph.replay

    def forget(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()


@dataclass(frozen=True, slots=True)
class _Recording:
    """A step's passes, what they read, what they fill, and the parameters that get gradients."""

    batches: list[Batch]
    scales: Scales
    outcome: Outcome
    replay: Replay
    written: frozenset[Tensor]


class StepGraphs:
    """Runs training steps like `Pipeline.run`, from recordings once it has some."""

    def __init__(self, run: Callable[..., Outcome], gradients: GradientSync, recorder: Recorder) -> None:
        self._run = run
        self._gradients = gradients
        self._recorder = recorder
        self._recordings: dict[tuple[_Shape, ...], _Recording] = {}
        self._ran: Counter[tuple[bool, frozenset[_Shape]]] = Counter()

    def run(
        self,
        schedule: RankSchedule,
        batches: Sequence[Batch],
        scales: Scales | None = None,
        *,
        clock: Callable[[], float] | None = None,
    ) -> Outcome:
        """A training step; one that is timed action by action is not replayed. Reports are good until the next step."""
        assert scales is not None, "there is nothing to record in an evaluation"
        shapes = tuple(_shape(batch) for batch in batches)
        if clock is None and shapes in self._recordings:
            self._recordings[shapes] = recording = self._recordings.pop(shapes)  # the last to be dropped
            return self._replay(recording, batches, scales)
        # From the second micro-batch on gradients are added, by kernels that a step of one never calls.
        kind = (len(batches) > 1, frozenset(shapes))
        if clock is not None or self._ran[kind] < WARM_UP:
            if self._ran[kind] == 0:
                self._recordings.clear()
                self._recorder.forget()
            self._ran[kind] += 1
            return self._recorder.run(partial(self._run, schedule, batches, scales, clock=clock))
        while len(self._recordings) >= KEPT:
            del self._recordings[next(iter(self._recordings))]
        self._recordings[shapes] = recording = self._record(schedule, batches, scales)
        _log.info("a step of %d micro-batches is recorded, and replayed from now on", len(batches))
        return self._replay(recording, batches, scales)

    def _record(self, schedule: RankSchedule, batches: Sequence[Batch], scales: Scales) -> _Recording:
        own = [Batch(*(None if x is None else x.clone() for x in _tensors(batch))) for batch in batches]
        own_scales = Scales(loss=scales.loss.clone(), extra=scales.extra.clone())
        outcome, replay = self._recorder.record(partial(self._run, schedule, own, own_scales))
        return _Recording(own, own_scales, outcome, replay, self._gradients.written())

    def _replay(self, recording: _Recording, batches: Sequence[Batch], scales: Scales) -> Outcome:
        recording.scales.loss.copy_(scales.loss)
        recording.scales.extra.copy_(scales.extra)
        for own, batch in zip(recording.batches, batches, strict=True):
            for mine, given in zip(_tensors(own), _tensors(batch), strict=True):
                if mine is not None and given is not None:
                    mine.copy_(given, non_blocking=True)
        recording.replay()
        self._gradients.assume_written(recording.written)
        return Outcome(recording.outcome.total.clone(), dict(recording.outcome.reports))


def _tensors(batch: Batch) -> tuple[Tensor | None, ...]:
    """All of a batch but its documents."""
    return tuple(getattr(batch, field.name) for field in fields(batch) if field.name != "documents")


def _shape(batch: Batch) -> _Shape:
    """What a recording depends on."""
    if batch.documents is not None:
        raise TrainError(
            "A step over packed documents cannot be recorded as a CUDA graph: attention is planned by where they lie. Leave "
            "--cuda-graphs out, or --reset-attention-mask."
        )
    return tuple(None if x is None else (x.shape, x.dtype) for x in _tensors(batch))
