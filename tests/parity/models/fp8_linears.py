"""The linears of a layer in FP8: a layout of two ranks trains the model of one process, and FP8 is part of the model."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import torch

from petatron.config import RunConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.train.build_run import build_model
from petatron.verify.compare_traces import Tolerances, compare_traces
from petatron.verify.record_trace import StepTrace
from tests.dist import RankPool
from tests.parity.harness import tiny_run, train

_STEPS = "--hidden-size 64 --ffn-hidden-size 64 --train-iters 2 --lr-warmup-iters 0 --fp8-format hybrid"


def check_fp8_linears(
    ranks: RankPool,
    model: str,
    weights: Collection[str],
    *,
    layout: str = "--pp 2",
    bound: float = 1e-9,
    train_rank: Callable[[RunConfig], list[StepTrace]] = train,
) -> None:
    """`weights`: some that must be multiplied in FP8. `train_rank` is of a module that ranks have to import."""
    run, bounds = _fp8_run(model), Tolerances(loss=bound, gradient=bound, parameter=bound)
    gemms = set(build_model(run, ParallelMesh.single(torch.device("cpu"))).fp8_gemms.linears)
    assert set(weights) <= gemms
    alone = train(run)
    verdict = compare_traces([alone], ranks.run(train_rank, 2, _fp8_run(f"{model} {layout}", world_size=2)), bounds)
    assert verdict.agrees, verdict.first_departure
    wide = replace(run, precision=replace(run.precision, fp8_format=None))
    assert not compare_traces([alone], [train(wide)], replace(bounds, loss=1e-4, gradient=1e-3)).agrees


def _fp8_run(flags: str, *, world_size: int = 1) -> RunConfig:
    """FP8 operands, multiplied and added in float64; a config asks for at most float32."""
    run = tiny_run(f"{_STEPS} {flags}", world_size=world_size)
    return replace(run, precision=replace(run.precision, fp64=True))
