"""A learning rate of its own for embedding and output head trains the same model in every layout."""

from __future__ import annotations

import pytest

from petatron.verify.compare_traces import compare_traces
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.parity.harness import BOUNDS, check_layout, reference

DECOUPLED = "--decoupled-lr 2e-2 --decoupled-min-lr 1e-3"
TIED = f"{DECOUPLED} --no-untie-embeddings-and-output-weights"
ZERO1 = "--use-distributed-optimizer"
ZERO3 = "--data-parallel-sharding-strategy optim_grads_params"


@diagonal(2)
@pytest.mark.parametrize(
    ("layout", "model", "world_size"),
    [
        ("--tp 2 --sequence-parallel", DECOUPLED, 2),
        (f"--dp 2 {ZERO1} --overlap-param-gather", DECOUPLED, 2),
        (f"--dp 2 {ZERO3}", DECOUPLED, 2),
        (f"--pp 2 --dp 2 {ZERO1}", TIED, 4),
        later(f"--tp 2 --dp 2 {ZERO3}", TIED, 4),
        later(f"--tp 2 --dp 2 {ZERO1}", f"{DECOUPLED} --optimizer muon", 4),
    ],
)
def test_layout_equals_one_process(ranks: RankPool, layout: str, model: str, world_size: int):
    check_layout(ranks, layout, model, world_size=world_size)


def test_another_rate_is_another_model():
    """So that the comparison above could fail."""
    verdict = compare_traces([reference("", "float64")], [reference(DECOUPLED, "float64")], BOUNDS["float64"])
    assert not verdict.agrees
