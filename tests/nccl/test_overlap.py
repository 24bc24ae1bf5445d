"""What claims to overlap is launched beside compute: from a profiler trace of two steps of two ranks over NCCL.

Several ranks on one GPU say nothing about time, but the order of launches is that of any cluster. A collective overlaps if its kernel
runs on another stream than the GEMMs, GEMMs are launched between its start and the wait for it, and the host waits for nothing.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from petatron.config import RunConfig
from petatron.mesh import collectives
from petatron.train.build_run import build_loaders
from petatron.train.state.train_state import TrainState
from petatron.train.train_step import train_step
from petatron.validate import load_config
from tests.dist import RankPool
from tests.nccl.layouts import mesh_of

MODEL = (
    "--num-layers 4 --hidden-size 512 --ffn-hidden-size 1024 --num-attention-heads 8 --num-query-groups 4 --vocab-size 1000 "
    "--seq-length 1024 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --bf16 "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --mock-data --num-workers 0 --device cuda "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 12 --lr 1e-3 --eval-iters 0 --no-compile --ddp-bucket-size 2000000 "
    "--cuda-graphs off"
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 512 --moe-token-dispatcher-type alltoall"
WARM_UP = 3
KERNELS = ("ncclDevKernel_AllGather", "ncclDevKernel_ReduceScatter")
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")
# Feature -> flags, the axis of its collective and the function of `mesh/collectives.py` that starts it.
OVERLAPS = {
    "gradient all-reduce": ("--dp 2", "dp_cp", "start_all_reduce"),
    "gradient reduce-scatter": ("--dp 2 --use-distributed-optimizer", "shard", "start_reduce_scatter"),
    "parameter all-gather": ("--dp 2 --use-distributed-optimizer --overlap-param-gather", "shard", "start_all_gather"),
    "sequence-parallel all-gather": ("--tp 2 --sequence-parallel", "tp", "start_all_gather"),
    "sequence-parallel reduce-scatter": ("--tp 2 --sequence-parallel", "tp", "start_reduce_scatter"),
    "tensor-parallel forward": ("--tp 2 --sequence-parallel --tp-comm-overlap", "tp", "start_reduce_scatter"),
    "ring exchange": ("--cp 2", "cp", "_start_send_recv_batch"),
    "expert all-to-all, shared expert": (
        f"--dp 2 --ep 2 {EXPERTS} --moe-shared-expert-intermediate-size 512",
        "ep_etp",
        "start_all_to_all",
    ),
    "expert all-to-all, other micro-batch": (
        f"--dp 2 --ep 2 {EXPERTS} --overlap-moe-expert-parallel-comm --global-batch-size 16",
        "ep_etp",
        "start_all_to_all",
    ),
    "pipeline transfers": ("--pp 2", "pp", "_start_send_recv_batch"),
}


@dataclass(frozen=True, slots=True)
class Spans:
    """Of one collective's calls: how many GEMMs were launched between start and wait, and the streams of both kinds of kernels."""

    gemms: list[int]
    nccl_streams: set[int]
    gemm_streams: set[int]
    waits: list[str]
    after: dict[str, list[int]]
    """Kernel of a collective -> GEMMs launched between each of its launches and the next."""


@pytest.mark.parametrize("feature", OVERLAPS)
def test_a_collective_is_launched_beside_gemms(gpu_ranks: RankPool, feature: str):
    flags, axis, starts = OVERLAPS[feature]
    run = load_config(f"{MODEL} {flags}".split(), world_size=2).config
    for spans in gpu_ranks.run(traced, 2, run, axis, starts, timeout_s=90):
        assert spans.gemms, f"no {starts} over {axis} in a step"
        overlapped = sum(count > 0 for count in spans.gemms)
        # The last of a step (a bucket, a block) has nothing after it.
        assert overlapped >= max(1, len(spans.gemms) // 3), f"{overlapped} of {len(spans.gemms)} calls overlap"
        # What is waited for at once runs on the stream of the GEMMs; the others do not.
        assert spans.nccl_streams - spans.gemm_streams, "every collective runs on the stream of the GEMMs"
        # A dispatch without padded capacity reads how many tokens go where.
        assert not spans.waits or "all_to_all" in starts, f"the host waits: {spans.waits}"


@pytest.mark.parametrize("kernel", KERNELS)
def test_fully_sharded_weights_and_gradients_are_launched_beside_gemms(gpu_ranks: RankPool, kernel: str):
    """fully_shard starts and waits on streams of its own: between two collectives GEMMs are launched on another, and no host waits."""
    flags = "--dp 2 --data-parallel-sharding-strategy optim_grads_params"
    run = load_config(f"{MODEL} {flags}".split(), world_size=2).config
    for spans in gpu_ranks.run(traced, 2, run, "shard", "start_all_gather", timeout_s=90):
        after = spans.after[kernel]
        assert sum(count > 0 for count in after) >= len(after) // 3 > 0, f"GEMMs after each {kernel}: {after}"
        assert spans.nccl_streams.isdisjoint(spans.gemm_streams) and not spans.waits


def test_a_collective_that_is_waited_for_at_once_is_not_counted(gpu_ranks: RankPool):
    run = load_config(f"{MODEL} --dp 2 --no-overlap-grad-reduce".split(), world_size=2).config
    for spans in gpu_ranks.run(traced, 2, run, "dp_cp", "start_all_reduce", timeout_s=90):
        assert spans.gemms and not any(spans.gemms)


def traced(run: RunConfig, axis: str, starts: str) -> Spans:
    """On a rank: train a few steps, and trace the last."""
    mesh = mesh_of(run)
    state = TrainState.build(run, mesh)
    loader = build_loaders(run, mesh).train
    size = run.train.global_batch_size or 0
    steps = [[batch.to(mesh.device) for batch in loader.next_step(size, step * size)] for step in range(WARM_UP + 2)]
    for batches in steps[:WARM_UP]:
        train_step(state, batches)
    torch.cuda.synchronize()
    # Backward passes of combined micro-batches have a thread of their own.
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with marked_handles(), profile(activities=kinds, experimental_config=threads) as profiler:
        with record_function(
            "the steps"
        ):  # two: what one starts last, such as gathering parameters, the next one waits for
            for batches in steps[WARM_UP:]:
                train_step(state, batches)
        torch.cuda.synchronize()
    return _spans(profiler.profiler.kineto_results.events(), f"{starts} {axis} ")  # pyright: ignore[reportOptionalMemberAccess]


@contextmanager
def marked_handles() -> Iterator[None]:
    """Every asynchronous collective leaves a mark in the trace where it starts and where it is waited for."""
    numbers, plain = itertools.count(), collectives.Handle

    class Marked(plain):
        __slots__ = ("name",)

        def __init__(self, work: Any = None, *call: Any, **more: Any) -> None:
            frame = sys._getframe(1)
            axis = frame.f_locals.get("axis")
            self.name = f"{frame.f_code.co_name} {axis.name if axis is not None else ''} {next(numbers)}"
            with record_function(f"start {self.name}"):
                super().__init__(work, *call, **more)

        def wait(self) -> None:
            with record_function(f"wait {self.name}"):
                super().wait()

    collectives.Handle = Marked
    try:
        yield
    finally:
        collectives.Handle = plain


def _spans(events: list[Any], wanted: str) -> Spans:
    launched = {event.correlation_id(): event.start_ns() for event in events if "aunchKernel" in event.name()}
    kernels = [event for event in events if event.device_type() == DeviceType.CUDA]
    gemms = [event for event in kernels if any(word in event.name().lower() for word in ("gemm", "nvjet", "cutlass"))]
    times = sorted(launched[event.correlation_id()] for event in gemms if event.correlation_id() in launched)
    starts, waits = {}, {}
    for event in events:
        word, _, name = event.name().partition(" ")
        if word in ("start", "wait") and name.startswith(wanted) and event.device_type() == DeviceType.CPU:
            times_of = starts if word == "start" else waits
            times_of.setdefault(name, event.start_ns())
    counts = [sum(begin < time < waits[name] for time in times) for name, begin in starts.items() if name in waits]
    step = next(event for event in events if event.name() == "the steps" and event.device_type() == DeviceType.CPU)
    end = step.start_ns() + step.duration_ns()
    return Spans(
        counts,
        {event.device_resource_id() for event in kernels if "ncclDevKernel" in event.name()},
        {event.device_resource_id() for event in gemms},
        [event.name() for event in events if event.name() in WAITS and step.start_ns() < event.start_ns() < end],
        {
            kernel: _between([launched.get(one.correlation_id(), 0) for one in kernels if kernel in one.name()], times)
            for kernel in KERNELS
        },
    )


def _between(starts: list[int], times: list[int]) -> list[int]:
    """How many of the times lie between each start and the next."""
    return [sum(begin < time < end for time in times) for begin, end in itertools.pairwise(sorted(starts))]
