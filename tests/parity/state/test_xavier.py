"""`--init-method-xavier-uniform`: bounds and variance of the draws, the same in every layout."""

from __future__ import annotations

import math

import pytest
import torch

import petatron
from tests.dist import RankPool
from tests.longform import later
from tests.parity.harness import check_layout, check_part_of_model, tiny_run

XAVIER = "--init-method-xavier-uniform"


def test_weights_are_uniform_within_their_bounds():
    run = tiny_run(f"{XAVIER} --hidden-size 64 --num-experts 4")
    weights = dict(petatron.build_model(run, petatron.launch(run)).module.named_parameters())
    for name, rows, columns in (
        ("embedding.weight", 131, 64),
        ("layers.0.attention.qkv.weight", 192, 64),
        ("layers.1.mlp.experts.down.weight", 64, 48),
    ):
        values, bound = weights[name].detach().flatten(), math.sqrt(6 / (rows + columns))
        values = values[values != 0]  # the vocabulary's padding is
        assert bound * 0.98 < values.abs().max() <= bound
        assert values.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)
        middle = (values.abs() < bound / 2).double().mean().item()
        assert middle == pytest.approx(0.5, abs=0.02)  # as of uniform draws, and of no normal ones
    assert torch.all(weights["norm.weight"] == 1)


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ("--tp 2 --sequence-parallel", 2),
        later("--pp 2", 2),
        later("--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2),
    ],
)
def test_every_layout_begins_with_the_same(ranks: RankPool, layout: str, world_size: int):
    check_layout(ranks, layout, XAVIER, world_size=world_size)


def test_another_way_to_begin_is_another_run():
    check_part_of_model(XAVIER, "")
