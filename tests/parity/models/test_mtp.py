"""Multi-token prediction trains the same model in every layout, and is the equation of the paper."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.parity.harness import check_layout
from tests.parity.state.resharding import check_resume

MTP = "--mtp-num-layers 1"
TWO = "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.7"
LATENT = "--multi-latent-attention --kv-lora-rank 12 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 7 --q-lora-rank 20 --qk-layernorm"
EXPERTS = f"{TWO} {LATENT} --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"
BIASED = f"{EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
DEEP = f"{TWO} --num-layers 4"
TIED = f"{TWO} --no-untie-embeddings-and-output-weights"
OFFLOAD = "--fine-grained-activation-offloading --min-offloaded-tensor-size 0 --offload-modules"
REPEATED = f"{TWO} --mtp-use-repeated-layer"
SHARED_EXPERTS = f"{BIASED} --mtp-use-repeated-layer"
MAMBA = "--mamba-num-groups 2 --mamba-state-dim 8 --mamba-head-dim 8 --mamba-chunk-size 4 --mtp-loss-scaling-factor 0.7"
HYBRID = f"--hybrid-layer-pattern M-M*/M*-/M*- --num-layers 4 {MAMBA}"
HYBRID_REPEATED = f"{HYBRID} --mtp-use-repeated-layer"
HYBRID_EXPERTS = (
    f"--hybrid-layer-pattern MEM*/*E/*E --num-layers 4 {MAMBA} --num-experts 4 --moe-aux-loss-coeff 0.01 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --mtp-use-repeated-layer"
)
LAYOUTS = [
    ("--tp 2 --sequence-parallel", 2, TWO),
    ("--pp 2", 2, TWO),
    ("--cp 2", 2, TWO),
    ("--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2, TWO),
    ("--ep 2", 2, BIASED),
    later("--tp 2", 2, TWO),
    later("--tp 2 --sequence-parallel --tp-comm-overlap", 2, TWO),
    later("--tp 2", 2, TIED),
    later("--pp 2", 2, TIED, nccl=True),
    later("--pp 2 --pipeline-schedule zb-v", 2, DEEP),
    later("--pp 2 --pipeline-schedule zb-v", 2, f"{TIED} --num-layers 4"),
    later("--pp 2 --pipeline-schedule zb-h1", 2, TIED),
    later("--pp 2 --pipeline-schedule gpipe", 2, MTP),
    later("--pp 2 --num-layers-per-virtual-pipeline-stage 1", 2, DEEP),
    later("--pp 2 --pipeline-model-parallel-layout Ett|mmL", 2, TWO, nccl=True),
    later("--pp 4 --pipeline-model-parallel-layout Et|t|tt|mmL", 4, DEEP, nccl=True),
    # The depths are a virtual stage of their own.
    later("--tp 2 --pp 2 --sequence-parallel --pipeline-model-parallel-layout Et|t|tt|mmL", 4, DEEP, nccl=True),
    later("--pp 2 --cp 2 --pipeline-model-parallel-layout Et|tt|t|mmL", 4, DEEP, nccl=True),
    later("--pp 2 --dp 2 --use-distributed-optimizer --pipeline-model-parallel-layout Ett|mmL", 4, TIED),
    later("--tp 2 --pp 2 --sequence-parallel", 4, TWO, nccl=True),
    later("--dp 2 --use-distributed-optimizer", 2, TWO),
    later("--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2, TIED),
    later("--dp 2 --pp 2 --data-parallel-sharding-strategy optim_grads", 4, TWO),
    later("--cp 2 --cp-comm-type all_gather", 2, TWO),
    later("--cp 2", 2, f"{TWO} --reset-attention-mask --reset-position-ids"),
    later("--pp 2 --cp 2", 4, TWO, nccl=True),
    later("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2", 1, TWO),
    later("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --pp 2", 2, TWO),
    later("--recompute-granularity selective --recompute-modules core_attn mlp --tp 2 --sequence-parallel", 2, TWO),
    later("--cpu-offloading-num-layers 2", 1, TWO),
    later(f"{OFFLOAD} core_attn mlp attn_norm --pp 2", 2, TWO),
    later("--tp 2 --ep 2 --etp 1 --sequence-parallel", 2, BIASED),
    later("--pp 2 --ep 2", 4, BIASED, nccl=True),
    later("--tp 2 --sequence-parallel --optimizer muon", 2, f"{TWO} --optimizer muon"),
    ("--tp 2 --sequence-parallel", 2, REPEATED),
    ("--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2, REPEATED),
    ("--dp 2 --use-distributed-optimizer --overlap-grad-reduce", 2, HYBRID_REPEATED),
    ("--pp 2", 2, HYBRID),
    ("--cp 2", 2, HYBRID),
    ("--ep 2", 2, HYBRID_EXPERTS),
    later("--pp 2", 2, REPEATED),
    later("--pp 2 --pipeline-schedule zb-h1", 2, REPEATED),
    later("--pp 2 --pipeline-schedule zb-v", 2, f"{REPEATED} --num-layers 4"),
    later("--pp 2 --pipeline-model-parallel-layout Ett|mmL", 2, REPEATED),
    later("--cp 2", 2, REPEATED),
    later("--ep 2", 2, SHARED_EXPERTS),
    later("--tp 2 --ep 2 --etp 1 --sequence-parallel", 2, SHARED_EXPERTS),
    later("--pp 2 --ep 2", 4, SHARED_EXPERTS),
    later("--dp 2 --data-parallel-sharding-strategy optim_grads", 2, REPEATED),
    later("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 1, REPEATED),
    later(
        "--recompute-granularity selective --recompute-modules core_attn mlp --tp 2 --sequence-parallel", 2, REPEATED
    ),
    later("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 1, SHARED_EXPERTS),
    later("--cpu-offloading-num-layers 2", 1, REPEATED),
    later("--tp 2 --sequence-parallel", 2, HYBRID),
    later("--tp 2 --pp 2 --sequence-parallel", 4, HYBRID_REPEATED),
    later("--pp 2 --hybrid-layer-pattern M|-M*/M*-/M*-", 2, HYBRID),
    later("--pp 2 --pipeline-schedule zb-h1", 2, HYBRID_REPEATED),
    later("--pp 4", 4, HYBRID),
    later("--pp 2 --num-layers-per-virtual-pipeline-stage 1", 2, HYBRID),
    later("--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2, HYBRID),
    later("--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2, HYBRID_REPEATED),
    later("--cp 2", 2, f"{HYBRID_REPEATED} --reset-attention-mask --reset-position-ids"),
    later("--cp 2 --tp 2 --sequence-parallel", 4, HYBRID),
    later("--tp 2 --ep 2 --etp 1 --sequence-parallel", 2, HYBRID_EXPERTS),
    later("--pp 2 --ep 2", 4, HYBRID_EXPERTS),
    later("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 1, HYBRID_REPEATED),
    later("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2 --pp 2", 2, HYBRID),
    later("--recompute-granularity selective --recompute-modules mamba mlp --tp 2 --sequence-parallel", 2, HYBRID),
    later("--cpu-offloading-num-layers 3", 1, HYBRID_REPEATED),
]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("model", "layout", "tensor"),
    [
        (HYBRID_REPEATED, "--cp 2 --dp 2 --use-distributed-optimizer", "layers.5.attention.q.weight"),
        (REPEATED, "--pp 2 --dp 2 --use-distributed-optimizer", "layers.2.projection.weight"),
        (HYBRID, "--pp 2 --dp 2 --data-parallel-sharding-strategy optim_grads_params", "layers.9.mlp.down.weight"),
    ],
)
def test_a_checkpoint_is_resumed_in_another_layout(
    ranks: RankPool, tmp_path: Path, model: str, layout: str, tensor: str
):
    check_resume(ranks, tmp_path, model, layout, world_size=4, tensors=(tensor,))


@diagonal(3)
@pytest.mark.parametrize(("layout", "world_size", "model"), LAYOUTS)
def test_every_layout_trains_the_same_model(ranks: RankPool, layout: str, world_size: int, model: str):
    check_layout(ranks, layout, model, world_size=world_size)
