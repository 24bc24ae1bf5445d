"""Encoder-decoders train the same in every layout: three kinds of positions, tied heads, experts, the encoder on its own stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from petatron.base.errors import ConfigError
from petatron.validate import load_config
from petatron.verify.compare_traces import Tolerances, compare_traces
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.parity.harness import check_layout, check_part_of_model, reference
from tests.parity.state.resharding import check_resume

_RELATIVE_FLAG = "--position-embedding-type relative"
_PLAIN = "--model-type t5 --num-layers 4 --encoder-num-layers 2 --decoder-seq-length 12 --mask-prob 0.3"
_RELATIVE = f"{_RELATIVE_FLAG} --relative-attention-num-buckets 8 --relative-attention-max-distance 6"
_TIED = "--no-untie-embeddings-and-output-weights --logits-scaling 5.5"
MODELS = {
    "t5": f"{_PLAIN} {_RELATIVE} {_TIED} --activation relu --softmax-scale 1",
    "gated": f"{_PLAIN} {_RELATIVE} --activation geglu_tanh --num-query-groups 2 --group-query-attention --encoder-num-layers 1 "
    "--decoder-num-layers 3",
    "rotary": f"{_PLAIN} --position-embedding-type rope --normalization LayerNorm --qk-layernorm --encoder-num-layers 3 "
    "--decoder-num-layers 1",
    "learned": f"{_PLAIN} --position-embedding-type learned_absolute {_TIED} --norm-placement both --embed-layernorm",
    "experts": f"{_PLAIN} {_RELATIVE} --num-experts 4 --moe-layer-freq 2 --moe-aux-loss-coeff 0.01 --moe-ffn-hidden-size 16",
}
LAYOUTS = {
    "--dp 2 --use-distributed-optimizer": 2,
    "--tp 2": 2,
    "--tp 2 --sequence-parallel": 2,
    "--cp 2": 2,
    "--cp 2 --cp-comm-type a2a": 2,
    "--cp 2 --cp-comm-type all_gather": 2,
    "--pp 2": 2,
    "--pp 2 --encoder-pipeline-model-parallel-size 1": 2,
    "--pp 2 --num-virtual-stages-per-pipeline-rank 2": 2,
    "--pp 2 --pipeline-schedule zb-v": 2,
    "--dp 2 --data-parallel-sharding-strategy optim_grads_params": 2,
    "--recompute-granularity selective": 1,
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": 1,
    "--pp 4": 4,
    "--pp 4 --pipeline-model-parallel-layout E|tt|tt|L": 4,
    "--tp 2 --sequence-parallel --cp 2": 4,
    "--pp 2 --tp 2 --sequence-parallel": 4,
}
AT_ONCE = {
    "t5": ("--tp 2 --sequence-parallel", "--cp 2", "--pp 2 --num-virtual-stages-per-pipeline-rank 2"),
    "gated": ("--cp 2 --cp-comm-type a2a", "--dp 2 --data-parallel-sharding-strategy optim_grads_params"),
    "rotary": ("--tp 2", "--recompute-granularity selective"),
    "learned": ("--pp 2 --encoder-pipeline-model-parallel-size 1",),
    "experts": ("--pp 2",),
}
"""The layouts of the default suite."""


@diagonal(3)
@pytest.mark.parametrize(
    ("model", "layout"),
    [(model, layout) if layout in AT_ONCE[model] else later(model, layout) for model in MODELS for layout in LAYOUTS],
)
def test_every_layout_trains_the_same_encoder_decoder(ranks: RankPool, model: str, layout: str):
    check_layout(ranks, layout, MODELS[model], world_size=LAYOUTS[layout])


PARTS = {
    "the factor on scores": "--softmax-scale 0.5",
    "biases of relative positions": "--relative-attention-num-buckets 6",
    "how far they reach": "--relative-attention-max-distance 5",
    "layers of the decoder": "--encoder-num-layers 3 --decoder-num-layers 1",
    "the scale of the tied head": "--logits-scaling 6",
}


@pytest.mark.parametrize("part", PARTS)
def test_what_an_encoder_decoder_has_is_trained(part: str):
    check_part_of_model(MODELS["t5"], f"{MODELS['t5']} {PARTS[part]}")


def test_padding_of_the_decoder_changes_nothing():
    longer = MODELS["t5"].replace("--decoder-seq-length 12", "--decoder-seq-length 16")
    bounds = Tolerances(loss=1e-9, gradient=1e-9, parameter=1e-9)
    verdict = compare_traces([reference(MODELS["t5"], "float64")], [reference(longer, "float64")], bounds)
    assert verdict.agrees, verdict.first_departure


REFUSED = {
    "--encoder-num-layers 2 --decoder-num-layers 2 --num-layers 3": (
        "t5",
        "is not the 2 layers of the encoder and 2 of the decoder",
    ),
    "--num-layers 4": ("t5", "is not set, and --model-type t5 has two stacks of layers"),
    "--encoder-num-layers 2 --multi-latent-attention": (
        "t5",
        "has cross-attention, for which there is no --multi-latent-attention",
    ),
    "--encoder-num-layers 2 --norm-placement post": ("t5", "no norm left for the end of a decoder"),
    "--encoder-num-layers 2 --mtp-num-layers 1": ("t5", "is for the decoder, and --model-type is t5"),
    "--num-layers 2 --position-embedding-type relative": (
        "decoder",
        "has a table for each stack of an encoder-decoder",
    ),
    f"--encoder-num-layers 2 {_RELATIVE_FLAG} --relative-attention-num-buckets 7": (
        "t5",
        "7 is odd, and half of them",
    ),
    f"--encoder-num-layers 2 {_RELATIVE_FLAG} --relative-attention-max-distance 16": (
        "t5",
        "has no distances for the wide ones",
    ),
    "--encoder-num-layers 2 --decoder-seq-length 30 --cp 4": (
        "t5",
        "--decoder-seq-length 30 is not a multiple of 2 x",
    ),
    "--encoder-num-layers 2 --pp 2 --encoder-pipeline-model-parallel-size 2": ("t5", "leaves no stage for the decoder"),
    "--encoder-num-layers 3 --pp 4 --encoder-pipeline-model-parallel-size 2": ("t5", "which they cannot share evenly"),
    "--encoder-num-layers 2 --pp 2 --encoder-pipeline-model-parallel-size 1 --num-virtual-stages-per-pipeline-rank 2": (
        "t5",
        "gives ranks to the encoder alone",
    ),
    "--encoder-num-layers 2 --pp 2 --encoder-pipeline-model-parallel-size 1 --account-for-loss-in-pipeline-split": (
        "t5",
        "cannot be combined with --encoder-pipeline",
    ),
    "--encoder-num-layers 2 --decoder-seq-length 300 --max-position-embeddings 200": (
        "t5",
        "is shorter than --decoder-seq-length 300",
    ),
    "--encoder-num-layers 2 --objective preference": ("t5", "is about text that a decoder continues"),
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_an_encoder_decoder_cannot_be_is_refused_before_it_trains(flags: str):
    model, message = REFUSED[flags]
    argv = f"--model-type {model} --hidden-size 32 --num-attention-heads 4 --seq-length 64 --vocab-size 128 --mock-data --lr 1e-3"
    argv += f" --train-iters 1 {flags}"
    world_size = 1 if "--pp" not in flags and "--cp" not in flags else 4
    with pytest.raises(ConfigError, match=message):
        load_config(argv.split(), world_size=world_size)


def test_a_checkpoint_resumes_in_another_layout(ranks: RankPool, tmp_path: Path):
    tensors = ("encoder_bias.weight", "decoder_bias.weight", "encoder_norm.weight", "layers.2.cross_attention.k.weight")
    check_resume(ranks, tmp_path, MODELS["t5"], "--pp 2", world_size=2, tensors=tensors)
