"""Sparse latent attention, with its indexer's loss, trains the same model in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.parity.harness import check_layout, check_part_of_model
from tests.parity.models.fp8_linears import check_fp8_linears
from tests.parity.state.resharding import check_resume

SIZES = (
    "--multi-latent-attention --kv-lora-rank 12 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 7 --qk-layernorm"
)
INDEXER = "--experimental-attention-variant dsa --dsa-indexer-n-heads 3 --dsa-indexer-head-dim 8 --dsa-indexer-topk 5"
DSA = f"{SIZES} --q-lora-rank 20 {INDEXER} --dsa-indexer-loss-coeff 0.3"
SPARSE = f"{DSA} --dsa-indexer-use-sparse-loss"
WARM_UP = DSA.replace("--dsa-indexer-topk 5", "--dsa-indexer-topk 16")
OTHERS = f"{SIZES} {INDEXER} --dsa-indexer-loss-coeff 0.3 --dsa-indexer-rope-interleaved --no-dsa-indexer-scoring-relu"
EXPERTS = f"{SPARSE} --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"
DOCUMENTS = "--reset-attention-mask --reset-position-ids"
RECOMPUTE = "--recompute-granularity selective --recompute-modules"


@diagonal(2)
@pytest.mark.parametrize(
    ("layout", "world_size", "model"),
    [
        ("--tp 2", 2, DSA),
        ("--tp 2 --sequence-parallel", 2, SPARSE),
        ("--cp 2 --cp-comm-type all_gather", 2, DSA),
        ("--pp 2", 2, SPARSE),
        ("--dp 2 --use-distributed-optimizer", 2, DSA),
        ("--ep 2", 2, EXPERTS),
        later("--cp 2 --cp-comm-type all_gather", 2, SPARSE),
        later("--cp 2 --cp-comm-type all_gather", 2, WARM_UP),
        later("--cp 2 --cp-comm-type all_gather --tp 2 --sequence-parallel", 4, f"{SPARSE} {DOCUMENTS}"),
        later("--cp 2 --cp-comm-type all_gather", 2, f"{DSA} --window-size 7"),
        later("--tp 2 --sequence-parallel", 2, WARM_UP),
        later("--tp 2 --sequence-parallel", 2, OTHERS),
        later("--tp 2", 2, f"{DSA} {DOCUMENTS}"),
        later("--tp 2 --sequence-parallel --tp-comm-overlap", 2, DSA),
        later("--pp 2 --pipeline-schedule zb-h1 --tp 2 --sequence-parallel", 4, SPARSE),
        later("--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2, SPARSE),
        later(f"--tp 2 --sequence-parallel {RECOMPUTE} attention mlp", 2, DSA),
        later(f"{RECOMPUTE} core_attn layernorm --tp 2", 2, SPARSE),
        later("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --pp 2", 2, DSA),
        later("--tp 2 --pp 2 --sequence-parallel --cpu-offloading-num-layers 1", 4, SPARSE),
        later("--tp 2 --ep 2 --etp 1 --sequence-parallel", 2, EXPERTS),
        later("--tp 2", 2, f"{SPARSE} --mtp-num-layers 1"),
        later("--pp 2", 2, f"{DSA} --mtp-num-layers 1"),
    ],
)
def test_every_layout_trains_the_same_model(ranks: RankPool, layout: str, world_size: int, model: str):
    check_layout(ranks, layout, model, world_size=world_size)


@pytest.mark.parametrize(("layout", "bound"), [later("--pp 2", 1e-9), ("--tp 2 --sequence-parallel", 1e-5)])
def test_its_linears_run_in_fp8(ranks: RankPool, layout: str, bound: float):
    model = f"{DSA} --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8"
    weights = [f"layers.1.attention.{name}.weight" for name in ("q_up", "out")]
    check_fp8_linears(ranks, model, weights, layout=layout, bound=bound)


@pytest.mark.parametrize(
    ("flag", "other"),
    [
        ("--dsa-indexer-topk 5", "--dsa-indexer-topk 4"),
        ("--dsa-indexer-loss-coeff 0.3", "--dsa-indexer-loss-coeff 0.2"),
        ("--dsa-indexer-loss-coeff 0.3", "--dsa-indexer-loss-coeff 0.3 --dsa-indexer-use-sparse-loss"),
        ("--dsa-indexer-n-heads 3", "--dsa-indexer-n-heads 3 --dsa-indexer-rope-interleaved"),
        ("--dsa-indexer-n-heads 3", "--dsa-indexer-n-heads 3 --no-dsa-indexer-scoring-relu"),
        ("--dsa-indexer-n-heads 3", "--dsa-indexer-n-heads 3 --dsa-indexer-k-norm-epsilon 0.1"),
    ],
)
def test_every_setting_is_part_of_the_model(flag: str, other: str):
    check_part_of_model(DSA, DSA.replace(flag, other))


def test_a_checkpoint_is_resumed_in_another_layout(ranks: RankPool, tmp_path: Path):
    layout = "--pp 2 --dp 2 --use-distributed-optimizer"
    weights = ("layers.1.attention.indexer.q_up.weight", "layers.1.attention.indexer.k_norm.bias")
    check_resume(ranks, tmp_path, SPARSE, layout, world_size=4, tensors=weights)
