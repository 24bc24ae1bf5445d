"""Context parallelism trains the same model as one process, whatever keys and values travel by and whatever is masked."""

import pytest

from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.parity.harness import check_layout

KINDS = [("p2p", 2), ("p2p", 4), ("all_gather", 2), ("all_gather", 4), ("a2a", 2), ("a2a", 4), ("a2a+p2p", 4)]


@diagonal(2)
@pytest.mark.parametrize(("kind", "cp"), [(kind, cp) if cp == 4 else later(kind, cp) for kind, cp in KINDS])
def test_alone(ranks: RankPool, kind: str, cp: int):
    check_layout(ranks, f"--cp {cp} --cp-comm-type {kind}", world_size=cp)


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "cp"), [("p2p", 4), later("all_gather", 2), later("a2a", 2), later("a2a+p2p", 4)])
def test_single_precision(ranks: RankPool, kind: str, cp: int):
    sizes = "--hierarchical-context-parallel-sizes 2 2" if kind == "a2a+p2p" else ""
    check_layout(ranks, f"--cp {cp} --cp-comm-type {kind} {sizes}", "--train-iters 3", world_size=cp, dtype="float32")


MODELS = {
    "grouped-window": "--num-query-groups 2 --window-size 5",
    "documents": "--reset-attention-mask --reset-position-ids --eod-mask-loss",
    "documents-window-learned-positions": "--reset-attention-mask --window-size 6 --position-embedding-type "
    "learned_absolute --normalization LayerNorm --add-bias-linear --no-untie-embeddings-and-output-weights",
}


BOTH_WAYS = "documents-window-learned-positions"
"""The model that the exchange in two steps has by default too: it has documents and windows."""


@diagonal(2)
@pytest.mark.parametrize(
    ("kind", "cp", "model"),
    [
        (kind, cp, model) if kind == "p2p" or (kind, model) == ("a2a+p2p", BOTH_WAYS) else later(kind, cp, model)
        for kind, cp in (("p2p", 4), ("all_gather", 4), ("a2a", 2), ("a2a+p2p", 4))
        for model in MODELS
    ],
)
def test_masks(ranks: RankPool, kind: str, cp: int, model: str):
    check_layout(ranks, f"--cp {cp} --cp-comm-type {kind}", MODELS[model], world_size=cp)


@pytest.mark.parametrize("kind", ["p2p", later("all_gather")])
def test_one_key_value_head(ranks: RankPool, kind: str):
    model = "--num-query-groups 1 --reset-attention-mask"
    check_layout(ranks, f"--cp 2 --cp-comm-type {kind}", model, world_size=2)


@diagonal(2)
@pytest.mark.parametrize("kind", ["p2p", "all_gather", "a2a"])
def test_with_tensor_and_sequence_parallel(ranks: RankPool, kind: str):
    layout = f"--tp 2 --sequence-parallel --cp 2 --cp-comm-type {kind} --micro-batch-size 4"
    check_layout(ranks, layout, "--reset-attention-mask", world_size=4)


@pytest.mark.parametrize("kind", [later("p2p"), "a2a"])
def test_with_data_parallel(ranks: RankPool, kind: str):
    check_layout(ranks, f"--cp 2 --dp 2 --cp-comm-type {kind} --micro-batch-size 1", world_size=4)
