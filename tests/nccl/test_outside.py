"""Models from outside over NCCL: several tensors at a pipeline boundary, losses on two stages, a mixer that is not attention.

In float64, so that every tensor is compared; once more with activations of 4 MB, which no buffer of NCCL holds.
"""

from __future__ import annotations

import pytest

from petatron.config import RunConfig
from petatron.verify.compare_traces import Tolerances, compare_traces
from petatron.verify.record_trace import StepTrace
from tests.dist import RankPool
from tests.nccl.layouts import train
from tests.outside import encoder_decoder, gated_linear_attention  # noqa: F401  register their models
from tests.parity.harness import tiny_run

MODELS = {
    "two streams": "--model-type encoder-decoder --num-layers 4 --position-embedding-type none",
    "hybrid": "--model-type hybrid --num-layers 4",
}
WIDE = "--hidden-size 512 --num-attention-heads 8 --ffn-hidden-size 768 --seq-length 1024"


def train_outside(runs: list[RunConfig]) -> list[list[StepTrace]]:
    """On a rank, which imports this module and with it the models."""
    return train(runs)[0]


def gpu_run(flags: str, *, world_size: int = 1) -> RunConfig:
    return tiny_run(
        f"{flags} --device cuda --train-iters 2 --lr-warmup-iters 0", world_size=world_size, dtype="float64"
    )


@pytest.mark.parametrize("sizes", ["", WIDE], ids=["small", "wide"])
@pytest.mark.parametrize(
    ("model", "layout", "world_size"),
    [
        ("two streams", "--pp 2", 2),
        ("two streams", "--pp 4", 4),
        ("two streams", "--tp 2 --pp 2 --sequence-parallel", 4),
        ("two streams", "--pp 2 --num-layers-per-virtual-pipeline-stage 1", 2),
        ("hybrid", "--tp 2 --sequence-parallel", 2),
        ("hybrid", "--pp 2 --dp 2 --use-distributed-optimizer", 4),
        ("hybrid", "--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2),
    ],
)
def test_a_layout_over_nccl_equals_one_process(
    gpu_ranks: RankPool, model: str, layout: str, world_size: int, sizes: str
):
    flags = f"{MODELS[model]} {sizes}"
    [[alone]] = gpu_ranks.run(train_outside, 1, [gpu_run(flags)], timeout_s=120)
    runs = [gpu_run(f"{flags} {layout}", world_size=world_size)]
    traces = [steps for [steps] in gpu_ranks.run(train_outside, world_size, runs, timeout_s=120)]
    verdict = compare_traces([alone], traces, Tolerances(loss=1e-9, gradient=1e-9, parameter=1e-7))
    assert len(verdict.steps) == 2
    assert verdict.agrees, verdict.first_departure
