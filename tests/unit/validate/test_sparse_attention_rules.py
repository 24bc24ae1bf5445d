"""Every rule of sparse attention, and what becomes of Megatron's flags about it."""

from __future__ import annotations

import shlex

import pytest

from petatron.config.schema.sections.sparse_attention import SPARSE_ATTENTION_FIELDS
from petatron.layers.sparse_mla import SparseMlaSpec
from petatron.models.registry import model_spec
from petatron.validate import load_config
from tests.unit.validate.test_config_rules import problems_of

BASE = shlex.split(
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --vocab-size 90 --mock-data --lr 1e-3 --train-iters 2 "
    "--position-embedding-type rope --attention-dropout 0"
)
LATENT = "--multi-latent-attention --qk-pos-emb-head-dim 8"
DSA = f"{LATENT} --experimental-attention-variant dsa --dsa-indexer-head-dim 16"

ONE_PROBLEM = [
    (
        "--experimental-attention-variant dsa --dsa-indexer-head-dim 64",
        "--experimental-attention-variant dsa chooses latents, and there is no --multi-latent-attention. Add it, or leave the variant out.",
    ),
    (
        f"{DSA} --attention-dropout 0.1",
        "--attention-dropout 0.1 drops weights of attention, which --experimental-attention-variant dsa does not. "
        "Use --attention-dropout 0.",
    ),
    (
        f"{DSA} --hybrid-layer-pattern *-*-",
        "--experimental-attention-variant dsa is for every layer of a decoder, and those of --hybrid-layer-pattern are of several kinds. "
        "Leave one out.",
    ),
    (
        f"{DSA} --dsa-indexer-head-dim 4",
        "--dsa-indexer-head-dim 4 is narrower than the --qk-pos-emb-head-dim 8 that rope rotates of a head. Use 8 or more.",
    ),
    (
        f"{DSA} --dsa-indexer-head-dim 24",
        "--dsa-indexer-head-dim 24 is no power of two, the width of a Hadamard matrix. Use 32, or "
        "--no-dsa-indexer-rotate-activation, which leaves scores as they are.",
    ),
    (
        f"{DSA} --cp 2",
        "--cp-comm-type p2p leaves keys where they are, and --experimental-attention-variant dsa chooses among those of all ranks. "
        "Use --cp-comm-type all_gather.",
    ),
    (f"{DSA} --dsa-indexer-topk 0", "--dsa-indexer-topk 0 is below 1. Use 1 or more."),
    (f"{DSA} --dsa-indexer-n-heads 0", "--dsa-indexer-n-heads 0 is below 1. Use 1 or more."),
    (
        f"{DSA} --linear-attention-freq 4",
        "--linear-attention-freq 4 says which layers have linear attention, but there is no --experimental-attention-variant of that kind. "
        "Add --experimental-attention-variant gated_delta_net or kimi_delta_attention or lightning_attention, or leave it out.",
    ),
]


@pytest.mark.parametrize(("flags", "message"), ONE_PROBLEM)
def test_each_rule_and_nothing_else(flags: str, message: str):
    assert problems_of(flags, base=BASE) == [message]


def test_problems_come_at_once():
    flags = f"{DSA} --dsa-indexer-head-dim 6 --attention-dropout 0.1 --cp 2"
    assert len(problems_of(flags, base=BASE)) == 4


def test_widths_that_are_no_power_of_two_need_no_rotation():
    run = load_config([*BASE, *f"{DSA} --dsa-indexer-head-dim 24 --disable-dsa-indexer-rotate-activation".split()])
    mixer = model_spec(run.config).layers[0].mixer
    assert isinstance(mixer, SparseMlaSpec) and not mixer.indexer.rotates and mixer.indexer.head_dim == 24


def test_settings_are_those_of_every_layer():
    flags = (
        f"{DSA} --dsa-indexer-n-heads 3 --dsa-indexer-topk 7 --dsa-indexer-loss-coeff 0.01 --dsa-indexer-use-sparse-loss "
        "--dsa-indexer-rope-interleaved --disable-dsa-indexer-scoring-relu --dsa-indexer-k-norm-epsilon 1e-6 --mtp-num-layers 1"
    )
    layers = model_spec(load_config([*BASE, *flags.split()]).config).layers
    assert len(layers) == 5
    for layer in layers:
        assert isinstance(layer.mixer, SparseMlaSpec)
        index = layer.mixer.indexer
        sizes = index.num_heads, index.head_dim, index.topk, index.loss_coeff, index.sparse_loss, index.k_norm.eps
        assert sizes == (3, 16, 7, 0.01, True, 1e-6) and index.rope_interleaved and not index.relu and index.rotates


@pytest.mark.parametrize(
    "flag", ["--dsa-indexer-topk 7", "--dsa-indexer-loss-coeff 0.1", "--disable-dsa-indexer-scoring-relu"]
)
def test_without_the_variant_they_have_no_effect(flag: str):
    notices = load_config([*BASE, *f"{LATENT} {flag}".split()]).notices
    assert any("has no effect: it is for --experimental-attention-variant dsa" in str(notice) for notice in notices)


def test_the_form_of_a_loss_that_there_is_not():
    notices = load_config([*BASE, *f"{DSA} --dsa-indexer-use-sparse-loss".split()]).notices
    assert any("--dsa-indexer-use-sparse-loss has no effect: --dsa-indexer-loss-coeff is 0" in str(n) for n in notices)


def test_megatrons_other_flags():
    accepted = "--dsa-indexer-k-norm-fp32 --dsa-kernel-backend cudnn --dsa-indexer-topk-freq 1 --dsa-indexer-skip-topk-offset 3"
    notices = " ".join(map(str, load_config([*BASE, *f"{DSA} {accepted}".split()]).notices))
    assert "norms are always computed in fp32" in notices and "kernels are not chosen by flags" in notices
    [problem] = problems_of(f"{DSA} --dsa-indexer-topk-freq 4", base=BASE)
    assert "an indexer that several layers share" in problem and "Use 1" in problem


def test_settings_of_the_section_are_all_there():
    assert len(SPARSE_ATTENTION_FIELDS) == 9 and all(
        name.startswith("dsa_indexer_") for name in SPARSE_ATTENTION_FIELDS
    )
