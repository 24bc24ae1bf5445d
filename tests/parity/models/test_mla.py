"""Multi-head latent attention trains the same model in every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from petatron.base.errors import CheckpointError, ConfigError
from petatron.config import RunConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.train.build_run import build_model
from petatron.verify.compare_traces import Tolerances, compare_traces
from tests.dist import RankPool
from tests.longform import later
from tests.parity.harness import check_layout, reference, tiny_run, train
from tests.parity.state.resharding import END, STOP, live, whole

SIZES = "--multi-latent-attention --kv-lora-rank 12 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 7"
MLA = f"{SIZES} --q-lora-rank 20 --qk-layernorm"
YARN = (
    f"{SIZES} --position-embedding-type yarn --rotary-scaling-factor 4 --original-max-position-embeddings 8 "
    "--mscale 0.7 --mscale-all-dim 1.3"
)
EXPERTS = f"{MLA} --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"


@pytest.mark.parametrize(
    ("layout", "world_size", "model"),
    [
        ("--tp 2", 2, MLA),
        ("--tp 2 --sequence-parallel", 2, MLA),
        ("--cp 2", 2, MLA),
        ("--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2, MLA),
        later("--tp 2", 2, YARN),
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


def fp8_run(flags: str = "", *, world_size: int = 1) -> RunConfig:
    """FP8 operands, multiplied and added in float64; a config asks for at most float32."""
    sizes = "--hidden-size 64 --ffn-hidden-size 64 --q-lora-rank 32 --kv-lora-rank 32"
    heads = "--qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8"
    steps = "--train-iters 2 --lr-warmup-iters 0 --fp8-format hybrid --fp8-recipe tensorwise"
    run = tiny_run(f"{MLA} {sizes} {heads} {steps} {flags}", world_size=world_size)
    return replace(run, precision=replace(run.precision, fp64=True))


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
    run, bounds = fp8_run(), Tolerances(loss=bound, gradient=bound, parameter=bound)
    gemms = set(build_model(run, ParallelMesh.single(torch.device("cpu"))).fp8_gemms.linears)
    assert {f"layers.1.attention.{name}.weight" for name in ("q_up", "kv_up", "out")} <= gemms
    alone = train(run)
    verdict = compare_traces([alone], ranks.run(train, 2, fp8_run(layout, world_size=2)), bounds)
    assert verdict.agrees, verdict.first_departure
    wide = replace(run, precision=replace(run.precision, fp8_format=None))
    assert not compare_traces([alone], [train(wide)], replace(bounds, loss=1e-4, gradient=1e-3)).agrees


def test_the_temperature_of_yarn_and_the_norms_are_part_of_the_model():
    bounds = Tolerances(loss=1e-6, gradient=1e-6, parameter=1e-6)
    for model, other in (
        (YARN, YARN.replace("--mscale-all-dim 1.3", "--mscale-all-dim 1.2")),
        (MLA, MLA.replace("--qk-layernorm", "")),
    ):
        verdict = compare_traces([reference(model, "float64")], [reference(other, "float64")], bounds)
        assert not verdict.agrees


def test_a_checkpoint_is_resumed_in_another_layout(ranks: RankPool, tmp_path: Path):
    steps = f"{MLA} --train-iters {END} --log-interval 1"
    saving = f"{steps} --save {tmp_path / 'run'} --save-interval {STOP} --tp 2 --sequence-parallel"
    lives = ranks.run(live, 2, tiny_run(saving, world_size=2, dtype="float64"))
    loading = f"{steps} --load {tmp_path / 'run'} --ckpt-step {STOP} --pp 2 --dp 2 --use-distributed-optimizer"
    resumed = ranks.run(live, 4, tiny_run(loading, world_size=4, dtype="float64"))
    at_stop, began = whole([one.at_stop for one in lives]), whole([one.began for one in resumed])
    assert at_stop.keys() == began.keys()
    assert any(name == "layers.1.attention.kv_up.weight" for _, name in began)
    for key, values in at_stop.items():
        torch.testing.assert_close(began[key], values, rtol=0, atol=0)
    losses = [one.losses for one in (lives[0], resumed[-1])]
    for step in range(STOP + 1, END + 1):
        assert losses[1][step] == pytest.approx(losses[0][step], rel=1e-12)
    folder = tmp_path / "run" / f"step-{STOP:08d}"
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        live(tiny_run(f"--train-iters {END} --load {tmp_path / 'run'} --ckpt-step {STOP}", dtype="float64"))
    assert "multi_latent_attention" in str(caught.value), folder
