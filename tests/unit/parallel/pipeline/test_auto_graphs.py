"""`--cuda-graphs auto` without a device that captures: what is measured, what follows from it, and that no bit depends on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.parallel.pipeline.auto_cuda_graphs import CaptureInputs, CudaMemory
from petatron.parallel.pipeline.cuda_graph import CaptureError, Replay, StepFunction
from petatron.parallel.pipeline.device_idle import CudaEvents, IdleMeter, StepTime
from petatron.parallel.pipeline.enable_cuda_graphs import (
    enable_auto_cuda_graphs,
    max_over_ranks,
    reasons_against_capture,
)
from petatron.parallel.pipeline.executor import StepResult
from petatron.schedule.actions import TimedAction
from petatron.train.build_run import build_model, build_optimizer
from petatron.train.state.train_state import TrainState
from petatron.validate import load_config
from tests.dist import RankPool
from tests.longform import diagonal
from tests.parity.harness import tiny_run
from tests.unit.parallel.pipeline.test_graph import FakeCuda, StandIn, Trained, batches, same

STEPS = 9


@dataclass
class SimulatedDevice:
    """A host that launches kernels, and a device that runs them one after another; no time passes otherwise."""

    now_s: float = 0.0
    free_at_s: float = 0.0

    def launch(self, *, host_s: float, device_s: float) -> None:
        self.now_s += host_s
        self.free_at_s = max(self.free_at_s, self.now_s) + device_s

    def record_event(self) -> SimulatedEvent:
        return SimulatedEvent(self, self.free_at_s)

    def synchronize(self) -> None:
        self.now_s = max(self.now_s, self.free_at_s)

    def clock(self) -> float:
        return self.now_s


@dataclass
class SimulatedEvent:
    device: SimulatedDevice
    at_s: float

    def query(self) -> bool:
        return self.device.now_s >= self.at_s


class Launches(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, launch: Callable[[], None]) -> Tensor:
        ctx.launch = launch
        launch()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.launch()
        ctx.launch()
        return grads[0], None


class Layer(nn.Module):
    def __init__(self, launch: Callable[[], None]) -> None:
        super().__init__()
        self.launch = launch

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return Launches.apply(x, self.launch), None  # pyright: ignore[reportReturnType]


def idle_share(*, host_s: float, device_s: float) -> tuple[StepTime, SimulatedDevice]:
    device = SimulatedDevice(free_at_s=5.0)
    layers = [Layer(lambda: device.launch(host_s=host_s, device_s=device_s)) for _ in range(20)]
    meter = IdleMeter(layers, device, clock=device.clock)
    with meter.measure() as found:
        x = torch.zeros(3, requires_grad=True)
        for layer in layers:
            x, _ = layer(x)
        x.sum().backward()
    assert all(not layer._forward_hooks for layer in layers), "nothing is left of the measurement"
    return found, device


def test_a_device_that_waits_for_the_host_is_idle():
    found, _ = idle_share(host_s=1.0, device_s=0.1)
    assert found.step_s == pytest.approx(60.1) and found.idle_s == pytest.approx(60.0), "a bound: it computes for 6 s"


def test_a_device_that_is_behind_the_host_is_not_idle():
    found, device = idle_share(host_s=0.1, device_s=1.0)
    assert found.step_s == pytest.approx(60.1) and device.now_s == pytest.approx(65.1)
    assert found.idle_s < 0.05 * found.step_s


def test_the_bound_is_never_below_the_truth():
    for host_s in (0.5, 0.9, 1.0, 1.1, 2.0):
        found, _ = idle_share(host_s=host_s, device_s=1.0)
        assert found.idle_s >= found.step_s - 60.0 - 1e-9


@dataclass
class ScriptedMeter:
    """Tells times that were made up, and lets steps run."""

    measured: list[StepTime]
    replays: list[StepTime]

    @contextmanager
    def measure(self) -> Iterator[StepTime]:
        yield self.measured.pop(0)

    @contextmanager
    def time(self) -> Iterator[StepTime]:
        yield self.replays.pop(0)


@dataclass
class ScriptedMemory:
    available: int = 20 << 30

    def allocated_bytes(self) -> int:
        return 7 << 30

    def peak_bytes(self) -> int:
        return 17 << 30

    def available_bytes(self) -> int:
        return self.available


class FailingCapture(StandIn):
    """Runs a whole step behind the capture, and fails: whatever it has changed must be undone."""

    error: Exception = CaptureError("a kernel waits for the host\nand more")

    def capture(self, step: StepFunction) -> tuple[StepResult, Replay]:
        self.calls.append("capture")
        generator, memory = torch.get_rng_state(), [*self._memory()]
        kept = [x.clone() for x in memory]
        step()
        torch.set_rng_state(generator)
        for x, before in zip(memory, kept, strict=True):
            x.copy_(before)
        for grads in self._grads():
            grads.fill_(float("nan"))
        raise self.error


@dataclass
class Options:
    capture: type[StandIn] = StandIn
    idle_s: float = 0.9
    replay_s: float = 0.38
    memory: ScriptedMemory = field(default_factory=ScriptedMemory)
    recomputes: bool = False
    max_over_ranks: Callable[[Sequence[float]], list[float]] = list


def train(flags: str, options: Options | None) -> Trained:
    """Steps of two micro-batches; without options, nothing decides anything."""
    run = tiny_run(flags)
    model = build_model(run, ParallelMesh.single())
    optimizer = build_optimizer(run, model)
    stand_in = (options or Options()).capture(model)
    if options is not None:
        warm_up_and_capture = [StepTime(7.0), StepTime(7.0)]
        meter: Any = ScriptedMeter(
            [StepTime(1.0, options.idle_s), StepTime(1.2, options.idle_s)],
            [*warm_up_and_capture, StepTime(options.replay_s + 0.2), StepTime(options.replay_s)],
        )
        facts = CaptureInputs(
            meter, options.memory, model.rng_streams.state, options.recomputes, options.max_over_ranks
        )
        model.use_cuda_graphs(stand_in, facts)
    losses = []
    for step in range(STEPS):
        losses.append(float(model.train_step(batches(2, step), loss_scale=2.0 + step)))
        optimizer.step(lr=1e-2, weight_decay=0.1, loss_scale=2.0 + step)
    weights = [weight.clone() for group in model.param_groups for weight in group.weights()]
    return Trained(losses, [], weights, [model.router_statistics.totals], stand_in.calls)


@cache
def plain(flags: str) -> Trained:
    return train(flags, None)


def decided(caplog: pytest.LogCaptureFixture, flags: str, options: Options) -> tuple[str, list[str]]:
    """The one line that was logged, and what was asked of the capture; the run is that of one that decides nothing."""
    caplog.set_level("INFO", "petatron.parallel.pipeline")
    caplog.clear()
    found = train(flags, options)
    same(found, plain(flags))
    [line] = [record.message for record in caplog.records if "CUDA graphs" in record.message]
    return line, found.calls


@diagonal(2)
@pytest.mark.parametrize("flags", ["", "--no-overlap-grad-reduce"])
def test_it_captures_where_the_device_was_idle(caplog: pytest.LogCaptureFixture, flags: str):
    line, calls = decided(caplog, flags, Options())
    assert line == "CUDA graphs: on from step 5: the device was idle 62 % of a step"
    assert calls == ["reset_pool", "run", "capture", *["replay"] * (STEPS - 4)]


def test_random_numbers_of_the_host_are_noticed(caplog: pytest.LogCaptureFixture):
    line, _ = decided(caplog, "--hidden-dropout 0.1", Options())  # on a CPU they are the host's
    assert line == "CUDA graphs: off: the host draws random numbers in a step"


@diagonal(2)
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (Options(idle_s=0.1), "the device was idle at most 9 % of a step"),
        (Options(idle_s=0.11), "the device was idle at most 10 % of a step"),
        (
            Options(memory=ScriptedMemory(available=12 << 30)),
            "a captured step needs 12.5 GiB between steps, 0.5 GiB more than is free",
        ),
        (
            Options(max_over_ranks=lambda found: [0.5, -1.0, 1.0, 0.0, 1.0]),
            "the host would set random states back to recompute",
        ),
    ],
)
def test_it_says_why_it_does_not_capture(caplog: pytest.LogCaptureFixture, options: Options, reason: str):
    assert decided(caplog, "", options) == (f"CUDA graphs: off: {reason}", ["reset_pool"])


def test_a_capture_that_gains_little_is_dropped(caplog: pytest.LogCaptureFixture):
    line, calls = decided(caplog, "", Options(replay_s=0.93))
    assert line == "CUDA graphs: off: the device was idle 7 % of a step"
    assert calls == ["reset_pool", "run", "capture", *["replay"] * 3, "reset_pool"]
    assert decided(caplog, "", Options(replay_s=1.5))[0] == "CUDA graphs: off: the device was idle 0 % of a step"


@diagonal(2)
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--bf16 --fp8-hybrid --fp8-recipe delayed",
        "--num-experts 4 --moe-aux-loss-coeff 0.01",
        "--no-overlap-grad-reduce",
    ],
)
def test_a_capture_that_fails_leaves_nothing(caplog: pytest.LogCaptureFixture, flags: str):
    line, calls = decided(caplog, flags, Options(capture=FailingCapture))
    assert line == "CUDA graphs: off: a step could not be captured: a kernel waits for the host"
    assert calls == ["reset_pool", "run", "capture", "reset_pool"]


class OutOfMemoryCapture(FailingCapture):
    error = torch.OutOfMemoryError("CUDA out of memory")


def test_memory_that_does_not_suffice_is_no_error(caplog: pytest.LogCaptureFixture):
    line, _ = decided(caplog, "", Options(capture=OutOfMemoryCapture))
    assert line == "CUDA graphs: off: a step could not be captured: memory does not suffice"


def test_all_ranks_fall_back_together(caplog: pytest.LogCaptureFixture):
    """Another rank fails, and this one drops what it has captured."""
    worst = {1: [1.0]}
    options = Options(max_over_ranks=lambda found: worst.get(len(found), list(found)))
    line, calls = decided(caplog, "", options)
    assert line == "CUDA graphs: off: a step could not be captured: another rank could not"
    assert calls == ["reset_pool", "run", "capture", "reset_pool"]


def test_a_later_kind_of_step_may_fail_too(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "petatron.parallel.pipeline")

    class FailsLater(StandIn):
        def capture(self, step: StepFunction) -> tuple[StepResult, Replay]:
            if "capture" in self.calls:
                raise CaptureError("another shape")
            return super().capture(step)

    losses = []
    for auto in (True, False):
        model = build_model(tiny_run(), ParallelMesh.single())
        meter: Any = ScriptedMeter([StepTime(1.0, 0.9)] * 2, [StepTime(0.1)] * 4)
        if auto:
            facts = CaptureInputs(meter, ScriptedMemory(), model.rng_streams.state, recomputes=False)
            model.use_cuda_graphs(FailsLater(model), facts)
        losses.append([float(model.train_step(batches(1 + step // 8, step))) for step in range(11)])
    assert losses[0] == losses[1]
    first, second = (record.message for record in caplog.records if "CUDA graphs" in record.message)
    assert "on from step 5" in first and second == "CUDA graphs: off: a step could not be captured: another shape"


def test_an_evaluation_is_captured_where_steps_are(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "petatron.parallel.pipeline")

    class FailsInEvaluation(StandIn):
        def capture(self, step: StepFunction) -> tuple[StepResult, Replay]:
            if self.calls.count("capture"):
                raise CaptureError("another kernel")
            return super().capture(step)

    losses, calls = [], []
    for capture in (None, StandIn, FailsInEvaluation):
        model = build_model(tiny_run(), ParallelMesh.single())
        meter: Any = ScriptedMeter([StepTime(1.0, 0.9)] * 2, [StepTime(0.1)] * 4)
        stand_in = (capture or StandIn)(model)
        if capture is not None:
            model.use_cuda_graphs(
                stand_in, CaptureInputs(meter, ScriptedMemory(), model.rng_streams.state, recomputes=False)
            )
        found = [float(model.evaluate(batches(2, 99))[0])]
        found += [float(model.train_step(batches(1, step))) for step in range(8)]
        losses.append(found + [float(model.evaluate(batches(2, 100 + index))[0]) for index in range(4)])
        calls.append(stand_in.calls)
    assert losses[0] == losses[1] == losses[2]
    assert calls[1][-5:] == ["run", "capture", "replay", "replay", "replay"]
    assert calls[2][-2:] == ["run", "reset_pool"]
    assert caplog.messages[-1] == "CUDA graphs: off: an evaluation could not be captured: another kernel"


def test_a_step_that_is_timed_decides_nothing():
    model = build_model(tiny_run(), ParallelMesh.single())
    meter: Any = ScriptedMeter([], [])
    model.use_cuda_graphs(
        StandIn(model), CaptureInputs(meter, ScriptedMemory(), model.rng_streams.state, recomputes=False)
    )
    timed: list[TimedAction] = []
    for _ in range(4):
        model.train_step(batches(1, 0), timeline=timed.extend)
    assert len(timed) == 8


def test_on_a_cpu_nothing_is_decided_or_said(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "petatron.parallel.pipeline.enable_cuda_graphs")
    run = tiny_run()
    assert run.train.cuda_graphs == "auto"
    state = TrainState.build(run, ParallelMesh.single())
    assert state.model._run_step == state.model._run_and_reduce and caplog.text == ""


BASE = "--preset tiny-llama --mock-data --lr 1e-3 --train-iters 9 --bf16 --hidden-dropout 0 --attention-dropout 0"


def test_what_cannot_be_captured_is_said_before_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO", "petatron.parallel.pipeline.enable_cuda_graphs")
    FakeCuda(capability=(7, 5)).install(monkeypatch)
    run = load_config([*BASE.split(), *"--dp 2 --softmax-type learnable".split()], world_size=2).config
    mesh: Any = SimpleNamespace(device=torch.device("cuda", 0), backend="gloo")
    enable_auto_cuda_graphs(run, SimpleNamespace(mesh=mesh))  # type: ignore[arg-type]
    assert caplog.messages == [
        "CUDA graphs: off: --overlap-grad-reduce: gloo communicates inside it, on the host; --softmax-type learnable: "
        "without FlashAttention the host makes the mask; it needs a GPU of compute capability 8.0 (Ampere) or later; this one has 7.5"
    ]


def test_over_nccl_more_can_be_captured():
    run = load_config([*BASE.split(), *"--tp 2 --sequence-parallel".split()], world_size=2).config
    assert reasons_against_capture(run, backend="nccl") == []
    assert len(reasons_against_capture(run, backend="gloo")) == 1


def test_it_is_used_with_what_the_device_tells(monkeypatch: pytest.MonkeyPatch):
    FakeCuda().install(monkeypatch)
    found: list[Any] = []
    device, layers = torch.device("cuda", 0), {"0": nn.Identity()}
    model: Any = SimpleNamespace(
        mesh=SimpleNamespace(device=device, backend="nccl", control=ParallelMesh.single().control),
        stages={0: SimpleNamespace(layers=layers)},
        rng_streams=SimpleNamespace(tp_shared=None, state=dict),
        use_cuda_graphs=lambda *given: found.extend(given),
    )
    enable_auto_cuda_graphs(load_config([*BASE.split(), "--recompute-activations"]).config, model)
    facts = found[1]
    assert facts.recomputes and facts.max_over_ranks([3.0, -1.0]) == [3.0, -1.0]
    assert isinstance(facts.memory, CudaMemory) and isinstance(facts.meter._device, CudaEvents)


def test_cached_memory_is_available(monkeypatch: pytest.MonkeyPatch):
    facts = {"max_memory_allocated": 90, "memory_allocated": 60, "memory_reserved": 95, "mem_get_info": (7, 200)}
    for name, value in facts.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    memory = CudaMemory(torch.device("cuda", 0))
    assert memory.peak_bytes() == 90 and memory.allocated_bytes() == 60 and memory.available_bytes() == 42


def fallen_back_losses(auto: bool) -> list[float]:
    """On a rank of two: a step of another number of micro-batches cannot be captured, after the weights were left to be gathered by it."""
    flags = "--dp 2 --use-distributed-optimizer --overlap-param-gather --global-batch-size 8 --micro-batch-size 2"
    run = tiny_run(flags, world_size=2)
    model = build_model(run, ParallelMesh(Layout.from_config(run.parallel), dist.get_rank()))
    optimizer = build_optimizer(run, model)
    meter: Any = ScriptedMeter([StepTime(1.0, 0.9)] * 2, [StepTime(0.1)] * 4)
    if auto:
        facts = CaptureInputs(meter, ScriptedMemory(), model.rng_streams.state, recomputes=False)
        model.use_cuda_graphs(FailsForThree(model), facts)
    losses = []
    for step in range(12):
        losses.append(float(model.train_step(batches(2 if step < 9 else 3, 100 * model.mesh.rank + step))))
        optimizer.step(lr=1e-2, weight_decay=0.1)
    return losses


class FailsForThree(FailingCapture):
    def capture(self, step: StepFunction) -> tuple[StepResult, Replay]:
        return StandIn.capture(self, step) if "capture" not in self.calls else FailingCapture.capture(self, step)


def test_a_gather_that_a_failed_capture_began_is_due_again(ranks: RankPool):
    plain, fallen_back = (ranks.run(fallen_back_losses, 2, auto) for auto in (False, True))
    assert fallen_back == plain and len(set(plain[0])) == len(plain[0])


def _numbers_of_all(numbers: list[list[float]]) -> list[float]:
    layout = Layout.from_config(load_config([*BASE.split(), "--dp", "3"], world_size=len(numbers)).config.parallel)
    mesh = ParallelMesh(layout, dist.get_rank())
    return max_over_ranks(numbers[mesh.rank], mesh.control)


def test_ranks_agree_on_the_worst(ranks: RankPool):
    assert ranks.run(_numbers_of_all, 3, [[1.0, -5.0], [3.0, -7.0], [2.0, -4.0]]) == [[3.0, -4.0]] * 3
