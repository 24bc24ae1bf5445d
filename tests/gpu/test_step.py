"""A training step on a CUDA device never waits for it, compiles nothing after the first steps, and breaks no graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile, record_function

from petatron.mesh.mesh import ParallelMesh
from petatron.train.build_run import build_loaders
from petatron.train.state.train_state import TrainState
from petatron.train.train_step import train_step
from petatron.validate import load_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MODEL = (
    "--num-layers 2 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --num-query-groups 2 --vocab-size 1000 "
    "--seq-length 512 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --bf16 "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --mock-data --num-workers 0 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 12 --lr 1e-3 --eval-iters 0 --cuda-graphs off"
)
FP8 = "--fp8-format hybrid --fp8-recipe"
CASES = {
    "bf16": "",
    "graphs": "--cuda-graphs",
    "auto": "--cuda-graphs auto",
    "dropout": "--hidden-dropout 0.1",
    "packed": "--seq-length 2048 --reset-attention-mask --reset-position-ids --eod-mask-loss",
    "experts": "--num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 0.01",
    "dropping": "--num-experts 8 --moe-router-topk 2 --moe-expert-capacity-factor 0.9",
    "recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "compiled": "--normalization LayerNorm --activation gelu --add-bias-linear",
    "tensorwise": f"{FP8} tensorwise",
    "delayed": f"{FP8} delayed",
    "rowwise": f"{FP8} rowwise",
    "blockwise": f"{FP8} blockwise",
    "output grad": f"{FP8} tensorwise --fp8-output-head-backward",
    "fp8 experts": f"{FP8} tensorwise --num-experts 8 --moe-router-topk 2",
}
WARM_UP, CHECKED = 8, 3  # auto decides after seven steps
WAITS = {
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
}


def stepper(flags: str, device: torch.device) -> Callable[[], None]:
    """What a run does between two lines of its log: the next samples, their way to the device, a step.

    After the first steps the same samples come again, so that no layout of documents is new.
    """
    run = load_config([*MODEL.split(), *flags.split()]).config
    mesh = ParallelMesh.single(device)
    state, loader = TrainState.build(run, mesh), build_loaders(run, mesh).train

    def step() -> None:
        size = state.batch_size_schedule.at(state.progress.consumed_samples)
        batches = loader.next_step(size, state.progress.consumed_samples % (WARM_UP * size))
        train_step(state, [batch.to(device) for batch in batches])

    return step


@contextmanager
def nothing_may_wait() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def loaded_kernels() -> Iterator[list[str]]:
    """The Triton kernels that are compiled, or taken from the disk for the first time, meanwhile."""
    hooks = pytest.importorskip("triton").knobs.runtime.kernel_load_start_hook
    names: list[str] = []

    def note(module: object, function: object, name: str, metadata: object, digest: str) -> None:
        names.append(name)

    hooks.add(note)
    try:
        yield names
    finally:
        hooks.remove(note)


def dynamo_counts() -> dict[str, dict[str, int]]:
    return {name: dict(counts) for name, counts in counters.items() if counts}


@pytest.mark.parametrize("case", CASES)
def test_a_step_only_starts_work(case: str):
    if FP8 in CASES[case] and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a CUDA device of capability 9.0")
    torch.compiler.reset()  # other tests leave their versions of compiled functions, and their counts
    counters.clear()
    step = stepper(CASES[case], torch.device("cuda", 0))
    with loaded_kernels() as loaded:
        for _ in range(WARM_UP):
            step()
        torch.cuda.synchronize()
        assert counters["graph_break"] == {}
        before = dynamo_counts()
        loaded.clear()
        with nothing_may_wait():
            for _ in range(CHECKED):
                step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as traced, record_function("the step"):
            step()
        assert loaded == []
    assert dynamo_counts() == before
    events = traced.events()
    assert events is not None
    cpu = torch.autograd.DeviceType.CPU
    [span] = [event.time_range for event in events if event.name == "the step" and event.device_type == cpu]
    inside = [event.name for event in events if span.start <= event.time_range.start <= span.end]
    assert any("LaunchKernel" in name for name in inside), "the profiler saw nothing"
    assert [name for name in inside if name in WAITS] == []
    # What is on its way to the host may arrive after the step.
    assert [event.name for event in events if "DtoH" in event.name] == []
