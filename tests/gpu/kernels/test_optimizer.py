"""On a CUDA device: the one-pass update against float64, no wait for the host, and offload that changes no bit."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from petatron.config.schema.memory import MemoryConfig
from petatron.config.schema.optimizer import OptimizerConfig
from petatron.kernels.optimizer import adam as plain
from petatron.kernels.optimizer.adam import AdamRates, AdamState, adam_scalars
from petatron.mesh.mesh import ParallelMesh
from petatron.optim import mixed_precision
from petatron.optim.mixed_precision import MixedPrecisionOptimizer
from petatron.optim.state_segments import plan_ranges
from petatron.optim.update_rules import OptimizerKernels
from petatron.sharding.flat_buffer import FlatBufferOptions, FlatParamGroup, flatten_parameters
from petatron.sharding.shard_spec import ModelParallelCoordinate, Shard, compute_placement
from tests.optimizer_groups import groups_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

RATES = AdamRates(lr=3e-3, weight_decay=0.1, beta1=0.9, beta2=0.999, eps=1e-8)
CUDA = torch.device("cuda", 0)


def triton_kernels() -> OptimizerKernels:
    from petatron.kernels.triton.optimizer import adam as fast

    return OptimizerKernels(fast.adamw, fast.sum_of_squares)


def scalars(dtype: torch.dtype, *, skipped: float = 0.0) -> Tensor:
    step, factor, skip = torch.tensor(3.0), torch.tensor(0.37, dtype=dtype), torch.tensor(skipped)
    return adam_scalars(step, factor, skip, beta1=RATES.beta1, beta2=RATES.beta2)


@pytest.mark.parametrize("length", [5, 4096, 1_000_003])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grads", [torch.float32, torch.bfloat16])
def test_one_pass_equals_float64(length: int, moments: torch.dtype, grads: torch.dtype):
    grad = torch.randn(length).to(grads)
    start = (torch.randn(length), (0.1 * torch.randn(length)).to(moments), (0.01 * torch.rand(length)).to(moments))
    exact = AdamState(*(tensor.double() for tensor in start))
    plain.adamw(grad.double(), exact, scalars(torch.float64), rates=RATES)
    weight = torch.full((length,), float("nan"), dtype=torch.bfloat16, device=CUDA)
    ours = AdamState(*(tensor.to(CUDA) for tensor in start), weight=weight)
    triton_kernels().adamw(grad.to(CUDA), ours, scalars(torch.float32).to(CUDA), rates=RATES)
    torch.testing.assert_close(ours.master.cpu().double(), exact.master, rtol=1e-5, atol=1e-6)
    assert torch.equal(weight, ours.master.bfloat16())
    for found, wanted in ((ours.exp_avg, exact.exp_avg), (ours.exp_avg_sq, exact.exp_avg_sq)):
        tolerance = 1e-5 if moments == torch.float32 else 2**-7
        torch.testing.assert_close(found.cpu().double(), wanted, rtol=tolerance, atol=1e-7)
    before = [tensor.clone() for tensor in (ours.master, ours.exp_avg, ours.exp_avg_sq, weight)]
    bad = torch.full((length,), float("nan"), dtype=grads, device=CUDA)
    triton_kernels().adamw(bad, ours, scalars(torch.float32, skipped=1.0).to(CUDA), rates=RATES)
    after = (ours.master, ours.exp_avg, ours.exp_avg_sq, weight)
    assert all(torch.equal(a, b) for a, b in zip(before, after))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_of_squares(dtype: torch.dtype):
    views = [torch.randn(length, device=CUDA).to(dtype) for length in (3_000_017, 12, 1 << 20)]
    kernel = triton_kernels().sum_of_squares
    expected = sum(view.double().square().sum() for view in views)
    torch.testing.assert_close(kernel(views).double(), expected, rtol=1e-6, atol=0)
    assert torch.equal(kernel(views), kernel(views))


def flat_model(dtype: torch.dtype) -> list[FlatParamGroup]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(300, 700), nn.LayerNorm(700), nn.Linear(700, 110)).to(CUDA, dtype)
    placements = {
        n: compute_placement(n, tuple(p.shape), Shard(), ModelParallelCoordinate()) for n, p in model.named_parameters()
    }
    options, uses, mesh = FlatBufferOptions(bucket_size=10**9), Counter(model.parameters()), ParallelMesh.single(CUDA)
    return flatten_parameters([model], placements, groups_of(model), mesh, options, grads_per_micro_batch=uses)


def trained(memory: MemoryConfig, moments: str, *, steps: int = 4) -> list[Tensor]:
    groups = flat_model(torch.bfloat16)
    formats = {"exp_avg_dtype": moments, "exp_avg_sq_dtype": moments}
    config = OptimizerConfig(lr=0.01, **formats)  # type: ignore[arg-type]
    mesh = ParallelMesh.single(CUDA)
    optimizer = MixedPrecisionOptimizer(config, groups, mesh, memory=memory, kernels=triton_kernels())
    generator = torch.Generator(CUDA).manual_seed(4)
    for step in range(steps):
        for group in groups:
            for grads in group.grads():
                grads.normal_(generator=generator)
        # A first step compiles and takes memory; from then on nothing may wait, unless the disk makes it.
        quiet = step > 0 and memory.optimizer_nvme_offload is None
        torch.cuda.set_sync_debug_mode("error" if quiet else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert optimizer.scalar_state() == {"updates": steps}
    assert float(optimizer.weight_norm()) > 0
    ends = [view.cpu().flatten() for _, _, _, view in optimizer.moments()]
    masters = [view.cpu().flatten() for _, _, view in optimizer.master_weights()]
    return [group.flat_weights.cpu() for group in groups] + [torch.cat(masters), torch.cat(ends).sort().values]


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_offload_changes_no_bit_and_waits_for_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, moments: str):
    resident = trained(MemoryConfig(), moments)
    monkeypatch.setattr(mixed_precision, "plan_ranges", partial(plan_ranges, chunk=1 << 14))
    for memory in (
        MemoryConfig(optimizer_cpu_offload=True),
        MemoryConfig(optimizer_cpu_offload=True, optimizer_offload_fraction=0.4),
        MemoryConfig(optimizer_nvme_offload=str(tmp_path)),
    ):
        for found, wanted in zip(trained(memory, moments), resident, strict=True):
            assert torch.equal(found, wanted), memory
