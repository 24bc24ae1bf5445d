"""Models with a task head train the same in every layout: classification, regression and contrastive, encoders and decoders."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.parity.harness import BOUNDS, check_layout, check_part_of_model, check_traces, reference, tiny_run
from tests.parity.state.resharding import check_resume

_BERT = "--model-type bert --norm-placement post --embed-layernorm --normalization LayerNorm --position-embedding-type learned_absolute"
_TIED = "--no-untie-embeddings-and-output-weights"
_CONTRASTIVE = "--objective contrastive --objective-settings temperature=0.2 --dataset-settings negatives=1"
MODELS = {
    "classifier": f"--objective classification --num-labels 3 {_TIED}",
    "encoder classifier": f"{_BERT} --objective classification --num-labels 3",
    "regression": f"{_BERT} --norm-placement pre --objective regression --num-labels 2 --pooling mean",
    "hybrid classifier": "--hybrid-layer-pattern M* --mamba-state-dim 8 --mamba-head-dim 8 --mamba-num-groups 2 --mamba-chunk-size 4 "
    "--objective classification --num-labels 3",
}
LAYOUTS = {
    "--tp 2": 2,
    "--tp 2 --sequence-parallel": 2,
    "--pp 2": 2,
    "--cp 2": 2,
    "--dp 2 --use-distributed-optimizer": 2,
    "--dp 2 --data-parallel-sharding-strategy optim_grads_params": 2,
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": 1,
    "--tp 2 --sequence-parallel --cp 2": 4,
    "--pp 2 --dp 2 --use-distributed-optimizer": 4,
}
AT_ONCE = {
    "classifier": ("--pp 2", "--cp 2", "--dp 2 --use-distributed-optimizer"),
    "encoder classifier": (
        "--tp 2 --sequence-parallel",
        "--dp 2 --data-parallel-sharding-strategy optim_grads_params",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "regression": ("--tp 2 --sequence-parallel --cp 2",),
    "hybrid classifier": ("--tp 2",),
}
"""The layouts of the default suite."""


@diagonal(3)
@pytest.mark.parametrize(
    ("model", "layout"),
    [(model, layout) if layout in AT_ONCE[model] else later(model, layout) for model in MODELS for layout in LAYOUTS],
)
def test_every_layout_trains_the_same_head(ranks: RankPool, model: str, layout: str):
    check_layout(ranks, layout, MODELS[model], world_size=LAYOUTS[layout])


# A query is compared with the texts of a micro-batch of all data-parallel ranks: four samples in each of these.
CONTRASTIVE_LAYOUTS = {
    "--dp 2 --micro-batch-size 2": 2,
    "--dp 2 --micro-batch-size 2 --data-parallel-sharding-strategy optim_grads_params": 2,
    "--tp 2 --sequence-parallel --micro-batch-size 4": 2,
    "--cp 2 --dp 2 --micro-batch-size 2 --use-distributed-optimizer": 4,
    "--pp 2 --dp 2 --micro-batch-size 2": 4,
    "--dp 4 --micro-batch-size 1 --use-distributed-optimizer": 4,
}
CONTRASTIVE_AT_ONCE = (
    "decoder --dp 2 --micro-batch-size 2",
    "encoder --cp 2 --dp 2 --micro-batch-size 2 --use-distributed-optimizer",
    "encoder --dp 2 --micro-batch-size 2 --data-parallel-sharding-strategy optim_grads_params",
    "decoder --pp 2 --dp 2 --micro-batch-size 2",
)


@diagonal(3)
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (model, layout) if f"{model} {layout}" in CONTRASTIVE_AT_ONCE else later(model, layout)
        for model in ("decoder", "encoder")
        for layout in CONTRASTIVE_LAYOUTS
    ],
)
def test_texts_of_all_data_parallel_ranks_are_compared(ranks: RankPool, model: str, layout: str):
    flags = _CONTRASTIVE if model == "decoder" else f"{_BERT} {_CONTRASTIVE}"
    run = tiny_run(f"{flags} {layout}", world_size=CONTRASTIVE_LAYOUTS[layout], dtype="float64")
    check_traces(ranks, run, reference(f"{flags} --micro-batch-size 4", "float64"), BOUNDS["float64"])


def test_the_micro_batch_of_all_ranks_decides_what_is_compared():
    check_part_of_model(f"{_CONTRASTIVE} --micro-batch-size 4", f"{_CONTRASTIVE} --micro-batch-size 2")


PARTS = {"pooling": "--pooling mean", "a pooler": "--pooler", "a bias": "--label-bias"}


@pytest.mark.parametrize("part", PARTS)
def test_what_a_head_has_is_trained(part: str):
    check_part_of_model(MODELS["classifier"], f"{MODELS['classifier']} {PARTS[part]}")


@pytest.mark.parametrize("layout", ["--tp 2 --sequence-parallel", later("--dp 2 --use-distributed-optimizer")])
def test_a_head_and_its_moments_resume_on_another_number_of_ranks(ranks: RankPool, tmp_path: Path, layout: str):
    tensors = ("task_head.out.weight", "task_head.pooler.weight", "embedding.weight")
    check_resume(ranks, tmp_path, MODELS["encoder classifier"], layout, world_size=LAYOUTS[layout], tensors=tensors)
