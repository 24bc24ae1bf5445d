"""Kimi-Linear and MiniMax-Text-01 train the same model in every layout.

The first has decays of every key channel, latent attention without positions and experts, the second lightning attention, norms on the
residual stream with factors, and experts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist import RankPool
from tests.longform import diagonal, later, over_nccl
from tests.parity.harness import check_layout, check_part_of_model
from tests.parity.state.resharding import check_resume

SIZES = (
    "--linear-key-head-dim 5 --linear-value-head-dim 5 --linear-num-key-heads 4 --linear-num-value-heads 4 "
    "--linear-chunk-size 4"
)
VARIANT = "--experimental-attention-variant kimi_delta_attention --linear-attention-freq"
LATENT = (
    "--multi-latent-attention --kv-lora-rank 12 --qk-head-dim 6 --qk-pos-emb-head-dim 5 --v-head-dim 7 --qk-layernorm "
    "--position-embedding-type none"
)
DENSE = f"{VARIANT} 2 {SIZES} {LATENT} --num-layers 4"
KIMI = (
    f"{VARIANT} 2 {SIZES} {LATENT} --num-experts 4 --moe-ffn-hidden-size 16 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-topk-scaling-factor 1.7 --moe-shared-expert-intermediate-size 16 "
    "--moe-layer-freq [0,1] --moe-router-dtype fp32"
)
SHARED_KEYS = f"{VARIANT} [1,1] {SIZES} --linear-num-key-heads 2 --linear-key-head-dim 6"
LIGHTNING = (
    "--experimental-attention-variant lightning_attention --linear-chunk-size 4 --norm-placement stream --lightning-stream-multiplier 1.4 "
    "--lightning-out-multiplier 0.8 --attention-stream-multiplier 1.3 --mlp-stream-multiplier 1.2 --mlp-multipliers 1 1.1 "
    "--linear-attention-freq"
)
STREAM = f"{LIGHTNING} 2 --num-layers 4"
MINIMAX = f"{LIGHTNING} 2 --num-experts 4 --moe-ffn-hidden-size 16 --moe-aux-loss-coeff 0.01"
PACKED = "--reset-attention-mask --reset-position-ids"
LAYOUTS = [
    over_nccl("--tp 2 --sequence-parallel", 2, KIMI),
    over_nccl("--cp 2 --tp 2", 4, f"{DENSE} {PACKED}"),
    ("--pp 2 --recompute-granularity selective --recompute-modules delta core_attn", 2, DENSE),
    later("--tp 4", 4, DENSE),
    later("--tp 4 --sequence-parallel", 4, SHARED_KEYS),
    later("--tp 2 --sequence-parallel --tp-comm-overlap", 2, KIMI),
    later("--pp 2 --num-layers-per-virtual-pipeline-stage 1", 2, DENSE, nccl=True),
    later("--pp 2 --pipeline-schedule zb-h1 --tp 2 --sequence-parallel", 4, KIMI, nccl=True),
    later("--pp 2 --pipeline-schedule zb-v", 2, DENSE),
    later("--dp 2 --use-distributed-optimizer", 2, KIMI),
    later("--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2, DENSE, nccl=True),
    later("--tp 2 --sequence-parallel --recompute-granularity selective --recompute-modules delta mlp", 2, DENSE),
    later("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --pp 2", 2, KIMI),
    later("--tp 2 --pp 2 --sequence-parallel --cpu-offloading-num-layers 1", 4, DENSE),
    later("--cp 2", 2, KIMI),
    later("--cp 4", 4, SHARED_KEYS, nccl=True),
    later("--cp 2 --cp-comm-type all_gather", 2, f"{DENSE} {PACKED}"),
    later("--cp 2 --cp-comm-type a2a", 2, f"{KIMI} {PACKED}", nccl=True),
    later("--cp 2 --tp 2 --sequence-parallel", 4, f"{KIMI} {PACKED}"),
    later("--cp 2 --pp 2", 4, DENSE),
    later("--cp 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 2, DENSE),
    later("--tp 2 --ep 2 --etp 1 --sequence-parallel", 2, KIMI),
    later("--ep 2 --dp 2", 2, KIMI, nccl=True),
    later("--dp 2 --use-distributed-optimizer --tp 2 --optimizer muon", 4, f"{DENSE} --optimizer muon"),
    over_nccl("--tp 2 --sequence-parallel", 2, MINIMAX),
    over_nccl("--cp 2 --tp 2", 4, f"{STREAM} {PACKED}"),
    ("--pp 2 --num-layers-per-virtual-pipeline-stage 1", 2, STREAM),
    later("--tp 4", 4, STREAM),
    later("--tp 2 --sequence-parallel --tp-comm-overlap", 2, MINIMAX),
    later("--pp 2 --pipeline-schedule zb-h1 --tp 2 --sequence-parallel", 4, MINIMAX, nccl=True),
    later("--pp 2 --pipeline-schedule zb-v", 2, STREAM),
    later("--dp 2 --use-distributed-optimizer", 2, MINIMAX),
    later("--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2, STREAM, nccl=True),
    later("--tp 2 --sequence-parallel --recompute-granularity selective --recompute-modules attention mlp", 2, STREAM),
    later("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --pp 2", 2, MINIMAX),
    later("--tp 2 --pp 2 --sequence-parallel --cpu-offloading-num-layers 1", 4, STREAM),
    later("--cp 4", 4, STREAM, nccl=True),
    later("--cp 2 --cp-comm-type all_gather", 2, f"{STREAM} {PACKED}"),
    later("--cp 2 --cp-comm-type a2a", 2, f"{MINIMAX} {PACKED}"),
    later("--cp 2 --tp 2 --sequence-parallel", 4, f"{MINIMAX} {PACKED}"),
    later("--cp 2 --pp 2", 4, STREAM),
    later("--cp 2 --recompute-granularity selective --recompute-modules attention", 2, STREAM),
    later("--tp 2 --ep 2 --etp 1 --sequence-parallel", 2, MINIMAX),
    later("--ep 2 --dp 2", 2, MINIMAX, nccl=True),
    later("--dp 2 --use-distributed-optimizer --tp 2 --optimizer muon", 4, f"{STREAM} --optimizer muon"),
    later("--tp 2 --pp 2", 4, f"{STREAM} --mtp-num-layers 1"),
    later("--cp 2", 2, f"{LIGHTNING} [1,0,1] --num-layers 3 --mtp-num-layers 1"),
]


@diagonal(3)
@pytest.mark.parametrize(("layout", "world_size", "model"), LAYOUTS)
def test_every_layout_trains_the_same_model(ranks: RankPool, layout: str, world_size: int, model: str):
    check_layout(ranks, layout, model, world_size=world_size)


def test_decays_of_channels_are_part_of_the_model():
    check_part_of_model(DENSE, DENSE.replace("kimi_delta_attention", "gated_delta_net"))
    check_part_of_model(DENSE, f"{DENSE} {PACKED}")


def test_norms_on_the_stream_and_their_factors_are_part_of_the_model():
    check_part_of_model(STREAM, STREAM.replace("--norm-placement stream", "--norm-placement pre"))
    for factor in (
        "--lightning-stream-multiplier 1.4",
        "--attention-stream-multiplier 1.3",
        "--mlp-stream-multiplier 1.2",
    ):
        check_part_of_model(STREAM, STREAM.replace(factor, ""))


@pytest.mark.matrix
def test_a_checkpoint_is_resumed_in_another_layout(ranks: RankPool, tmp_path: Path):
    tensors = ("layers.0.delta.dt_bias", "layers.2.delta.decay_up.weight")
    check_resume(ranks, tmp_path, DENSE, "--cp 2", world_size=2, tensors=tensors)
