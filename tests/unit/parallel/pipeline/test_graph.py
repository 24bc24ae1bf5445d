"""Recorded steps without a device that records: a stand-in keeps every rule of a CUDA graph, and numbers stay the same to the bit.

The stand-in's recording computes nothing, and its replay computes behind Python's back: whatever Python notes in the meantime is
as it was before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from petatron.base.errors import TrainError
from petatron.data.masked.span_batch import make_span_batch
from petatron.kernels.attention.document_layout import Documents
from petatron.mesh.collectives import Handle
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.models.batch import Batch
from petatron.parallel.data.gradient_reduction import GradientReducer
from petatron.parallel.parallel_model import ParallelModel
from petatron.parallel.pipeline import cuda_graph
from petatron.parallel.pipeline.cuda_graph import (
    MAX_GRAPHS,
    WARM_UP_STEPS,
    CaptureError,
    CudaGraphCapture,
    GraphedSteps,
    Replay,
    StepFunction,
)
from petatron.parallel.pipeline.executor import LossScales, StepResult
from petatron.schedule import RankSchedule
from petatron.schedule.actions import TimedAction
from petatron.train.build_run import build_model, build_optimizer
from tests.dist import RankPool
from tests.longform import diagonal
from tests.parity.harness import tiny_run

Notes = tuple[list[bool], list[tuple[int, list[Handle]]], list[bool]]


class StandIn:
    """Records on a CPU, and counts what it is asked for."""

    def __init__(self, model: ParallelModel) -> None:
        assert isinstance(model.gradient_reducer, GradientReducer)
        self.model, self.sync = model, model.gradient_reducer
        self.calls: list[str] = []

    def _grads(self) -> list[Tensor]:
        return [grads for group in self.sync._param_groups for grads in group.grads()]

    def _grads(self) -> list[Tensor]:
        return [grads for group in self.sync._param_groups for grads in group.grads()]

    def run(self, step: StepFunction) -> StepResult:
        self.calls.append("run")
        return step()

    def capture(self, step: StepFunction) -> tuple[StepResult, Replay]:
        self.calls.append("capture")
        begun, memory = self._notes(), [*self._memory()]
        undo_fp8, kept = self.model.fp8_gemms.undo_point(), [x.clone() for x in memory]
        generator = torch.get_rng_state()
        outcome = step()
        torch.set_rng_state(generator)
        for x, before in zip(memory, kept, strict=True):
            x.copy_(before)
        noted_fp8 = self.model.fp8_gemms.undo_point()
        for made in (outcome.sums, *outcome.router_statistics.values()):
            made.fill_(float("nan"))

        def replay() -> None:
            self.calls.append("replay")
            now = self._notes()
            self._restore(begun)
            undo_fp8()
            made = step()
            self._restore(now)
            noted_fp8()
            outcome.sums.copy_(made.sums)
            for layer, report in outcome.router_statistics.items():
                report.copy_(made.router_statistics[layer])

        return outcome, replay

    def reset_pool(self) -> None:
        self.calls.append("reset_pool")

    def _memory(self) -> Iterator[Tensor]:
        """What a step changes on the device: gathered weights, gradients, and histories of scales."""
        yield from (group.flat_weights for group in self.sync._param_groups)
        yield from self._grads()
        for history in self.model.fp8_gemms._amax_histories().values():
            assert history._history is not None and history._scale is not None
            yield from (history._history, history._scale)

    def _notes(self) -> Notes:
        sends = list(self.sync._reductions)
        fresh = [main.overwrite_next for main in self.sync._main_grads.values()]
        gathers = [group._gather_due for group in self.sync._param_groups]
        return fresh, [(send.num_pending, list(send.handles)) for send in sends], gathers

    def _restore(self, notes: Notes) -> None:
        fresh, waiting, gathers = notes
        for group, due in zip(self.sync._param_groups, gathers, strict=True):
            group._gather_due = due
        for main, value in zip(self.sync._main_grads.values(), fresh, strict=True):
            main.overwrite_next = value
        sends = list(self.sync._reductions)
        for send, (left, handles) in zip(sends, waiting, strict=True):
            send.num_pending, send.handles = left, list(handles)


def batches(count: int, step: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1000 + step)
    found = []
    for _ in range(count):
        text = torch.randint(0, 131, (2, 17), generator=generator)
        mask = (torch.rand(2, 16, generator=generator) > 0.2).float()
        found.append(Batch(text[:, :-1], text[:, 1:], mask))
    return found


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    evaluated: list[float]
    weights: list[Tensor]
    routers: list[Tensor | None]
    calls: list[str]


def train(flags: str, counts: Sequence[int], *, recorded: bool, evaluate_after: Sequence[int] = ()) -> Trained:
    """Steps of so many micro-batches each."""
    run = tiny_run(flags)
    model = build_model(run, ParallelMesh.single())
    optimizer = build_optimizer(run, model)
    stand_in = StandIn(model)
    if recorded:
        model.use_cuda_graphs(stand_in)
    losses, evaluated, routers = [], [], []
    for step, count in enumerate(counts):
        losses.append(float(model.train_step(batches(count, step), loss_scale=2.0 + step)))
        optimizer.step(lr=1e-2, weight_decay=0.1, loss_scale=2.0 + step)
        routers.append(model.router_statistics.totals)
        if step in evaluate_after:
            evaluated.append(float(model.evaluate(batches(3, 99))[0]))
    return Trained(
        losses,
        evaluated,
        [weight.clone() for group in model.param_groups for weight in group.weights()],
        routers,
        stand_in.calls,
    )


def gathered_losses(flags: str, recorded: bool) -> list[float]:
    """On a rank of two with sharded optimizer state: losses of steps and evaluations."""
    run = tiny_run(
        f"--dp 2 --use-distributed-optimizer --global-batch-size 8 --micro-batch-size 2 {flags}", world_size=2
    )
    model = build_model(run, ParallelMesh(Layout.from_config(run.parallel), dist.get_rank()))
    optimizer = build_optimizer(run, model)
    if recorded:
        model.use_cuda_graphs(StandIn(model))
    losses = []
    for step in range(WARM_UP_STEPS + 5):
        losses.append(float(model.train_step(batches(2, 100 * model.mesh.rank + step))))
        optimizer.step(lr=1e-2, weight_decay=0.1)
        if step > WARM_UP_STEPS:
            losses.append(float(model.evaluate(batches(1, 50 + step))[0]))
    return losses


@diagonal(3)
@pytest.mark.parametrize("flags", ["--overlap-param-gather", "", "--no-overlap-grad-reduce"])
def test_gathers_that_overlap_a_step_are_part_of_it(ranks: RankPool, flags: str):
    """A replay gathers the weights itself; an evaluation after the update does so before it."""
    plain, recorded = (ranks.run(gathered_losses, 2, flags, recorded) for recorded in (False, True))
    assert recorded == plain and len(set(plain[0])) == len(plain[0])


def same(one: Trained, other: Trained) -> None:
    assert one.losses == other.losses
    assert one.evaluated == other.evaluated
    assert all(torch.equal(a, b) for a, b in zip(one.weights, other.weights, strict=True))
    for a, b in zip(one.routers, other.routers, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)  # type: ignore[arg-type]


MODELS = {
    "dense": "",
    "tied": "--no-untie-embeddings-and-output-weights --no-overlap-grad-reduce",
    "experts": "--num-experts 4 --moe-aux-loss-coeff 0.01 --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
    "eight bits": "--bf16 --fp8-hybrid --fp8-recipe tensorwise",
    "delayed": "--bf16 --fp8-hybrid --fp8-recipe delayed --fp8-amax-history-len 3 --fp8-amax-compute-algo max",
    "gradients sent in bf16": "--bf16 --grad-reduce-in-bf16 --use-distributed-optimizer",
    "dropout": "--hidden-dropout 0.1",
    "recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}


@diagonal(3)
@pytest.mark.parametrize("model", MODELS)
def test_a_recorded_run_is_the_same_run(model: str):
    counts = [2] * 7
    plain = train(MODELS[model], counts, recorded=False, evaluate_after=(1, 4, 5, 6))
    found = train(MODELS[model], counts, recorded=True, evaluate_after=(1, 4, 5, 6))
    steps, evaluations = ["capture", "replay", "replay"], ["run", "replay", "capture", "replay", "replay", "replay"]
    assert found.calls == ["reset_pool", *["run"] * WARM_UP_STEPS, *steps, *evaluations]
    assert len(set(plain.losses)) == len(plain.losses)
    same(found, plain)


def test_each_number_of_micro_batches_has_a_recording():
    counts = [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 1, 2, 3]
    found = train("", counts, recorded=True)
    same(found, train("", counts, recorded=False))
    kinds = "reset_pool run run run capture replay reset_pool run run run capture replay capture replay replay capture replay replay replay"
    assert found.calls == kinds.split(), "the third size adds gradients like the second, and needs no warm-up"


def test_recordings_that_were_not_used_for_long_are_dropped():
    counts = [2, 2, 2, *range(2, 2 + MAX_GRAPHS), 2, 2 + MAX_GRAPHS, 2, 3]
    found = train("", counts, recorded=True)
    same(found, train("", counts, recorded=False))
    fresh = ["capture", "replay"]
    assert found.calls == ["reset_pool", *["run"] * 3, *fresh * MAX_GRAPHS, "replay", *fresh, "replay", *fresh]


def test_a_step_that_is_timed_is_not_replayed():
    model = build_model(tiny_run(), ParallelMesh.single())
    stand_in = StandIn(model)
    model.use_cuda_graphs(stand_in)
    timed: list[TimedAction] = []
    for step in range(WARM_UP_STEPS + 2):
        model.train_step(batches(2, step))
    model.train_step(batches(2, 9), timeline=timed.extend)
    assert len(timed) == 4 and stand_in.calls[-2:] == ["replay", "run"]


def test_what_gets_no_gradient_has_one_of_zero_after_a_replay():
    model = build_model(tiny_run(), ParallelMesh.single())
    stand_in = StandIn(model)
    model.use_cuda_graphs(stand_in)
    grads = {slot.name: g.param_grad(slot) for g in stand_in.sync._param_groups for slot in g.params}
    model.module.get_parameter("norm.weight").requires_grad_(False)
    frozen = grads.pop("norm.weight")
    for step in range(WARM_UP_STEPS + 2):
        frozen.fill_(float("nan"))
        model.train_step(batches(1, step))
        assert torch.equal(frozen, torch.zeros_like(frozen))
        assert all(float(grad.abs().max()) > 0.0 for grad in grads.values())


def packed(count: int, step: int, *, documents: int) -> list[Batch]:
    """Batches of so many documents in the first row; the other row is one."""
    found = []
    for batch in batches(count, step):
        begins = torch.randperm(15, generator=torch.Generator().manual_seed(step))[: documents - 1] + 1
        starts = torch.zeros(2, 16, dtype=torch.int64)
        starts[0, begins] = begins
        found.append(replace(batch, documents=Documents.of(starts.cummax(1).values)))
    return found


def test_packed_documents_are_copied_into_a_recording():
    """Of more documents than there is room for, there is another, which has room for fewer too."""
    numbers = [3, 7, 2, 5, 4, 12, 15, 6, 1, 7, 1]
    found: list[list[float]] = []
    for recorded in (True, False):
        model = build_model(tiny_run(), ParallelMesh.single())
        stand_in = StandIn(model)
        if recorded:
            model.use_cuda_graphs(stand_in)
        found.append([])
        for step, documents in enumerate(numbers):
            found[-1].append(float(model.train_step(packed(2, step, documents=documents))))
        found[-1] += [float(model.evaluate(packed(1, step, documents=step))[0]) for step in (2, 3, 4, 9)]
        if recorded:
            fresh, again = ["capture", "replay"], ["replay"]
            assert stand_in.calls == [
                "reset_pool",
                *["run"] * 3,
                *fresh,
                *again,
                *fresh,
                *again * 5,
                "run",
                *fresh,
                *again * 2,
            ]
    assert found[0] == found[1] and len(set(found[0])) == len(found[0])


def corrupted(step: int) -> Batch:
    """Two texts and their spans, both padded, of other lengths in every step."""
    generator = np.random.default_rng(step)

    def sample() -> dict[str, Any]:
        tokens = {name: generator.integers(0, 30, size) for name, size in (("encoder_tokens", 16), ("tokens", 12))}
        count = int(generator.integers(1, 12))
        more = {"num_encoder_tokens": np.int64(generator.integers(1, 16)), "num_tokens": np.int64(count)}
        return tokens | more | {"labels": tokens["tokens"], "loss_mask": (np.arange(12) < count).astype(np.float32)}

    return make_span_batch([sample(), sample()])


def test_both_sequences_of_an_encoder_decoder_are_copied_into_a_recording():
    flags = "--model-type t5 --encoder-num-layers 1 --decoder-num-layers 1 --decoder-seq-length 12 --position-embedding-type"
    found: list[list[float]] = []
    for recorded in (True, False):
        model = build_model(tiny_run(f"{flags} relative"), ParallelMesh.single())
        stand_in = StandIn(model)
        if recorded:
            model.use_cuda_graphs(stand_in)
        found.append([float(model.train_step([corrupted(step)])) for step in range(WARM_UP_STEPS + 4)])
        assert not recorded or stand_in.calls.count("replay") == 4
    assert found[0] == found[1] and len(set(found[0])) == len(found[0])


def test_prefixes_are_refused():
    text = torch.zeros(1, 8, dtype=torch.int64)
    documents = Documents.build(text.numpy(), in_prefix_BS=np.arange(8)[None] < 3)
    with pytest.raises(CaptureError, match="samples with a prefix"):
        cuda_graph._batch_shape(Batch(text, documents=documents), 8)


def test_long_packed_documents_are_refused_and_evaluated_as_ever():
    model = build_model(tiny_run("--seq-length 1024"), ParallelMesh.single())
    stand_in = StandIn(model)
    model.use_cuda_graphs(stand_in)
    text = torch.zeros(1, 1024, dtype=torch.int64)
    long = Batch(text, text, torch.ones(1, 1024), documents=Documents.of(torch.zeros_like(text)))
    with pytest.raises(TrainError, match="packed documents of 1024 tokens or more cannot be captured"):
        model.train_step([long])
    for step in range(WARM_UP_STEPS + 1):
        model.train_step(batches(1, step))
    calls = list(stand_in.calls)
    assert float(model.evaluate([long])[0]) > 0 and stand_in.calls == calls


class Repeats:
    """Captures by keeping the function and its static tensors: a replay runs it again."""

    def run(self, step: StepFunction) -> StepResult:
        return step()

    def capture(self, step: StepFunction) -> tuple[StepResult, Replay]:
        result = step()

        def replay() -> None:
            result.sums.copy_(step().sums)

        result.sums.fill_(float("nan"))
        return result, replay

    def reset_pool(self) -> None:
        pass


def test_a_replay_gets_every_array_and_every_scale():
    """Arrays of any names, one scale per loss; arrays of other names or shapes are another capture."""
    seen: list[list[Batch]] = []

    def run(schedule: object, batches: list[Batch], scales: LossScales, *, clock: object = None) -> StepResult:
        seen.append(batches)
        sums = torch.stack([batch["image"].sum() + 10 * batch["text"].sum() for batch in batches]).sum()
        return StepResult(torch.cat([scales.token_loss * sums, scales.aux_loss.reshape(1)]))

    def batch_of(value: float, *, text: str = "text") -> Batch:
        arrays = {"image": torch.full((2, 3), value), text: torch.full((2, 4), 2 * value)}
        return Batch(
            arrays=arrays | ({"text": torch.zeros(1)} if text != "text" else {}), sequence_dims={"image": None}
        )

    reducer: Any = SimpleNamespace(
        params_with_grad=frozenset,
        mark_written=lambda _: None,
        keep_grads_allocated=lambda: None,
        let_grads_be_freed=lambda: None,
    )
    steps, schedule = GraphedSteps(run, reducer, Repeats()), cast(RankSchedule, None)
    for step in range(WARM_UP_STEPS + 3):
        scales = LossScales(token_loss=torch.tensor([1.0 + step, 100.0 - step]), aux_loss=torch.tensor(0.5 * step))
        found = steps.run(schedule, [batch_of(1.0 + step)], scales)
        total = 6 * (1.0 + step) + 160 * (1.0 + step)
        assert found.sums.tolist() == [total * (1.0 + step), total * (100.0 - step), 0.5 * step]
    captured = seen[-1]
    assert seen[-2] is captured and captured[0].sequence_dim("image") is None, "the static batch is replayed"
    steps.run(schedule, [batch_of(1.0, text="other")], scales)
    assert seen[-1] is not captured


class FakeStream:
    def __init__(self, device: object = None) -> None:
        self.waited: list[FakeStream] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.waited.append(other)


@dataclass
class FakeCuda:
    """The part of torch.cuda that a recorder calls. `breaks` is what ending a recording raises."""

    breaks: Exception | None = None
    capability: tuple[int, int] = (9, 0)
    here: FakeStream = field(default_factory=FakeStream)
    pools: int = 0
    ended_pools: list[tuple[int, int]] = field(default_factory=list)
    generator: FakeGenerator = field(default_factory=lambda: FakeGenerator())
    cleared_on: list[FakeStream] = field(default_factory=list)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: self.capability)
        monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.here)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", self.pool)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
        monkeypatch.setattr(torch.cuda, "graph", self.graph)
        monkeypatch.setattr(torch.cuda, "default_generators", (self.generator,))
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "here", stream))
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_pool, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", self.clear_workspaces, raising=False)

    def end_pool(self, device: int, pool: int) -> None:
        if self.breaks is None:
            raise RuntimeError("not allocating to this pool")
        self.ended_pools.append((device, pool))

    def clear_workspaces(self) -> None:
        self.cleared_on.append(self.here)

    def pool(self) -> int:
        self.pools += 1
        return self.pools

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.here = self.here, stream
        try:
            yield
        finally:
            self.here = before

    @contextmanager
    def graph(self, graph: FakeGraph, *, pool: int, stream: FakeStream, capture_error_mode: str) -> Iterator[None]:
        graph.pool, graph.stream = pool, stream
        assert capture_error_mode == "thread_local"
        before, self.here = self.here, stream
        self.generator.state += "+"
        try:
            yield
        finally:  # torch leaves the stream only after a capture that ended well
            if self.breaks is not None:
                raise self.breaks
            self.here = before


@dataclass
class FakeGenerator:
    state: str = "begun"

    def clone_state(self) -> str:
        return self.state

    def graphsafe_set_state(self, state: str) -> None:
        self.state = state


@dataclass
class FakeGraph:
    pool: int = 0
    stream: FakeStream | None = None
    replayed: int = 0
    generators: list[FakeGenerator] = field(default_factory=list)

    def register_generator_state(self, generator: FakeGenerator) -> None:
        self.generators.append(generator)

    def replay(self) -> None:
        self.replayed += 1


def raising(error: Exception) -> Callable[[], StepResult]:
    def work() -> StepResult:
        raise error

    return work


def test_a_recorder_runs_and_records_on_one_stream(monkeypatch: pytest.MonkeyPatch):
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    outside = cuda.here
    shared: Any = FakeGenerator()
    recorder = CudaGraphCapture(torch.device("cuda", 0), generators=[shared])
    made = StepResult(torch.zeros(()))
    seen: list[FakeStream] = []

    def work() -> StepResult:
        seen.append(cuda.here)
        return made

    assert recorder.run(work) is made and cuda.cleared_on == []
    assert seen[0] is not outside and seen[0].waited == [outside] and outside.waited == [seen[0]]
    outcome, replay = recorder.capture(work)
    replay()
    graph = replay.__self__  # type: ignore[attr-defined]
    assert outcome is made and graph.replayed == 1 and graph.stream is seen[0] and graph.pool == 1
    assert graph.generators == [shared] and cuda.here is outside and cuda.ended_pools == []
    assert cuda.cleared_on == [outside, outside], "cuBLAS workspaces, before the capture and after it"
    recorder.reset_pool()
    assert recorder.capture(work)[1].__self__.pool == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("breaks", [None, RuntimeError("the recording is invalid")])
def test_what_cannot_be_recorded_is_said_and_undone(monkeypatch: pytest.MonkeyPatch, breaks: Exception | None):
    cuda, shared = FakeCuda(breaks), FakeGenerator()
    cuda.install(monkeypatch)
    outside = cuda.here
    recorder = CudaGraphCapture(torch.device("cuda", 0), generators=[cast(torch.Generator, shared)])
    words = r"Leave --cuda-graphs out, or say auto\. What torch says: somebody asked the device"
    with pytest.raises(CaptureError, match=words) as error:
        recorder.capture(raising(RuntimeError("somebody asked the device")))
    assert error.value.reason == "somebody asked the device"
    assert cuda.here is outside and cuda.generator.state == shared.state == "begun"
    with pytest.raises(torch.OutOfMemoryError, match="too large"):
        recorder.capture(raising(torch.OutOfMemoryError("too large")))
    assert cuda.here is outside
    assert cuda.ended_pools == ([] if breaks is None else [(0, 1), (0, 2)]), "each has a pool of its own"


def test_devices_that_are_too_old_are_refused(monkeypatch: pytest.MonkeyPatch):
    FakeCuda(capability=(7, 5)).install(monkeypatch)
    words = r"cannot be used: it needs a GPU of compute capability 8\.0 \(Ampere\) or later; this one has 7\.5\. Leave it out"
    with pytest.raises(TrainError, match=words):
        CudaGraphCapture(torch.device("cuda", 0))


def test_on_another_device_it_is_said_to_have_no_effect(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    build_model(tiny_run("--cuda-graphs"), ParallelMesh.single())
    assert "note: --cuda-graphs has no effect: the CPU computes" in caplog.text
