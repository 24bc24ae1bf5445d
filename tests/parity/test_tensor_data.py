"""tp x sp x dp x micro-batches train the same model as one process: losses, gradients and weights of every step."""

from collections.abc import Iterable, Sequence

import pytest

from tests.dist import RankPool
from tests.longform import diagonal, later, one_in
from tests.parity.harness import check_layout

LAYOUTS = [
    [
        (f"--tp {tp} --dp {dp} {'--sequence-parallel' if sp else ''} --micro-batch-size {8 // dp // count}", tp * dp)
        for count in (1, 4)
    ]
    for tp in (1, 2, 4)
    for sp in ((False, True) if tp > 1 else (False,))
    for dp in (1, 2)
    if tp * dp <= 4
]
"""Each layout with one micro-batch and with four."""


def _in_turn(cases: Iterable[Sequence[tuple]]) -> list:
    """One of each pair of cases by default, the first and the second in turn; the other belongs to the long form."""
    return [
        case if place == number % 2 else later(*case)
        for number, pair in enumerate(cases)
        for place, case in enumerate(pair)
    ]


@diagonal(3)
@pytest.mark.parametrize(("layout", "world_size"), _in_turn(LAYOUTS))
def test_layout(ranks: RankPool, layout: str, world_size: int):
    check_layout(ranks, layout, world_size=world_size)


@diagonal(2)
@pytest.mark.parametrize(("layout", "world_size"), one_in(4, (of_four for _, of_four in LAYOUTS)))
def test_layout_in_single_precision(ranks: RankPool, layout: str, world_size: int):
    check_layout(ranks, layout, "--train-iters 4", world_size=world_size, dtype="float32")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        later("--tp 4 --dp 2 --micro-batch-size 4", "float64"),
        ("--tp 4 --dp 2 --sequence-parallel --micro-batch-size 1", "float64"),
        later("--tp 4 --dp 2 --sequence-parallel --micro-batch-size 1", "float32"),
    ],
)
def test_eight_ranks(ranks: RankPool, layout: str, dtype: str):
    check_layout(ranks, layout, "--train-iters 4" if dtype == "float32" else "", world_size=8, dtype=dtype)


MODELS = {
    "gqa": "--num-query-groups 2",
    "mqa": "--num-query-groups 1",
    "tied": "--no-untie-embeddings-and-output-weights",
    "odd-vocabulary": "--vocab-size 37 --make-vocab-size-divisible-by 1",
    "one-rank-all-padding": "--vocab-size 12 --make-vocab-size-divisible-by 8",
    "gpt": "--position-embedding-type learned_absolute --normalization LayerNorm --activation gelu_tanh "
    "--add-bias-linear --no-untie-embeddings-and-output-weights",
    "qk-norm-window": "--qk-layernorm --window-size 5 --add-qkv-bias --num-query-groups 2",
    "sgd-no-clip": "--optimizer sgd --clip-grad 0 --lr 0.5",
    "eod-mask-positions": "--eod-mask-loss --reset-position-ids",
}


@diagonal(3)
@pytest.mark.parametrize(
    ("model", "layout"),
    _in_turn([(model, layout) for layout in ("--tp 4 --sequence-parallel", "--tp 2 --dp 2")] for model in MODELS),
)
def test_model(ranks: RankPool, model: str, layout: str):
    check_layout(ranks, layout, MODELS[model], world_size=4)
