"""On a CUDA device: the same curves as on the CPU, in every precision, alone and split over ranks that share the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from petatron.config import RunConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.verify.compare_traces import compare_traces
from petatron.verify.record_trace import StepTrace, record_steps
from tests.dist import RankPool
from tests.parity.harness import BOUNDS, reference, tiny_run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def train_on_cuda(run: RunConfig) -> list[StepTrace]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    mesh = ParallelMesh(Layout.from_config(run.parallel), rank, device=torch.device("cuda", 0))
    return list(record_steps(run, mesh))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_one_device_equals_the_cpu(dtype: str):
    bounds = BOUNDS[dtype] if dtype == "float64" else replace(BOUNDS[dtype], gradient=1e-3, parameter=1e-3)
    verdict = compare_traces([reference("", dtype)], [train_on_cuda(tiny_run(dtype=dtype))], bounds)
    assert verdict.agrees, verdict.first_departure


LAYOUTS = [
    ("--tp 2 --sequence-parallel", 2),
    ("--tp 2 --dp 2", 4),
    ("--pp 2", 2),
    ("--pp 2 --pipeline-schedule zb-v", 2),
    ("--cp 2", 2),
    ("--cp 2 --cp-comm-type all_gather", 2),
    ("--cp 2 --cp-comm-type a2a", 2),
    ("--dp 2 --use-distributed-optimizer --overlap-param-gather", 2),
    ("--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2),
    ("--pp 2 --tp 2 --sequence-parallel --dp 2 --use-distributed-optimizer", 8),
]


@pytest.mark.parametrize(("layout", "world_size"), LAYOUTS)
def test_ranks_that_share_the_device(ranks: RankPool, layout: str, world_size: int):
    check(ranks, layout, "--num-layers 4 --train-iters 6", world_size)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_experts_over_ranks_that_share_the_device(ranks: RankPool, dispatcher: str):
    model = f"--num-experts 4 --moe-aux-loss-coeff 0.01 --train-iters 6 --moe-token-dispatcher-type {dispatcher}"
    check(ranks, "--dp 2 --ep 2", model, 2)


def check(ranks: RankPool, layout: str, model: str, world_size: int) -> None:
    run = tiny_run(f"{model} {layout}", world_size=world_size, dtype="float64")
    verdict = compare_traces(
        [reference(model, "float64")], ranks.run(train_on_cuda, world_size, run), BOUNDS["float64"]
    )
    assert verdict.agrees, verdict.first_departure


HALF = (
    "--bf16 --num-layers 2 --hidden-size 256 --ffn-hidden-size 512 --num-query-groups 2 --seq-length 64 --vocab-size 500 "
    "--train-iters 5 --init-method-std 0.05 --lr 1e-3"
)
HALF_LAYOUTS = [
    ("", "--tp 2 --sequence-parallel", 2),
    ("", "--pp 2", 2),
    ("", "--cp 2", 2),
    ("", "--dp 2 --use-distributed-optimizer --overlap-param-gather", 2),
    ("", "--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2),
    ("--reset-attention-mask --reset-position-ids", "--tp 2", 2),
    ("--num-experts 4 --moe-aux-loss-coeff 0.01", "--dp 2 --ep 2 --moe-token-dispatcher-type alltoall", 2),
    (
        "--num-experts 4 --moe-aux-loss-coeff 0.01 --moe-shared-expert-intermediate-size 64",
        "--dp 2 --ep 2 --moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm",
        2,
    ),
    ("--fp8-hybrid --fp8-recipe rowwise", "--tp 2 --sequence-parallel", 2),
    ("--fp8-hybrid --fp8-recipe delayed", "--dp 2", 2),
]


@pytest.mark.parametrize(("model", "layout", "world_size"), HALF_LAYOUTS)
def test_layouts_with_the_kernels_of_half_precision(ranks: RankPool, model: str, layout: str, world_size: int):
    """In float64 layouts are the same to the last digits, but with other kernels; here all of a real run's take part."""
    if "fp8" in model and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a CUDA device of capability 9.0")
    alone = train_on_cuda(tiny_run(f"{HALF} {model}"))
    run = tiny_run(f"{HALF} {model} {layout}", world_size=world_size)
    for steps in ranks.run(train_on_cuda, world_size, run, timeout_s=180.0):  # a rank's first task compiles
        for ours, theirs in zip(steps, alone, strict=True):
            assert ours.loss == pytest.approx(theirs.loss, rel=2e-2 if "fp8" in model else 1e-2)
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=8e-2 if "fp8" in model else 3e-2)


RECOMPUTE = "--recompute-granularity selective --recompute-modules layernorm mlp core_attn"


@pytest.mark.parametrize(
    "recompute", [RECOMPUTE, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"]
)
def test_recompute_changes_no_bit_and_frees_memory(recompute: str):
    """With dropout on: both streams are replayed on the device."""
    flags = (
        "--hidden-dropout 0.1 --attention-dropout 0.1 --seq-length 512 --hidden-size 256 --num-layers 4 --train-iters 3 --bf16 "
        "--micro-batch-size 8 --ffn-hidden-size 1024"
    )
    runs, peaks = [], []
    for extra in ("", recompute):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        runs.append([(step.loss, step.grad_norm) for step in train_on_cuda(tiny_run(f"{flags} {extra}"))])
        peaks.append(torch.cuda.max_memory_allocated())
    assert runs[0] == runs[1]
    assert peaks[1] < 0.97 * peaks[0]


def test_bf16_follows_the_curve():
    """For as long as rounding has not led elsewhere: from the fifth step on it does, on a CPU too."""
    exact = [step.loss for step in reference("", "float32")][:4]
    assert len(exact) >= 3
    for ours, theirs in zip(train_on_cuda(tiny_run("--bf16")), exact, strict=False):
        assert ours.loss == pytest.approx(theirs, rel=0.01)
