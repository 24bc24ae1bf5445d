"""Mamba-2 and hybrids of it train the same model in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from petatron.base.errors import CheckpointError, ConfigError
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.parity.harness import check_layout, check_part_of_model, tiny_run
from tests.parity.models.fp8_linears import check_fp8_linears
from tests.parity.state.resharding import END, STOP, check_resume, live

SIZES = "--mamba-state-dim 8 --mamba-head-dim 8 --mamba-chunk-size 4"
MAMBA = f"--hybrid-layer-pattern MM --mamba-num-groups 2 {SIZES}"
WHOLE_NORM = f"{MAMBA} --mamba-norm-groups 1"
ONE_GROUP = f"--hybrid-layer-pattern MM --mamba-num-groups 1 {SIZES}"
HYBRID = f"--hybrid-layer-pattern M-M* --num-layers 4 --mamba-num-groups 2 {SIZES}"
FACTORS = (
    "--key-multiplier 0.7 --attention-in-multiplier 0.8 --attention-out-multiplier 0.9 --ssm-in-multiplier 1.2 "
    "--ssm-multipliers 0.7 0.8 1.3 0.6 1.1 --ssm-out-multiplier 0.5 --mlp-multipliers 0.75 0.65"
)
PARALLEL = f"--hybrid-layer-pattern P-P- --num-layers 4 --mamba-num-groups 2 {SIZES} {FACTORS} --swiglu --mamba-gated-norm none"
NORM_FIRST = PARALLEL.replace("norm none", "norm norm_then_gate --mamba-norm-groups 1")
EXPERTS = (
    f"--hybrid-layer-pattern MEM* --num-layers 4 --mamba-num-groups 2 {SIZES} --num-experts 4 --moe-aux-loss-coeff 0.01"
)
BIAS = f"{HYBRID} --add-bias-linear --normalization LayerNorm"
PACKED = "--reset-attention-mask --reset-position-ids"


@diagonal(5)
@pytest.mark.parametrize(
    ("layout", "world_size", "model"),
    [
        ("--tp 2 --sequence-parallel", 2, HYBRID),
        ("--tp 4", 4, MAMBA),
        ("--tp 2", 2, WHOLE_NORM),
        later("--tp 4 --sequence-parallel", 4, WHOLE_NORM),
        later("--tp 2", 2, ONE_GROUP),
        later("--tp 4 --sequence-parallel", 4, ONE_GROUP),
        later("--tp 2 --sequence-parallel", 2, BIAS),
        later("--tp 2 --sequence-parallel --tp-comm-overlap", 2, HYBRID),
        ("--pp 2", 2, HYBRID),
        later("--pp 2 --num-layers-per-virtual-pipeline-stage 1", 2, HYBRID),
        later("--pp 2 --pipeline-schedule zb-h1 --tp 2 --sequence-parallel", 4, HYBRID),
        later("--pp 2 --pipeline-schedule zb-v", 2, HYBRID),
        later("--dp 2 --use-distributed-optimizer", 2, HYBRID),
        ("--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2, HYBRID),
        later("--tp 2 --dp 2 --sequence-parallel --data-parallel-sharding-strategy optim_grads_params", 4, MAMBA),
        later("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --pp 2", 2, HYBRID),
        later("--tp 2 --sequence-parallel --recompute-granularity selective --recompute-modules mamba mlp", 2, HYBRID),
        later("--tp 2 --pp 2 --sequence-parallel --cpu-offloading-num-layers 1", 4, HYBRID),
        ("--tp 2 --sequence-parallel", 2, NORM_FIRST),
        ("--pp 2", 2, PARALLEL),
        ("--cp 2", 2, f"{PARALLEL} {PACKED}"),
        ("--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2, PARALLEL),
        later("--tp 4", 4, NORM_FIRST),
        later("--tp 2", 2, PARALLEL),
        later("--tp 2 --pp 2 --sequence-parallel --pipeline-schedule zb-h1", 4, PARALLEL),
        later("--dp 2 --use-distributed-optimizer", 2, NORM_FIRST),
        later("--cp 2 --tp 2 --sequence-parallel", 4, NORM_FIRST),
        later("--cp 2 --cp-comm-type a2a", 2, PARALLEL),
        later(
            "--tp 2 --sequence-parallel --recompute-granularity selective --recompute-modules mamba mlp attention",
            2,
            PARALLEL,
        ),
        later("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --pp 2", 2, NORM_FIRST),
        later(
            "--ep 2", 2, EXPERTS.replace("MEM*", "PEPE").replace("--num-experts", f"{FACTORS} --swiglu --num-experts")
        ),
        ("--cp 2", 2, HYBRID),
        ("--cp 4", 4, f"{HYBRID} {PACKED}"),
        later("--cp 4", 4, MAMBA),
        later("--cp 2 --tp 2 --sequence-parallel", 4, HYBRID),
        later("--cp 2 --tp 2 --pp 1", 4, f"{ONE_GROUP} {PACKED}"),
        later("--cp 2 --cp-comm-type all_gather", 2, HYBRID),
        later("--cp 2 --cp-comm-type a2a", 2, f"{HYBRID} {PACKED}"),
        later("--cp 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2", 4, HYBRID),
        later("--cp 2 --window-size 5", 2, f"{HYBRID} --window-size 5"),
        later("--cp 2 --cp-comm-type all_gather", 2, f"{HYBRID} {PACKED}"),
        later("--cp 2 --pp 2", 4, HYBRID),
        later("--cp 2 --dp 2 --use-distributed-optimizer", 4, MAMBA),
        later("--cp 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 2, HYBRID),
        later("--cp 2 --recompute-granularity selective --recompute-modules mamba core_attn", 2, HYBRID),
        later("--ep 2", 2, EXPERTS),
        later("--tp 2 --ep 2 --etp 1 --sequence-parallel", 2, EXPERTS),
        later("--tp 2", 2, f"{HYBRID} {PACKED}"),
        later("--dp 2 --use-distributed-optimizer --tp 2 --optimizer muon", 4, f"{HYBRID} --optimizer muon"),
    ],
)
def test_every_layout_trains_the_same_model(ranks: RankPool, layout: str, world_size: int, model: str):
    check_layout(ranks, layout, model, world_size=world_size)


@pytest.mark.matrix
def test_its_linears_run_in_fp8(ranks: RankPool):
    weights = ("layers.0.mamba.in_proj.weight", "layers.0.mamba.out_proj.weight")
    check_fp8_linears(ranks, f"{HYBRID} --mamba-head-dim 8 --mamba-num-groups 2", weights)


def test_the_norm_s_groups_and_documents_are_part_of_the_model():
    check_part_of_model(MAMBA, WHOLE_NORM)
    check_part_of_model(HYBRID, f"{HYBRID} {PACKED}")


@pytest.mark.matrix
def test_a_checkpoint_is_resumed_in_another_layout(ranks: RankPool, tmp_path: Path):
    layout = "--cp 2 --dp 2 --use-distributed-optimizer"
    check_resume(ranks, tmp_path, HYBRID, layout, world_size=4, tensors=("layers.2.mamba.conv_B.weight",))
    with pytest.raises((ConfigError, CheckpointError), match="hybrid_layer_pattern"):
        other = HYBRID.replace("M-M*", "MM-*")
        live(tiny_run(f"{other} --train-iters {END} --load {tmp_path} --ckpt-step {STOP}", dtype="float64"))
