"""tp x sp x dp x micro-batches train the same model as one process: losses, gradients and weights of every step."""

import pytest

from tests.dist import RankPool
from tests.parity.harness import check_layout

LAYOUTS = [
    pytest.param(
        f"--tp {tp} --dp {dp} {'--sequence-parallel' if sp else ''} --micro-batch-size {8 // dp // count}", tp * dp
    )
    for tp in (1, 2, 4)
    for sp in ((False, True) if tp > 1 else (False,))
    for dp in (1, 2)
    for count in (1, 4)
    if tp * dp <= 4
]


@pytest.mark.parametrize(("layout", "world_size"), LAYOUTS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_layout(ranks: RankPool, layout: str, world_size: int, dtype: str):
    check_layout(ranks, layout, world_size=world_size, dtype=dtype)


@pytest.mark.parametrize(("layout", "world_size"), [("--tp 4 --dp 2", 8), ("--tp 4 --dp 2 --sequence-parallel", 8)])
def test_eight_ranks(ranks: RankPool, layout: str, world_size: int):
    check_layout(ranks, layout, "--train-iters 6", world_size=world_size)


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


@pytest.mark.parametrize("layout", ["--tp 4 --sequence-parallel", "--tp 2 --dp 2", "--tp 4"])
@pytest.mark.parametrize("model", MODELS)
def test_model(ranks: RankPool, model: str, layout: str):
    check_layout(ranks, layout, MODELS[model] + " --train-iters 6", world_size=4)
