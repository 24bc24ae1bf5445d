"""Models with experts train the same in every layout: ep, etp, folded over tp, cp and dp, with pipelines and sharded optimizers.

Balancing losses are per micro-batch, so every layout here has the micro-batches of the one-process run. What a capacity drops
depends on each rank's tokens by definition; layouts that keep a rank's tokens together (ep over dp) agree there too.
"""

from __future__ import annotations

import pytest

from tests.dist import RankPool
from tests.longform import every_second, later
from tests.parity.harness import check_layout

# The default suite has the core of these in test_matrix.py.
pytestmark = pytest.mark.matrix

EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.05 --moe-z-loss-coeff 1e-3 "
    "--train-iters 5"
)
A2A = "--moe-token-dispatcher-type alltoall"
GATHER = "--moe-token-dispatcher-type allgather"

LAYOUTS = [
    ("--ep 2 --dp 2", 2),
    ("--tp 2 --ep 2 --expert-tensor-parallel-size 1", 2),
    ("--tp 2", 2),
    ("--cp 2 --ep 2", 2),
    ("--pp 2", 2),
    ("--dp 4 --ep 4", 4),
    ("--dp 4 --ep 2", 4),
    ("--tp 2 --dp 2 --ep 2", 4),
    ("--tp 2 --dp 2 --ep 4 --expert-tensor-parallel-size 1", 4),
    ("--pp 2 --dp 2 --ep 2", 4),
    ("--cp 2 --dp 2 --ep 4", 4),
    ("--dp 2 --ep 2 --use-distributed-optimizer", 2),
    ("--dp 4 --ep 2 --use-distributed-optimizer", 4),
]


@pytest.mark.parametrize(("layout", "world_size"), every_second(LAYOUTS))
def test_layout(ranks: RankPool, layout: str, world_size: int):
    check_layout(ranks, f"{layout} {A2A}", EXPERTS, world_size=world_size)


@pytest.mark.parametrize(("layout", "world_size"), [LAYOUTS[0], later(*LAYOUTS[7]), LAYOUTS[10]])
def test_gathered_tokens(ranks: RankPool, layout: str, world_size: int):
    check_layout(ranks, f"{layout} {GATHER}", EXPERTS, world_size=world_size)


def test_single_precision(ranks: RankPool):
    check_layout(ranks, f"--tp 2 --dp 2 --ep 2 {A2A}", f"{EXPERTS} --train-iters 8", world_size=4, dtype="float32")


EIGHT = [
    "--tp 2 --dp 4 --ep 4",
    "--tp 2 --pp 2 --dp 2 --ep 2 --expert-tensor-parallel-size 2",
    "--tp 2 --cp 2 --dp 2 --ep 8 --expert-tensor-parallel-size 1 --num-experts 8",
]


@pytest.mark.parametrize("layout", every_second(EIGHT))
def test_eight_ranks(ranks: RankPool, layout: str):
    experts = "--num-experts 8" if "--num-experts" in layout else ""
    layout = layout.replace("--num-experts 8", "")
    check_layout(ranks, f"{layout} {A2A}", f"{EXPERTS} --train-iters 4 {experts}", world_size=8)


PIPELINES = [
    ("--pp 2 --num-virtual-stages-per-pipeline-rank 2", 2),
    ("--pp 2 --dp 2 --ep 2 --pipeline-schedule zb-h1", 4),
    ("--pp 2 --tp 2 --pipeline-schedule zb-v", 4),
]


@pytest.mark.parametrize(("layout", "world_size"), PIPELINES, ids=["interleaved", "zb-h1", "zb-v"])
def test_pipelines(ranks: RankPool, layout: str, world_size: int):
    check_layout(ranks, f"{layout} {A2A}", f"{EXPERTS} --num-layers 4 --train-iters 4", world_size=world_size)


RECOMPUTE = [
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--recompute-granularity selective --recompute-modules moe",
    "--recompute-granularity selective --recompute-modules moe_act",
]


@pytest.mark.matrix
@pytest.mark.parametrize("recompute", RECOMPUTE, ids=["full", "moe", "moe_act"])
def test_recomputed_routing_is_the_same(ranks: RankPool, recompute: str):
    check_layout(ranks, f"--tp 2 --dp 2 --ep 2 {A2A} {recompute}", EXPERTS, world_size=4)


def test_global_load_within_one_replica(ranks: RankPool):
    """Its load is that of all data-parallel ranks, so only layouts with as many of them agree."""
    flags = f"{EXPERTS} --train-iters 4 --moe-router-load-balancing-type global_aux_loss"
    check_layout(ranks, f"--tp 2 --cp 2 --ep 2 {A2A}", flags, world_size=4)


MODELS = {
    "sigmoid-bias-groups": "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --num-experts 8 "
    "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 "
    "--moe-router-bias-update-rate 1e-2 --moe-aux-loss-coeff 0",
    "sequence-aux": "--moe-router-load-balancing-type seq_aux_loss --moe-router-pre-softmax",
    "sinkhorn": "--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0",
    "shared-gate": "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate --moe-router-dtype fp32",
    "weights-at-input": "--moe-router-topk 1 --moe-router-score-function sigmoid --moe-apply-probs-on-input "
    "--moe-shared-expert-intermediate-size 16",
    "latent-pattern": "--moe-latent-size 8 --moe-layer-freq [0]+[1] --moe-router-topk 3",
    "gpt-biases": "--position-embedding-type learned_absolute --normalization LayerNorm --activation gelu_tanh "
    "--add-bias-linear --no-untie-embeddings-and-output-weights",
}


@pytest.mark.parametrize("model", every_second(MODELS))
def test_model(ranks: RankPool, model: str):
    flags = f"{EXPERTS} --train-iters 4 {MODELS[model]}"
    check_layout(ranks, f"--tp 2 --dp 2 --ep 2 {A2A}", flags, world_size=4)


@pytest.mark.parametrize("dispatcher", [A2A, GATHER], ids=["alltoall", "allgather"])
@pytest.mark.parametrize("pad", ["", "--moe-pad-expert-input-to-capacity"])
def test_capacity_where_ranks_keep_their_tokens(ranks: RankPool, pad: str, dispatcher: str):
    flags = f"{EXPERTS} --train-iters 4 --moe-expert-capacity-factor 0.8 {pad}"
    check_layout(ranks, f"--dp 2 --ep 2 {dispatcher}", flags, world_size=2)
