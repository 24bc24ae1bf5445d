"""The gradient norm counts every logical element once: shared key/value heads, replicated norms, vocabulary padding."""

import pytest
import torch.distributed as dist

from petatron.config import RunConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.train.build_run import build_loader, build_model, build_optimizer
from tests.dist import RankPool
from tests.longform import diagonal
from tests.parity.harness import tiny_run

MODELS = {
    "shared-heads-odd-vocabulary": "--num-query-groups 1 --vocab-size 37 --qk-layernorm",
    "tied-gpt-with-biases": "--position-embedding-type learned_absolute --normalization LayerNorm --activation gelu "
    "--add-bias-linear --no-untie-embeddings-and-output-weights --num-query-groups 2 --vocab-size 12",
}
LAYOUTS = ("--tp 4", "--tp 4 --sequence-parallel", "--tp 2 --dp 2")


def _numbers(run: RunConfig) -> tuple[float, float, int]:
    return numbers(run, ParallelMesh(Layout.from_config(run.parallel), dist.get_rank() if dist.is_initialized() else 0))


def numbers(run: RunConfig, mesh: ParallelMesh) -> tuple[float, float, int]:
    """Runs on a rank: the norms of gradients and weights, and how many gradients are zero."""
    model = build_model(run, mesh)
    optimizer = build_optimizer(run, model)
    model.train_step(next(iter(build_loader(run, mesh))))
    weights, zeros = float(optimizer.weight_norm()), int(optimizer.count_zero_grads())
    return float(optimizer.step().grad_norm), weights, zeros


@diagonal(2)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_layouts_agree(ranks: RankPool, model: str):
    grad, weight, zeros = _numbers(tiny_run(model, dtype="float64"))
    # With a head of its own, the whole embedding row of an id that the batch does not hold gets exactly zero.
    assert grad > 0.0 and (zeros >= 32) == ("--no-untie" not in model)
    for layout in LAYOUTS:
        for found in ranks.run(_numbers, 4, tiny_run(f"{model} {layout}", world_size=4, dtype="float64")):
            assert found[:2] == pytest.approx((grad, weight), rel=1e-12), layout
            assert abs(found[2] - zeros) <= 2, layout  # a gradient may round to zero in one layout alone
