"""The layouts people copy from tables build at full size, and every rank's part adds up to the model."""

import pytest

from petatron.config import RunConfig
from petatron.estimate.flops import parameter_count
from petatron.models.registry import model_spec
from petatron.validate import load_config
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.meta_device_rank import fake_rank, num_primary_elements
from tests.parity.harness import check_layout

TABLE = {
    "7B on 8": ("llama2-7b", "--tp 1 --pp 1", 8),
    "13B on 8": ("llama2-13b", "--tp 2 --pp 1 --sequence-parallel", 8),
    "70B on 64": ("llama2-70b", "--tp 4 --pp 4 --sequence-parallel --use-distributed-optimizer", 64),
    "405B on 128": (
        "llama3-405b",
        "--tp 8 --pp 8 --cp 2 --sequence-parallel --use-distributed-optimizer --decoder-first-pipeline-num-layers 15 "
        "--decoder-last-pipeline-num-layers 15",
        128,
    ),
    "Mixtral 8x7B on 32": ("mixtral-8x7b", "--tp 2 --pp 1 --ep 4 --use-distributed-optimizer", 32),
}


AT_ONCE = [("7B on 8", ""), ("Mixtral 8x7B on 32", "--num-layers 4")]  # all 32 layers are alike, on every rank
BASE = "--mock-data --lr 1e-4 --train-iters 1 --micro-batch-size 1"


def _run(name: str, more: str) -> RunConfig:
    preset, flags, world_size = TABLE[name]
    words = f"{BASE} {flags} {more}".split()
    return load_config(words, preset=preset, world_size=world_size).config


def _counts(name: str, more: str) -> list[int]:
    run, counts = _run(name, more), []
    for rank in range(TABLE[name][2]):
        with fake_rank(run, rank) as model:
            counts.append(num_primary_elements(model))
    return counts


@diagonal(2)
@pytest.mark.parametrize(
    ("name", "more"), [*AT_ONCE, *(later(name, "") for name in TABLE if (name, "") not in AT_ONCE)]
)
def test_the_ranks_of_a_table_row_together_are_the_model(ranks: RankPool, name: str, more: str):
    run = _run(name, more)
    [counts] = ranks.run(_counts, 1, name, more, timeout_s=60.0)
    assert sum(counts) == parameter_count(model_spec(run))
    assert min(counts) > 0.5 * max(counts), "no rank is left without work"


@pytest.mark.matrix
@pytest.mark.parametrize("name", [later("7B on 8"), "13B on 8"])
def test_a_table_row_trains_at_toy_width(ranks: RankPool, name: str):
    """The same flags on as many ranks, one process beside them."""
    check_layout(ranks, f"{TABLE[name][1]} --micro-batch-size 1", "--micro-batch-size 1", world_size=8)
