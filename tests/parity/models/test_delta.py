"""Gated delta nets, hybrids of them and Qwen3-Next train the same model in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.parity.harness import check_layout, check_part_of_model
from tests.parity.models.fp8_linears import check_fp8_linears
from tests.parity.state.resharding import check_resume

SIZES = (
    "--linear-key-head-dim 6 --linear-value-head-dim 5 --linear-num-key-heads 2 --linear-num-value-heads 4 "
    "--linear-chunk-size 4"
)
VARIANT = "--experimental-attention-variant gated_delta_net --linear-attention-freq"
HYBRID = f"--hybrid-layer-pattern G-G* --num-layers 4 {SIZES}"
ONE_KEY_HEAD = f"--hybrid-layer-pattern GG {SIZES} --linear-num-key-heads 1"
THREE_TAPS = f"{VARIANT} 2 {SIZES} --linear-conv-kernel-dim 3 --normalization LayerNorm --add-bias-linear"
GATE = "--attention-output-gate --num-query-groups 2 --qk-layernorm --apply-layernorm-1p --rotary-percent 0.5"
NEXT = (
    f"{VARIANT} 2 {SIZES} {GATE} --num-experts 4 --moe-ffn-hidden-size 16 --moe-aux-loss-coeff 0.01 "
    "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate"
)
BOTH_SCANS = (
    f"--hybrid-layer-pattern MG* --num-layers 3 {SIZES} --mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 8"
)
PACKED = "--reset-attention-mask --reset-position-ids"


@diagonal(3)
@pytest.mark.parametrize(
    ("layout", "world_size", "model"),
    [
        ("--tp 2 --sequence-parallel", 2, NEXT),
        ("--tp 4", 4, HYBRID),
        later("--tp 2", 2, ONE_KEY_HEAD),
        later("--tp 4 --sequence-parallel", 4, ONE_KEY_HEAD),
        later("--tp 2 --sequence-parallel", 2, THREE_TAPS),
        later("--tp 2 --sequence-parallel --tp-comm-overlap", 2, HYBRID),
        ("--pp 2", 2, HYBRID),
        later("--pp 2 --num-layers-per-virtual-pipeline-stage 1", 2, f"{NEXT} --num-layers 4"),
        later("--pp 2 --pipeline-schedule zb-h1 --tp 2 --sequence-parallel", 4, HYBRID),
        later("--pp 2 --pipeline-schedule zb-v", 2, HYBRID),
        later("--dp 2 --use-distributed-optimizer", 2, NEXT),
        later("--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2, HYBRID),
        later("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --pp 2", 2, HYBRID),
        later("--tp 2 --sequence-parallel --recompute-granularity selective --recompute-modules delta mlp", 2, HYBRID),
        later("--tp 2 --sequence-parallel --recompute-granularity selective --recompute-modules core_attn", 2, NEXT),
        later("--tp 2 --pp 2 --sequence-parallel --cpu-offloading-num-layers 1", 4, HYBRID),
        ("--cp 2", 2, NEXT),
        ("--cp 4", 4, f"{HYBRID} {PACKED}"),
        later("--cp 4", 4, ONE_KEY_HEAD),
        later("--cp 4", 4, THREE_TAPS),
        later("--cp 2 --tp 2 --sequence-parallel", 4, NEXT),
        later("--cp 2 --tp 2", 4, f"{ONE_KEY_HEAD} {PACKED}"),
        later("--cp 2 --cp-comm-type all_gather", 2, f"{NEXT} {PACKED}"),
        later("--cp 2 --cp-comm-type a2a", 2, f"{NEXT} {PACKED}"),
        later("--cp 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2", 4, HYBRID),
        later("--cp 2 --pp 2", 4, HYBRID),
        later("--cp 2 --dp 2 --use-distributed-optimizer", 4, NEXT),
        later("--cp 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 2, HYBRID),
        later("--cp 2 --recompute-granularity selective --recompute-modules delta core_attn", 2, HYBRID),
        later("--tp 2 --ep 2 --etp 1 --sequence-parallel", 2, NEXT),
        later("--ep 2 --dp 2", 2, NEXT),
        later("--cp 2 --tp 2 --sequence-parallel", 4, f"{BOTH_SCANS} {PACKED}"),
        later("--tp 2 --pp 2", 4, f"--num-layers 4 {VARIANT} 2 {SIZES} {GATE} --mtp-num-layers 1"),
        later("--cp 2", 2, f"--num-layers 3 {VARIANT} [1,0,1] {SIZES} {GATE} --mtp-num-layers 1"),
        later("--dp 2 --use-distributed-optimizer --tp 2 --optimizer muon", 4, f"{HYBRID} --optimizer muon"),
    ],
)
def test_every_layout_trains_the_same_model(ranks: RankPool, layout: str, world_size: int, model: str):
    check_layout(ranks, layout, model, world_size=world_size)


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ("--tp 2 --sequence-parallel", 2),
        later("--tp 4", 4),
        later("--cp 2 --cp-comm-type a2a", 2),
        later("--cp 2", 2),
        later("--pp 2", 2),
    ],
)
@pytest.mark.parametrize("model", [GATE, later("--attention-output-gate --add-bias-linear --window-size 5")])
def test_gated_attention_trains_the_same_model(ranks: RankPool, layout: str, world_size: int, model: str):
    check_layout(ranks, layout, model, world_size=world_size)


def test_its_linears_run_in_fp8(ranks: RankPool):
    weights = ("layers.0.delta.in_proj.weight", "layers.0.delta.out_proj.weight")
    check_fp8_linears(
        ranks, f"{HYBRID} --linear-value-head-dim 8 --linear-key-head-dim 8 --attention-output-gate", weights
    )


def test_gates_and_documents_are_part_of_the_model():
    check_part_of_model(NEXT, NEXT.replace("--attention-output-gate ", ""))
    check_part_of_model(HYBRID, f"{HYBRID} {PACKED}")


@pytest.mark.matrix
def test_a_checkpoint_is_resumed_in_another_layout(ranks: RankPool, tmp_path: Path):
    model = f"{HYBRID} --attention-output-gate"
    tensors = ("layers.2.delta.conv_k.weight", "layers.3.attention.gate.weight")
    layout = "--cp 2 --dp 2 --use-distributed-optimizer"
    check_resume(ranks, tmp_path, model, layout, world_size=4, tensors=tensors)
