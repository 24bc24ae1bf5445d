"""Recommenders train the same in every layout: a table whose rows are on all ranks, both kinds of layers, both losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.parity.harness import check_layout, check_part_of_model
from tests.parity.state.resharding import check_resume

# 131 items: of four ranks three have 33 and the last one 32.
_PLAIN = (
    "--model-type recommender --normalization LayerNorm --activation relu --position-embedding-type learned_absolute"
)
_UNTIED = "--untie-embeddings-and-output-weights"
MODELS = {
    "sasrec": f"{_PLAIN} --no-untie-embeddings-and-output-weights --scale-embeddings",
    "hstu": f"{_PLAIN} --recommender-layers hstu --no-untie-embeddings-and-output-weights --hstu-value-dim 6 --hstu-time-buckets 40",
    "sampled": f"{_PLAIN} --no-untie-embeddings-and-output-weights --item-loss sampled_softmax --num-item-negatives 7 "
    "--item-negatives both --micro-batch-size 2",
    "untied": f"{_PLAIN} {_UNTIED} --item-loss sampled_softmax --num-item-negatives 9 --micro-batch-size 2",
}
LAYOUTS = {
    "--dp 2": 2,
    "--dp 2 --use-distributed-optimizer --overlap-grad-reduce": 2,
    "--dp 2 --data-parallel-sharding-strategy optim_grads_params": 2,
    "--tp 2": 2,
    "--tp 2 --sequence-parallel": 2,
    "--dp 4 --use-distributed-optimizer": 4,
    "--tp 2 --sequence-parallel --dp 2": 4,
    "--recompute-granularity selective": 1,
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": 1,
}
AT_ONCE = {
    "sasrec": ("--dp 2 --data-parallel-sharding-strategy optim_grads_params", "--tp 2 --sequence-parallel --dp 2"),
    "hstu": ("--tp 2 --sequence-parallel", "--dp 2 --use-distributed-optimizer --overlap-grad-reduce"),
    "sampled": ("--tp 2 --sequence-parallel --dp 2", "--dp 4 --use-distributed-optimizer"),
    "untied": ("--dp 2 --data-parallel-sharding-strategy optim_grads_params",),
}
"""The layouts of the default suite."""
ALONE = {"sasrec --cp 2": 2, "sasrec --cp 2 --dp 2": 4, "untied --pp 2": 2, "untied --pp 2 --dp 2": 4}
"""Layouts that suit some models."""


@diagonal(3)
@pytest.mark.parametrize(
    ("model", "layout"),
    [(model, layout) if layout in AT_ONCE[model] else later(model, layout) for model in MODELS for layout in LAYOUTS],
)
def test_every_layout_trains_the_same_recommender(ranks: RankPool, model: str, layout: str):
    check_layout(ranks, layout, MODELS[model], world_size=LAYOUTS[layout])


@pytest.mark.parametrize(
    "layout", ["sasrec --cp 2", "untied --pp 2", *map(later, ("sasrec --cp 2 --dp 2", "untied --pp 2 --dp 2"))]
)
def test_pipelines_and_context_parallelism(ranks: RankPool, layout: str):
    model, _, flags = layout.partition(" ")
    check_layout(ranks, flags, MODELS[model], world_size=ALONE[layout])


PARTS = {
    "times": "--hstu-time-buckets 0",
    "the width of values": "--hstu-value-dim 8",
}


@pytest.mark.parametrize("part", PARTS)
def test_what_hstu_has_is_trained(part: str):
    check_part_of_model(MODELS["hstu"], f"{MODELS['hstu']} {PARTS[part]}")


@pytest.mark.parametrize("layout", ["--dp 2", later("--dp 4 --use-distributed-optimizer")])
def test_a_table_and_its_moments_resume_on_another_number_of_ranks(ranks: RankPool, tmp_path: Path, layout: str):
    tensors = ("embedding.weight", "layers.0.attention.q.weight")
    check_resume(ranks, tmp_path, MODELS["sampled"], layout, world_size=LAYOUTS[layout], tensors=tensors)
