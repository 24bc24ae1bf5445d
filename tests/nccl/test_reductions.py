"""Numbers that all ranks reduce outside training steps, over NCCL: scores of sequences, norms, gradients that are zero."""

from __future__ import annotations

import numpy as np
import pytest

from petatron.config import RunConfig
from petatron.mesh.mesh import ParallelMesh
from tests.dist import RankPool
from tests.longform import cases_over_nccl
from tests.nccl.layouts import mesh_of
from tests.parity.harness import tiny_run
from tests.unit.evaluate import test_score
from tests.unit.optim import test_global_norm


def scored(run: RunConfig) -> tuple[np.ndarray, np.ndarray]:
    return test_score.score(run, mesh_of(run), batch_tokens=48)


@pytest.mark.parametrize(("layout", "model"), cases_over_nccl(test_score.LAYOUTS))
def test_scores_are_those_of_one_process(gpu_ranks: RankPool, layout: str, model: str):
    expected, greedy = test_score.score(tiny_run(model, dtype="float64"), ParallelMesh.single(), batch_tokens=64)
    run = tiny_run(f"{model} {layout} --device cuda", world_size=2, dtype="float64")
    for found, same in gpu_ranks.run(scored, 2, run):
        assert found == pytest.approx(expected, rel=1e-10)
        assert (same == greedy).all() and greedy.any()


def counted(run: RunConfig) -> tuple[float, float, int]:
    return test_global_norm.numbers(run, mesh_of(run))


@pytest.mark.parametrize("layout", test_global_norm.LAYOUTS)
def test_norms_and_zeros_are_those_of_one_process(gpu_ranks: RankPool, layout: str):
    model = test_global_norm.MODELS["shared-heads-odd-vocabulary"]
    grad, weight, zeros = test_global_norm.numbers(tiny_run(model, dtype="float64"), ParallelMesh.single())
    run = tiny_run(f"{model} {layout} --device cuda", world_size=4, dtype="float64")
    for found in gpu_ranks.run(counted, 4, run):
        assert found[:2] == pytest.approx((grad, weight), rel=1e-12)
        assert abs(found[2] - zeros) <= 2  # a gradient may round to zero on one device alone
