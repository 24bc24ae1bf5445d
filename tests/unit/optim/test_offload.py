"""Offload: the order of copies on any interleaving of lanes, and an optimizer that gives the same bits wherever its state is."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from petatron.base.errors import TrainError
from petatron.config.schema.memory import MemoryConfig
from petatron.config.schema.optimizer import OptimizerConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.optim import mixed_precision
from petatron.optim.mixed_precision import MixedPrecisionOptimizer
from petatron.optim.offload_storage import DiskStorage, describe_offload_target
from petatron.optim.state_segments import plan_ranges
from petatron.optim.swap_offloaded_state import DiskStaging, PinnedStaging, StateSwapper, SwapStreams, SwapTask
from petatron.sharding.flat_buffer import FlatBufferOptions, FlatParamGroup, flatten_parameters
from petatron.sharding.shard_spec import ModelParallelCoordinate, Shard, compute_placement
from tests.heard import heard
from tests.longform import diagonal
from tests.optimizer_groups import groups_of


class Device:
    """Lanes whose work happens as late, and in as odd an order, as the marks between them allow."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.lanes = [LateLane(self) for _ in range(3)]

    def run_some(self, until: Callable[[], bool]) -> None:
        while not until():
            ready = [lane for lane in self.lanes if lane.queue and lane.queue[0][0].reached]
            assert ready, "every lane waits for another"
            self._random.choice(ready).advance()


class LateMark:
    def __init__(self, device: Device, *, reached: bool = False) -> None:
        self._device = device
        self.reached = reached

    def synchronize(self) -> None:
        self._device.run_some(lambda: self.reached)


class LateLane:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.queue: deque[tuple[LateMark, Callable[[], None]]] = deque()

    def advance(self) -> None:
        self.queue.popleft()[1]()

    def run(self, work: Callable[[], None]) -> None:
        self.queue.append((LateMark(self._device, reached=True), work))

    def record(self) -> LateMark:
        mark = LateMark(self._device)
        self.run(lambda: setattr(mark, "reached", True))
        return mark

    def wait(self, mark: LateMark) -> None:
        self.queue.append((mark, lambda: None))


class NowLane:
    """Work that is done as soon as it is given."""

    def run(self, work: Callable[[], None]) -> None:
        work()

    def record(self) -> NowLane:
        return self

    def wait(self, mark: object) -> None: ...

    def synchronize(self) -> None: ...


LENGTHS = (5, 5, 5, 3, 5, 5, 1, 4)


def visits_of(homes: list[tuple[Tensor, Tensor]], step: int) -> list[SwapTask]:
    def work(number: int, buffers: tuple[Tensor, ...]) -> None:
        buffers[0].mul_(2).add_(step + number)
        buffers[1].add_(buffers[0])

    visits = [SwapTask(home, lambda buffers, n=number: work(n, buffers)) for number, home in enumerate(homes)]
    return visits[::-1] if step % 2 else visits  # what was last in one step is first in the next


def fresh_homes() -> list[tuple[Tensor, Tensor]]:
    return [(torch.arange(length) + 10.0, torch.ones(length, dtype=torch.float64)) for length in LENGTHS]


def expected() -> list[tuple[Tensor, Tensor]]:
    homes = fresh_homes()
    for step in range(3):
        for visit in visits_of(homes, step):
            visit.update(visit.state)
    return homes


def assert_equal(homes: list[tuple[Tensor, Tensor]]) -> None:
    for found, wanted in zip(homes, expected()):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted))


@pytest.mark.parametrize("seed", range(12))
def test_no_interleaving_of_lanes_changes_the_result(seed: int):
    device = Device(seed)
    dtypes = (torch.float32, torch.float64)
    shuttle = StateSwapper(SwapStreams(*device.lanes), PinnedStaging(), dtypes, 5, torch.device("cpu"))  # type: ignore[arg-type]
    homes = fresh_homes()
    for step in range(3):
        shuttle.run(visits_of(homes, step))
    shuttle.synchronize()
    assert_equal(homes)


@pytest.mark.parametrize("seed", range(12))
def test_buffers_are_filled_after_what_used_their_memory_before(seed: int):
    """The host may free a tensor, and the buffers get its memory, while the lane that computes has yet to read and write it."""
    device = Device(seed)
    lanes, dtypes = SwapStreams(*device.lanes), (torch.float32, torch.float64)  # type: ignore[arg-type]
    shuttle = StateSwapper(lanes, PinnedStaging(), dtypes, 5, torch.device("cpu"))
    read: list[float] = []

    def use(tensor: Tensor) -> None:
        read.extend(tensor.tolist())
        tensor.fill_(float("nan"))

    for buffers in reversed(shuttle._buffers):
        for tensor in buffers:
            lanes.compute.run(partial(use, tensor.fill_(7.0)))
    homes = fresh_homes()
    for step in range(3):
        shuttle.run(visits_of(homes, step))
    shuttle.synchronize()
    assert set(read) == {7.0}
    assert_equal(homes)


def test_state_on_disk_goes_through_pinned_memory_and_back():
    dtypes = (torch.float32, torch.float64)
    side = DiskStaging(dtypes, 5, pinned=False)
    lanes = SwapStreams(NowLane(), NowLane(), NowLane())  # type: ignore[arg-type]
    shuttle = StateSwapper(lanes, side, dtypes, 5, torch.device("cpu"))
    homes = fresh_homes()
    for step in range(3):
        shuttle.run(visits_of(homes, step))
    shuttle.synchronize()
    assert_equal(homes)
    shuttle.run([])


def test_a_failure_of_the_disk_is_not_lost():
    side = DiskStaging((torch.float32,), 4, pinned=False, num_buffers=1)
    lanes = SwapStreams(NowLane(), NowLane(), NowLane())  # type: ignore[arg-type]
    shuttle = StateSwapper(lanes, side, (torch.float32,), 4, torch.device("cpu"), num_buffers=1)
    good, bad = torch.zeros(4), torch.zeros(1, requires_grad=True)  # a leaf that wants gradients refuses the copy back
    shuttle.run([SwapTask((good,), lambda buffers: None), SwapTask((bad,), lambda buffers: None)])
    with pytest.raises(RuntimeError, match="leaf"):
        shuttle.synchronize()


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(9, 17), nn.LayerNorm(17), nn.Linear(17, 11)).to(dtype)


def flatten(model: nn.Module, rule: str = "adam") -> list[FlatParamGroup]:
    placements = {
        n: compute_placement(n, tuple(p.shape), Shard(), ModelParallelCoordinate()) for n, p in model.named_parameters()
    }
    options, uses = FlatBufferOptions(bucket_size=10**9), Counter(model.parameters())
    groups = groups_of(model, rule=rule)
    return flatten_parameters([model], placements, groups, ParallelMesh.single(), options, grads_per_micro_batch=uses)


def trained(memory: MemoryConfig, dtype: torch.dtype, moments: str = "fp32", rule: str = "adam") -> dict[tuple, Tensor]:
    """Every element of weights, master weights and moments after a few updates, by name and place."""
    model = model_of(dtype)
    groups = flatten(model, rule)
    formats = {"exp_avg_dtype": moments, "exp_avg_sq_dtype": moments}
    config = OptimizerConfig(lr=0.1, optimizer=rule, **formats)  # type: ignore[arg-type]
    optimizer = MixedPrecisionOptimizer(config, groups, ParallelMesh.single(), memory=memory)
    generator = torch.Generator().manual_seed(4)
    for _ in range(3):
        for group in groups:
            [grads] = group.grads()
            grads.copy_(torch.randn(grads.shape, generator=generator))
        optimizer.step()
        norm = optimizer.weight_norm()  # waits, as late lanes need it before new gradients are written from here
    found = {("norm",): norm}
    for kind, pieces in (("master", optimizer.master_weights()), ("moment", optimizer.moments())):
        for *head, _, piece, view in pieces:
            name = str(head[0]) if kind == "moment" else kind
            whole = found.setdefault(
                (name, piece.name), torch.full(piece.logical_shape, float("nan"), dtype=view.dtype)
            )
            whole[tuple(slice(at, at + size) for at, size in zip(piece.start, piece.shape))] = view
    return found | {("weight", name): parameter.detach() for name, parameter in model.named_parameters()}


@diagonal(3)
@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("fraction", [1.0, 0.6])
@pytest.mark.parametrize(
    ("dtype", "moments", "rule"),
    [
        (torch.bfloat16, "fp32", "adam"),
        (torch.bfloat16, "bf16", "adam"),
        (torch.float32, "fp32", "adam"),
        (torch.bfloat16, "fp32", "sgd"),
    ],
)
@pytest.mark.parametrize("visiting", [True, False])
def test_offload_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    place: str,
    fraction: float,
    dtype: torch.dtype,
    moments: str,
    rule: str,
    visiting: bool,
):
    plain = trained(MemoryConfig(), dtype, moments, rule)
    monkeypatch.setattr(mixed_precision, "plan_ranges", partial(plan_ranges, chunk=64))
    if visiting:  # as on a device that cannot reach the state where it lies
        monkeypatch.setattr(MixedPrecisionOptimizer, "_build_state_swapper", build_shuttle)
    memory = MemoryConfig(
        optimizer_cpu_offload=place == "host",
        optimizer_nvme_offload=str(tmp_path / "new") if place == "disk" else None,
        optimizer_offload_fraction=fraction,
    )
    found = trained(memory, dtype, moments, rule)
    assert found.keys() == plain.keys()
    torch.testing.assert_close(found.pop(("norm",)), plain.pop(("norm",)))
    for key, tensor in plain.items():
        assert torch.equal(found[key], tensor), key
    assert not list(tmp_path.rglob("*.bin")), "the file has no name while it is in use"


def build_shuttle(optimizer: MixedPrecisionOptimizer, memory: MemoryConfig) -> StateSwapper | None:
    away = [segment for segment in optimizer.segments if segment.range.offloaded]
    dtypes = [state.dtype for state in away[0].state]
    on_disk = memory.optimizer_nvme_offload is not None
    side = DiskStaging(dtypes, 64, pinned=False) if on_disk else PinnedStaging()
    lanes = SwapStreams(NowLane(), NowLane(), NowLane()) if on_disk else SwapStreams(*Device(5).lanes)  # type: ignore[arg-type]
    return StateSwapper(lanes, side, dtypes, 64, torch.device("cpu"))


def test_a_loaded_state_reaches_the_model_from_where_it_lives(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mixed_precision, "plan_ranges", partial(plan_ranges, chunk=64))
    model = model_of(torch.bfloat16)
    memory = MemoryConfig(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
    optimizer = MixedPrecisionOptimizer(OptimizerConfig(lr=1.0), flatten(model), ParallelMesh.single(), memory=memory)
    assert optimizer.has_master_weights
    for _, _, view in optimizer.master_weights():
        view.fill_(0.5)
    optimizer.copy_master_to_model_weights()
    assert all(parameter.eq(0.5).all() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("memory", "dtype", "line"),
    [
        (
            MemoryConfig(optimizer_cpu_offload=True),
            torch.bfloat16,  # a master weight and two moments for each of 17 x 9 + 17 + 17 + 17 + 11 x 17 + 11
            "offload: 0.00000483 GB of this rank's optimizer state wait in host memory; on a CPU that gains nothing",
        ),
        (
            MemoryConfig(optimizer_nvme_offload="scratch"),
            torch.float32,
            "offload: 0.00000322 GB of this rank's optimizer state wait in a file in scratch; on a CPU that gains only what the "
            "system pages out of memory",
        ),
        (MemoryConfig(optimizer_cpu_offload=True, optimizer_offload_fraction=0.0), torch.bfloat16, None),
        (MemoryConfig(), torch.bfloat16, None),
    ],
)
def test_the_log_says_how_much_waits_where(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    memory: MemoryConfig,
    dtype: torch.dtype,
    line: str | None,
):
    monkeypatch.chdir(tmp_path)
    with heard("petatron.optim.mixed_precision") as messages:
        MixedPrecisionOptimizer(OptimizerConfig(lr=1.0), flatten(model_of(dtype)), ParallelMesh.single(), memory=memory)
    assert messages == ([] if line is None else [line])


def test_a_gpu_gains_from_both_places():
    gpu = torch.device("cuda")
    assert (describe_offload_target(None, gpu), describe_offload_target("scratch", gpu)) == (
        "host memory",
        "a file in scratch",
    )


def test_a_folder_that_cannot_hold_the_state(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainError, match=r"Cannot keep [\d.]+ (B|kB) of optimizer state in .*file.*writable folder"):
        DiskStorage(str(tmp_path / "file"), 100)
    with pytest.raises(TrainError, match=r"No such file or directory: .*missing/state"):
        DiskStorage(str(tmp_path / "missing" / "state"), 100)
    with pytest.raises(TrainError, match="with more space, or use --optimizer-cpu-offload"):
        DiskStorage(str(tmp_path), 1 << 60)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
