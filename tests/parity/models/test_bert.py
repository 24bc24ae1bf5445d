"""Encoders of masked text train the same in every layout: norms after sums and before branches, both losses, windows on both sides."""

from __future__ import annotations

from pathlib import Path

import pytest

from petatron.base.errors import ConfigError
from petatron.mesh.mesh import ParallelMesh
from petatron.train.build_run import build_loader, build_model
from petatron.validate import load_config
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.parity.harness import check_layout, check_part_of_model
from tests.parity.state.resharding import check_resume

_PLAIN = "--model-type bert --normalization LayerNorm --activation gelu --position-embedding-type learned_absolute"
MODELS = {
    "bert": f"{_PLAIN} --norm-placement post --embed-layernorm --no-untie-embeddings-and-output-weights --position-offset 2",
    "megatron": f"{_PLAIN} --num-token-types 3",
    "modern": "--model-type bert --no-bert-binary-head --no-first-attention-norm --embed-layernorm --activation geglu --window-size 5 "
    "--window-attn-skip-freq 2 --rotary-base-local 50 --prediction-activation relu --no-prediction-bias",
}
LAYOUTS = {
    "--dp 2 --use-distributed-optimizer": 2,
    "--tp 2": 2,
    "--tp 2 --sequence-parallel": 2,
    "--cp 2": 2,
    "--cp 2 --cp-comm-type a2a": 2,
    "--cp 2 --cp-comm-type all_gather": 2,
    "--pp 2": 2,
    "--dp 2 --data-parallel-sharding-strategy optim_grads_params": 2,
    "--recompute-granularity selective": 1,
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": 1,
    "--pp 4 --num-layers 4": 4,
    "--tp 2 --sequence-parallel --cp 2": 4,
    "--pp 2 --tp 2 --sequence-parallel": 4,
}
AT_ONCE = {
    "bert": ("--tp 2 --sequence-parallel", "--cp 2", "--pp 2"),
    "megatron": ("--tp 2", "--dp 2 --data-parallel-sharding-strategy optim_grads_params"),
    "modern": ("--cp 2 --cp-comm-type a2a", "--recompute-granularity selective"),
}
"""The layouts of the default suite."""


@diagonal(3)
@pytest.mark.parametrize(
    ("model", "layout"),
    [(model, layout) if layout in AT_ONCE[model] else later(model, layout) for model in MODELS for layout in LAYOUTS],
)
def test_every_layout_trains_the_same_encoder(ranks: RankPool, model: str, layout: str):
    flags = MODELS[model] + (" --num-layers 4" if "--num-layers 4" in layout else "")
    check_layout(ranks, layout, flags, world_size=LAYOUTS[layout])


PARTS = {
    "the binary head": "--no-bert-binary-head --num-token-types 2",
    "token types": "--num-token-types 0",
    "the bias of predictions": "--no-prediction-bias",
    "the activation of predictions": "--prediction-activation relu",
    "the placement of norms": "--norm-placement pre",
    "the norm of embeddings": "--no-embed-layernorm",
}


@pytest.mark.parametrize("part", PARTS)
def test_what_an_encoder_has_is_trained(part: str):
    check_part_of_model(MODELS["bert"], f"{MODELS['bert']} {PARTS[part]}")


REFUSED = {
    "--norm-placement post": ("decoder", "no norm left for the end of a decoder"),
    "--no-first-attention-norm --norm-placement post": ("bert", "is about norms before branches"),
    "--multi-latent-attention": ("bert", "sees all tokens, and a layer mixes the sequence by"),
    "--hybrid-layer-pattern M-M- --mamba-num-groups 1": ("bert", "sees all tokens, and a layer mixes the sequence by"),
    "--position-offset 3 --max-position-embeddings 65": (
        "bert",
        "is shorter than --seq-length 64 and --position-offset 3",
    ),
    "--mtp-num-layers 1": ("bert", "is for the decoder, and --model-type is bert"),
    "--dataset-settings packed=true": ("bert", "makes rows of documents, and not pairs of segments"),
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_an_encoder_cannot_be_is_refused_before_it_trains(flags: str):
    model, message = REFUSED[flags]
    argv = f"--model-type {model} --seq-length 64 --vocab-size 128 --mock-data --lr 1e-3 --train-iters 1 {flags}"
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        run, mesh = load_config(argv.split(), preset="tiny-llama").config, ParallelMesh.single()
        build_model(run, mesh)
        next(build_loader(run, mesh))


def test_a_checkpoint_resumes_in_another_layout(ranks: RankPool, tmp_path: Path):
    tensors = ("order_head.out.weight", "head.bias", "transform.dense.weight", "token_type.weight")
    check_resume(ranks, tmp_path, MODELS["bert"], "--pp 2", world_size=2, tensors=tensors)
