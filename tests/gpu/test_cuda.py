"""On a CUDA device: the same curves as on the CPU, in every precision, alone and split over ranks that share the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from petatron.config import RunConfig
from petatron.mesh.layout import Layout
from petatron.mesh.mesh import ParallelMesh
from petatron.train.compare import compare
from petatron.train.trace import StepTrace, record_steps
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
    verdict = compare([reference("", dtype)], [train_on_cuda(tiny_run(dtype=dtype))], bounds)
    assert verdict.agrees, verdict.first_departure


@pytest.mark.parametrize(("layout", "world_size"), [("--tp 2 --sequence-parallel", 2), ("--tp 2 --dp 2", 4)])
def test_ranks_that_share_the_device(ranks: RankPool, layout: str, world_size: int):
    traces = ranks.run(train_on_cuda, world_size, tiny_run(layout, world_size=world_size, dtype="float64"))
    verdict = compare([reference("", "float64")], traces, BOUNDS["float64"])
    assert verdict.agrees, verdict.first_departure


def test_bf16_follows_the_curve():
    exact = [step.loss for step in reference("", "float64")]
    for ours, theirs in zip(train_on_cuda(tiny_run("--bf16")), exact, strict=True):
        assert ours.loss == pytest.approx(theirs, rel=0.03)
