"""Kimi-Linear trains the same model in every layout: decays of every key channel, latent attention without positions, experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from petatron.verify.compare_traces import Tolerances, compare_traces
from tests.dist import RankPool
from tests.longform import later, over_nccl
from tests.parity.harness import check_layout, reference, tiny_run
from tests.parity.state.resharding import END, STOP, live, whole

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
]


@pytest.mark.parametrize(("layout", "world_size", "model"), LAYOUTS)
def test_every_layout_trains_the_same_model(ranks: RankPool, layout: str, world_size: int, model: str):
    check_layout(ranks, layout, model, world_size=world_size)


def test_decays_of_channels_are_part_of_the_model():
    bounds = Tolerances(loss=1e-6, gradient=1e-6, parameter=1e-6)
    scalar = DENSE.replace("kimi_delta_attention", "gated_delta_net")
    for other in (scalar, f"{DENSE} {PACKED}"):
        assert not compare_traces([reference(DENSE, "float64")], [reference(other, "float64")], bounds).agrees


@pytest.mark.matrix
def test_a_checkpoint_is_resumed_in_another_layout(ranks: RankPool, tmp_path: Path):
    steps = f"{DENSE} --train-iters {END} --log-interval 1"
    saving = f"{steps} --save {tmp_path / 'run'} --save-interval {STOP} --tp 2 --sequence-parallel"
    lives = ranks.run(live, 2, tiny_run(saving, world_size=2, dtype="float64"))
    loading = f"{steps} --load {tmp_path / 'run'} --ckpt-step {STOP} --cp 2"
    resumed = ranks.run(live, 2, tiny_run(loading, world_size=2, dtype="float64"))
    at_stop, began = whole([one.at_stop for one in lives]), whole([one.began for one in resumed])
    assert at_stop.keys() == began.keys()
    assert {"layers.0.delta.dt_bias", "layers.2.delta.decay_up.weight"} <= {name for _, name in began}
    for key, values in at_stop.items():
        torch.testing.assert_close(began[key], values, rtol=0, atol=0)
    for step in range(STOP + 1, END + 1):
        assert resumed[-1].losses[step] == pytest.approx(lives[0].losses[step], rel=1e-12)
