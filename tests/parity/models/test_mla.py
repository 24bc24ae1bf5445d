"""Multi-head latent attention trains the same model in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from petatron.base.errors import CheckpointError, ConfigError
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.parity.harness import check_layout, check_part_of_model, tiny_run
from tests.parity.models.fp8_linears import check_fp8_linears
from tests.parity.state.resharding import END, STOP, check_resume, live

SIZES = "--multi-latent-attention --kv-lora-rank 12 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 7"
MLA = f"{SIZES} --q-lora-rank 20 --qk-layernorm"
YARN = (
    f"{SIZES} --position-embedding-type yarn --rotary-scaling-factor 4 --original-max-position-embeddings 8 "
    "--mscale 0.7 --mscale-all-dim 1.3"
)
TABLE = f"{MLA} --learned-position-table"
EXPERTS = f"{MLA} --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"


@diagonal(2)
@pytest.mark.parametrize(
    ("layout", "world_size", "model"),
    [
        ("--tp 2", 2, MLA),
        ("--tp 2 --sequence-parallel", 2, MLA),
        ("--cp 2", 2, MLA),
        ("--tp 2 --sequence-parallel", 2, TABLE),
        ("--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2, MLA),
        later("--tp 2", 2, YARN),
        later("--cp 2", 2, TABLE),
        later("--pp 2", 2, TABLE),
        later("--tp 2 --sequence-parallel", 2, YARN),
        later("--tp 4 --sequence-parallel", 4, MLA),
        later("--tp 2 --sequence-parallel --tp-comm-overlap", 2, MLA),
        later("--pp 2", 2, MLA),
        later("--pp 2 --num-layers-per-virtual-pipeline-stage 1 --num-layers 4", 2, f"{MLA} --num-layers 4"),
        later("--pp 2 --pipeline-schedule zb-h1 --tp 2 --sequence-parallel", 4, MLA),
        later("--dp 2 --use-distributed-optimizer", 2, MLA),
        later("--cp 2 --cp-comm-type all_gather", 2, MLA),
        later("--cp 2 --cp-comm-type a2a", 2, MLA),
        later("--cp 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2", 4, MLA),
        later("--cp 2 --tp 2 --sequence-parallel", 4, YARN),
        later("--cp 2", 2, f"{MLA} --window-size 5"),
        later("--cp 2", 2, f"{MLA} --reset-attention-mask --reset-position-ids"),
        later("--tp 2 --sequence-parallel --recompute-granularity selective --recompute-modules attention mlp", 2, MLA),
        later("--tp 2 --sequence-parallel --recompute-granularity selective", 2, YARN),
        later("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --pp 2", 2, MLA),
        later("--tp 2 --pp 2 --sequence-parallel --cpu-offloading-num-layers 1", 4, MLA),
        later("--ep 2", 2, EXPERTS),
        later("--tp 2 --ep 2 --etp 1 --sequence-parallel", 2, EXPERTS),
        later(
            "--dp 2 --use-distributed-optimizer --tp 2 --sequence-parallel --optimizer muon",
            4,
            f"{MLA} --optimizer muon",
        ),
    ],
)
def test_every_layout_trains_the_same_model(ranks: RankPool, layout: str, world_size: int, model: str):
    check_layout(ranks, layout, model, world_size=world_size)


@pytest.mark.parametrize(
    ("layout", "bound"),
    [
        later("--pp 2", 1e-9),
        # Ranks scale their shards each: numbers that one scale rounds to zero may be a subnormal with another.
        ("--tp 2 --sequence-parallel", 1e-5),
        later("--tp 2", 1e-5),
        later("--cp 2 --micro-batch-size 4", 1e-5),
    ],
)
def test_its_linears_run_in_fp8(ranks: RankPool, layout: str, bound: float):
    model = f"{MLA} --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8"
    weights = [f"layers.1.attention.{name}.weight" for name in ("q_up", "kv_up", "out")]
    check_fp8_linears(ranks, model, weights, layout=layout, bound=bound)


def test_the_temperature_of_yarn_and_the_norms_are_part_of_the_model():
    check_part_of_model(YARN, YARN.replace("--mscale-all-dim 1.3", "--mscale-all-dim 1.2"))
    check_part_of_model(MLA, MLA.replace("--qk-layernorm", ""))


def test_a_checkpoint_is_resumed_in_another_layout(ranks: RankPool, tmp_path: Path):
    layout = "--pp 2 --dp 2 --use-distributed-optimizer"
    check_resume(ranks, tmp_path, MLA, layout, world_size=4, tensors=("layers.1.attention.kv_up.weight",))
    with pytest.raises((ConfigError, CheckpointError), match="multi_latent_attention"):
        live(tiny_run(f"--train-iters {END} --load {tmp_path} --ckpt-step {STOP}", dtype="float64"))
