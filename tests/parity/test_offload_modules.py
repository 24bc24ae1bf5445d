"""Offload by module inside every kind of parallelism trains the model that one device trains without it."""

from __future__ import annotations

import pytest

from tests.dist import RankPool
from tests.longform import diagonal
from tests.parity.harness import check_layout

DENSE = "--num-query-groups 2"
DEEP = f"{DENSE} --num-layers 4"
LATENT = "--multi-latent-attention --kv-lora-rank 12 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 7 --q-lora-rank 20 --qk-layernorm"
MIXED = f"{DENSE} --num-experts 4 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.1 --moe-shared-expert-intermediate-size 40"
OFFLOAD = "--fine-grained-activation-offloading --min-offloaded-tensor-size 0 --offload-modules"
ALL = f"{OFFLOAD} attn_norm qkv_linear core_attn attn_proj mlp_norm mlp"
EXPERTS = f"{OFFLOAD} moe experts shared_experts core_attn mlp_norm"
CHOSEN = "--recompute-granularity selective --recompute-modules"

LAYOUTS = {
    "tp-sp": (DENSE, f"--tp 2 --sequence-parallel {ALL}"),
    "pp": (DEEP, f"--pp 2 {ALL}"),
    "interleaved": (
        DEEP,
        f"--pp 2 --num-virtual-stages-per-pipeline-rank 2 {ALL} --delta-offload-bytes-across-pp-ranks 2000",
    ),
    "zero-bubble": (DEEP, f"--pp 2 --pipeline-schedule zb-v {ALL}"),
    "cp": (DENSE, f"--cp 2 {ALL}"),
    "cp-latent": (LATENT, f"--cp 2 {ALL} --activation-offload-fraction 0.6"),
    "ep": (MIXED, f"--ep 2 --dp 2 --moe-token-dispatcher-type alltoall {EXPERTS}"),
    "ep-recompute": (MIXED, f"--tp 2 --sequence-parallel --ep 2 --etp 1 {EXPERTS} {CHOSEN} layernorm core_attn"),
    "fsdp": (DENSE, f"--dp 2 --data-parallel-sharding-strategy optim_grads_params {ALL} {CHOSEN} core_attn"),
}


@diagonal(3)
@pytest.mark.parametrize("name", LAYOUTS)
def test_offload_in_a_layout(ranks: RankPool, name: str):
    model, layout = LAYOUTS[name]
    check_layout(ranks, layout, model, world_size=2)
