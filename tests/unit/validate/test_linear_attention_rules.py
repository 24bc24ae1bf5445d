"""Which layers are gated delta nets, and every rule about them."""

from __future__ import annotations

import shlex

import pytest

from petatron.config.schema.attention_layer_freq import linear_layers
from petatron.config.schema.model import ModelConfig
from petatron.config.schema.model_identity import identity_differences, model_identity
from petatron.layers.attention import AttentionSpec
from petatron.layers.ssm.gated_delta_net import GatedDeltaNetSpec
from petatron.models.registry import model_spec
from petatron.validate import load_config
from tests.unit.validate.test_config_rules import problems_of

BASE = shlex.split(
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --vocab-size 90 --mock-data --lr 1e-3 --train-iters 2 "
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8"
)
VARIANT = "--experimental-attention-variant gated_delta_net"
DELTA = f"{VARIANT} --linear-attention-freq 4"
LIGHTNING = "--experimental-attention-variant lightning_attention --linear-attention-freq 4"


def run_of(flags: str):
    return load_config([*BASE, *flags.split()]).config


def test_a_number_leaves_every_nth_layer_to_attention():
    layers = model_spec(run_of(DELTA)).layers
    assert [type(layer.mixer) for layer in layers] == [GatedDeltaNetSpec] * 3 + [AttentionSpec]
    assert all(layer.channel_mixer is not None for layer in layers)
    assert linear_layers(run_of(f"{VARIANT} --linear-attention-freq [0,1]*2").model) == (False, True, False, True)
    assert linear_layers(ModelConfig(num_layers=2)) == (False, False)


def test_sizes_are_those_of_the_flags():
    net = (
        model_spec(run_of(f"{DELTA} --linear-conv-kernel-dim 3 --linear-value-head-dim 6 --linear-chunk-size 16"))
        .layers[0]
        .mixer
    )
    assert isinstance(net, GatedDeltaNetSpec)
    sizes = net.num_key_heads, net.num_value_heads, net.key_head_dim, net.value_head_dim, net.conv_width, net.chunk_size
    assert sizes == (2, 4, 8, 6, 3, 16)


ONE_PROBLEM = [
    (
        "--linear-attention-freq 4",
        "--linear-attention-freq 4 says which layers have linear attention, but there is no --experimental-attention-variant of that "
        "kind. "
        "Add --experimental-attention-variant gated_delta_net or kimi_delta_attention or lightning_attention, or leave it out.",
    ),
    (
        VARIANT,
        "--experimental-attention-variant gated_delta_net needs to know which layers it is for. "
        "Give --linear-attention-freq: 4 is three such layers before each one of attention.",
    ),
    (
        f"{DELTA} --hybrid-layer-pattern G-*-",
        "--experimental-attention-variant gated_delta_net and --hybrid-layer-pattern, where G is a gated delta net, both say which "
        "layers have one. Leave one out.",
    ),
    (
        f"{VARIANT} --linear-attention-freq 0",
        "--linear-attention-freq 0 is below 1. Give a number, or one 0 or 1 per layer such as ([1]*3+[0])*8.",
    ),
    (f"{DELTA} --linear-key-head-dim 0", "--linear-key-head-dim 0 is below 1. Use 1 or more."),
    (f"{DELTA} --linear-conv-kernel-dim 1", "--linear-conv-kernel-dim 1 is below 2. Use 2 or more."),
    (
        f"{DELTA} --linear-num-key-heads 3",
        "--linear-num-value-heads 4 is not a multiple of --linear-num-key-heads 3. Nearest: 3 or 6.",
    ),
    (
        f"{DELTA} --tp 8",
        "--tensor-model-parallel-size 8 does not divide --linear-num-value-heads 4. Use 1, 2, 4.",
    ),
    (
        f"{DELTA} --linear-num-key-heads 6 --linear-num-value-heads 12 --tp 4",
        "--tensor-model-parallel-size 4 is neither a multiple nor a divisor of --linear-num-key-heads 6. Use 1, 2, 3, 6, 12.",
    ),
    (
        f"{DELTA} --seq-length 8 --cp 4",
        "--context-parallel-size 4 leaves a rank 2 tokens, fewer than the 3 that the convolution of the next one sees. "
        "Use --seq-length 16 or more.",
    ),
    (
        "--attention-output-gate --multi-latent-attention --position-embedding-type rope",
        "--attention-output-gate True cannot be combined with --multi-latent-attention. Leave one out.",
    ),
]


@pytest.mark.parametrize(("flags", "message"), ONE_PROBLEM)
def test_each_rule_and_nothing_else(flags: str, message: str):
    assert problems_of(flags, base=BASE) == [message]


def test_other_variants_are_refused():
    (problem,) = problems_of("--experimental-attention-variant mamba", base=BASE)
    assert problem.startswith(
        "--experimental-attention-variant mamba is not one of gated_delta_net, kimi_delta_attention, lightning_attention or dsa"
    )


@pytest.mark.parametrize(
    ("flags", "notice"),
    [
        ("--linear-value-head-dim 6", "--linear-value-head-dim has no effect: no layer is a gated delta net"),
        ("--linear-chunk-size 6", "--linear-chunk-size has no effect: no layer has linear attention"),
        (
            f"{LIGHTNING} --linear-conv-kernel-dim 3",
            "--linear-conv-kernel-dim has no effect: no layer is a gated delta net",
        ),
        (
            f"{LIGHTNING} --mlp-stream-multiplier 2",
            "--mlp-stream-multiplier has no effect: it is for --norm-placement stream",
        ),
        (
            f"{DELTA} --lightning-out-multiplier 2",
            "--lightning-out-multiplier has no effect: no layer is lightning attention",
        ),
        (
            "--recompute-granularity selective --recompute-modules delta",
            "--recompute-modules delta has no effect: no layer is a gated delta net",
        ),
        (
            "--hybrid-layer-pattern GG-- --attention-output-gate",
            "--attention-output-gate has no effect: no layer is attention",
        ),
    ],
)
def test_what_has_no_effect_is_said(flags: str, notice: str):
    assert notice in load_config([*BASE, *flags.split()]).notices


def test_the_norm_of_a_delta_net_is_compiled():
    flags = "--no-compile --normalization RMSNorm --swiglu"
    assert any("--no-compile has no effect" in notice for notice in load_config([*BASE, *flags.split()]).notices)
    assert not any("--no-compile" in notice for notice in load_config([*BASE, *flags.split(), *DELTA.split()]).notices)


def test_sizes_and_places_are_the_model_and_chunks_are_not():
    run = run_of(DELTA)
    identity = model_identity(run.model, run.moe)
    other = run_of(f"{VARIANT} --linear-attention-freq [1]*3+[0] --linear-chunk-size 7")
    assert identity_differences(identity, model_identity(other.model, other.moe)) == []
    for flags, names in (
        (f"{DELTA} --linear-key-head-dim 6", ["linear_key_head_dim"]),
        (f"{VARIANT} --linear-attention-freq 2", ["linear_attention_freq"]),
        (f"{DELTA} --attention-output-gate", ["attention_output_gate"]),
        ("", ["experimental_attention_variant", "linear_attention_freq"]),
    ):
        changed = run_of(flags)
        assert identity_differences(identity, model_identity(changed.model, changed.moe)) == names
