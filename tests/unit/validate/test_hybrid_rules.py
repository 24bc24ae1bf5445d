"""Patterns of hybrid models: what they mean, what ratios give, and every rule about them."""

from __future__ import annotations

import shlex

import pytest

from petatron.config.pipeline_stages import pipeline_stages
from petatron.config.schema.model_identity import identity_differences, model_identity
from petatron.config.schema.sections.hybrid import allocate_layers
from petatron.layers.attention import AttentionSpec
from petatron.layers.mlp import MLPSpec
from petatron.layers.moe.moe_layer import MoESpec
from petatron.layers.ssm.gated_delta_net import GatedDeltaNetSpec
from petatron.layers.ssm.mamba2 import Mamba2Spec
from petatron.models.registry import model_spec
from petatron.validate import load_config
from tests.unit.validate.test_config_rules import problems_of

BASE = shlex.split(
    "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 90 --mock-data --lr 1e-3 --train-iters 2 "
    "--mamba-head-dim 16 --mamba-num-groups 2"
)
PATTERN = "--hybrid-layer-pattern"


def run_of(flags: str, **options):
    return load_config([*BASE, *flags.split()], **options).config


def test_a_pattern_is_the_layers_of_the_model():
    run = run_of(f"{PATTERN} M*-EG --num-experts 4")
    layers = model_spec(run).layers
    assert run.model.num_layers == 5 and run.model.is_hybrid_model
    assert [[type(branch) for branch in layer.branches] for layer in layers] == [
        [Mamba2Spec], [AttentionSpec], [MLPSpec], [MoESpec], [GatedDeltaNetSpec],
    ]  # fmt: skip
    assert model_spec(run).moe_layers == (3,)
    beside = model_spec(run_of(f"{PATTERN} P-")).layers[0]
    assert [type(branch) for branch in beside.branches] == [AttentionSpec, Mamba2Spec]
    assert beside.residual_branches == "parallel_shared_norm" and beside.input_norms == ("attention",)
    assert run_of("--hybrid-override-pattern M*- --num-layers 3").model.hybrid_layer_pattern == "M*-"


def test_depths_of_a_pattern():
    flags = "--position-embedding-type none"
    for text in (f"{PATTERN} M*/-G/-G", f"{PATTERN} M* --mtp-hybrid-override-pattern -G --mtp-num-layers 2"):
        run = run_of(f"{text} {flags}")
        model = run.model
        assert (model.hybrid_layer_pattern, model.num_layers) == ("M*", 2)
        assert (model.mtp_hybrid_override_pattern, model.mtp_num_layers) == ("-G", 2)
        depths = model_spec(run).layers[2:]
        assert [[type(branch) for branch in layer.branches] for layer in depths] == [[MLPSpec], [GatedDeltaNetSpec]] * 2
    shared = run_of(f"{PATTERN} M*/-G/-G --mtp-use-repeated-layer {flags}")
    assert [layer.runs for layer in model_spec(shared).layers] == [1, 1, 2, 2]
    staged = run_of(f"{PATTERN} M|*/-/- --pp 2 {flags}")
    assert [stage.layer_indices for stage in pipeline_stages(staged)] == [(0,), (1, 2, 3)]


def test_all_problems_of_depths_are_told_at_once():
    problems = problems_of(f"{PATTERN} MX/M*//*|/ME --mtp-num-layers 3 --position-embedding-type none", base=BASE)
    rules = (
        "a / without layers",
        "a | after a /",
        "different layers, M* and *| and ME",
        "says 4",
        "'X', which is no kind",
    )
    assert len(problems) == 5 and all(rule in problem for rule, problem in zip(rules, problems))


def test_every_kind_of_layer_continues_prompts(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("hello")
    flags = f"--sample-prompts {file} --sample-interval 2 --tokenizer-type ByteTokenizer --vocab-size 300"
    assert problems_of(f"{PATTERN} M*- {flags}", base=BASE) == []


def test_sizes_that_follow():
    model = run_of(f"{PATTERN} MM").model
    assert (model.mamba_num_heads, model.mamba_norm_groups) == (8, 2)
    model = run_of(f"{PATTERN} MM --mamba-num-heads 6 --mamba-norm-groups 1").model
    assert (model.mamba_num_heads, model.mamba_norm_groups) == (6, 1)


@pytest.mark.parametrize(
    ("layers", "attention", "mlp", "pattern"),
    [
        (56, 0.08, 0.5, "M-M-M--M-M*-M-M-M-M--M*-M-M-M-M-M*--M-M-M-M-M*-M--M-M-M-"),  # NVIDIA's 8B hybrid
        (9, 1 / 9, 4 / 9, "M-M-*M-M-"),
        (4, 0.0, 0.5, "M-M-"),
        (5, 0.0, 0.0, "MMMMM"),
        (3, 1.0, 0.0, "***"),
        (4, 0.0, 1.0, "----"),
    ],
)
def test_ratios_are_allocated_as_in_megatron(layers: int, attention: float, mlp: float, pattern: str):
    assert allocate_layers(layers, attention, mlp) == pattern
    flags = f"--num-layers {layers} --is-hybrid-model --hybrid-attention-ratio {attention} --hybrid-mlp-ratio {mlp}"
    assert run_of(flags).model.hybrid_layer_pattern == pattern


def test_a_model_without_attention_needs_no_heads():
    flags = [word for word in BASE if word not in ("--num-attention-heads", "4")]
    run = load_config([*flags, "--is-hybrid-model", "--num-layers", "2"]).config
    assert run.model.hybrid_layer_pattern == "MM" and run.model.num_attention_heads == 0
    assert problems_of(f"{PATTERN} M*", base=flags) == [
        "--num-attention-heads is not set. Give a positive number, or start from a preset such as --preset llama3-8b."
    ]


ONE_PROBLEM = [
    (
        f"{PATTERN} MX-",
        "--hybrid-layer-pattern MX- has 'X', which is no kind of layer. "
        "Write one of M G * - E P (Mamba-2, gated delta net, attention, MLP, experts, attention and Mamba-2 in parallel) for each layer.",
    ),
    (
        f"{PATTERN} M*|M-|M --pp 2",
        "--hybrid-layer-pattern M*|M-|M has 3 stages, which is not a multiple of --pipeline-model-parallel-size 2. Use 2 or 4 "
        "stages; | ends a stage.",
    ),
    (
        f"{PATTERN} MM/M*/** --position-embedding-type none",
        "--hybrid-layer-pattern MM/M*/** has depths of different layers, M* and **, and all depths have the same. "
        "Write the same layers after each /.",
    ),
    (
        f"{PATTERN} MM/M*/ --position-embedding-type none",
        "--hybrid-layer-pattern MM/M*/ has a / without layers after it. "
        "Write the layers of one depth of multi-token prediction after each /.",
    ),
    (
        f"{PATTERN} /M* --num-layers 2 --position-embedding-type none",
        "--hybrid-layer-pattern /M* has no layers before its first /. Write the model's own layers there.",
    ),
    (
        f"{PATTERN} MM/M|* --position-embedding-type none",
        "--hybrid-layer-pattern MM/M|* has a | after a /, and depths of multi-token prediction are on the last stage, with the loss. "
        "Write | among the layers before the first / only.",
    ),
    (
        f"{PATTERN} MM/M*/M* --mtp-num-layers 1 --position-embedding-type none",
        "--mtp-num-layers 1 contradicts --hybrid-layer-pattern MM/M*/M*, which says 2. Leave it out.",
    ),
    (
        f"{PATTERN} MM/M* --mtp-hybrid-override-pattern ** --position-embedding-type none",
        "--mtp-hybrid-override-pattern ** contradicts --hybrid-layer-pattern MM/M*, which says M*. Leave it out.",
    ),
    (
        f"{PATTERN} MM --mtp-num-layers 2 --mtp-hybrid-override-pattern MX --position-embedding-type none",
        "--mtp-hybrid-override-pattern MX has 'X', which is no kind of layer. "
        "Write one of M G * - E P (Mamba-2, gated delta net, attention, MLP, experts, attention and Mamba-2 in parallel) for each layer.",
    ),
    (
        f"{PATTERN} MM/ME --position-embedding-type none",
        "--mtp-hybrid-override-pattern ME has layers of experts (E), but no --num-experts. Give it.",
    ),
    (
        f"{PATTERN}= --num-layers 2",
        "--hybrid-layer-pattern '' has no layers. "
        "Write one of M G * - E P (Mamba-2, gated delta net, attention, MLP, experts, attention and Mamba-2 in parallel) for each layer.",
    ),
    (
        f"{PATTERN} MM --num-layers 3",
        "--hybrid-layer-pattern MM is a pattern of 2 layers, but --num-layers is 3. Use --num-layers 2, or write one symbol per layer.",
    ),
    (
        "--num-layers 4 --hybrid-attention-ratio 0.6 --hybrid-mlp-ratio 0.5",
        "--hybrid-attention-ratio 0.6 and --hybrid-mlp-ratio 0.5 leave no layer for Mamba-2: they add up to 1.1. "
        "Use ratios whose sum is at most 1.",
    ),
    (
        f"{PATTERN} M* --hybrid-attention-ratio 0.25",
        "--hybrid-attention-ratio 0.25 gives 0 of 2 layers to attention, but --hybrid-layer-pattern M* has 1. Leave one out.",
    ),
    (
        f"{PATTERN} M- --no-is-hybrid-model",
        "--is-hybrid-model is turned off, but --hybrid-layer-pattern is set. Leave one out.",
    ),
    (
        f"{PATTERN} M- --residual-branches parallel",
        "--residual-branches parallel needs layers with two branches, and those of --hybrid-layer-pattern have one. Use sequential.",
    ),
    (
        f"{PATTERN} M- --mtp-num-layers 1 --position-embedding-type none",
        "--mtp-num-layers 1 needs the layers of a depth, which no layer of --hybrid-layer-pattern is by itself: each has one branch. "
        "Give --mtp-hybrid-override-pattern, for instance *-, or write them after a / for each depth.",
    ),
    (
        f"{PATTERN} P- --norm-placement both",
        "--norm-placement both puts norms after branches, and the two of a P in --hybrid-layer-pattern share the one before them. Use pre.",
    ),
    (
        f"{PATTERN} P- --ssm-multipliers 1 2",
        "--ssm-multipliers 1 2 is not 5 positive numbers. Give one each for z, x, B, C, dt.",
    ),
    (
        f"{PATTERN} P- --mlp-multipliers 1 0",
        "--mlp-multipliers 1 0 is not 2 positive numbers. Give one each for the gate, the output.",
    ),
    (
        f"{PATTERN} P- --mlp-multipliers 2 1",
        "--mlp-multipliers 2 begins with a factor on gates, but --activation is gelu. Use --swiglu, or begin with 1.",
    ),
    (f"{PATTERN} P- --key-multiplier 0", "--key-multiplier 0.0 is not above 0. Use a number above 0."),
    (f"{PATTERN} ME", "--hybrid-layer-pattern ME has layers of experts (E), but no --num-experts. Give it."),
    (
        f"{PATTERN} M- --num-experts 2",
        "--num-experts 2 has no place in --hybrid-layer-pattern M-, where E is a layer of experts. Leave it out, or write an E.",
    ),
    (f"{PATTERN} MM --mamba-state-dim 0", "--mamba-state-dim 0 is below 1. Use 1 or more."),
    (f"{PATTERN} MM --mamba-chunk-size 0", "--mamba-chunk-size 0 is below 1. Use 1 or more."),
    (
        f"{PATTERN} MM --mamba-head-dim 48",
        "--mamba-head-dim 48 does not divide 2 x --hidden-size 64, and --mamba-num-heads is not set. "
        "Use a divisor, or set --mamba-num-heads.",
    ),
    (
        f"{PATTERN} MM --mamba-num-groups 3",
        "--mamba-num-groups 3 does not divide --mamba-num-heads 8. Use 1, 2, 4 or 8.",
    ),
    (
        f"{PATTERN} MM --mamba-num-groups 4 --mamba-norm-groups 2",
        "--mamba-norm-groups 2 is neither 1 nor --mamba-num-groups 4. Use one of them.",
    ),
    (
        f"{PATTERN} MM --mamba-num-heads 6 --tp 4",
        "--tensor-model-parallel-size 4 does not divide --mamba-num-heads 6. Use 1, 2, 6.",
    ),
    (
        f"{PATTERN} MM --num-attention-heads 12 --kv-channels 8 --mamba-num-heads 12 --mamba-num-groups 4 --tp 6 --ffn-hidden-size 96",
        "--tensor-model-parallel-size 6 is neither a multiple nor a divisor of --mamba-num-groups 4. Use 1, 2, 4, 12.",
    ),
    (
        f"{PATTERN} MM --seq-length 8 --cp 4",
        "--context-parallel-size 4 leaves a rank 2 tokens, fewer than the 3 that the convolution of the next one sees. "
        "Use --seq-length 16 or more.",
    ),
]


@pytest.mark.parametrize(("flags", "message"), ONE_PROBLEM)
def test_each_rule_and_nothing_else(flags: str, message: str):
    assert problems_of(flags, base=BASE) == [message]


@pytest.mark.parametrize(
    ("flags", "notices"),
    [
        ("--num-layers 2 --mamba-state-dim 16", {"--mamba-state-dim has no effect: no layer is Mamba-2"}),
        (
            f"{PATTERN} MM --ffn-hidden-size 32 --window-size 4",
            {
                "--num-attention-heads has no effect: no layer is attention",
                "--window-size has no effect: no layer is attention",
                "--ffn-hidden-size has no effect: no layer is an MLP",
            },
        ),
        (
            f"{PATTERN} ** --ssm-out-multiplier 2 --mamba-gated-norm none --mlp-multipliers 1 2",
            {
                "--ssm-out-multiplier has no effect: no layer is Mamba-2",
                "--mamba-gated-norm has no effect: no layer is Mamba-2",
                "--mlp-multipliers has no effect: no layer is an MLP",
            },
        ),
        (
            f"{PATTERN} M*-- --mamba-gated-norm none --mamba-norm-groups 1",
            {"--mamba-norm-groups has no effect: --mamba-gated-norm none has no norm"},
        ),
        (f"{PATTERN} PP --recompute-granularity selective --recompute-modules mamba core_attn", set()),
        (
            f"{PATTERN} MM --recompute-granularity selective --recompute-modules mamba core_attn",
            {
                "--num-attention-heads has no effect: no layer is attention",
                "--recompute-modules core_attn has no effect: no layer is attention",
            },
        ),
        (
            "--num-layers 2 --recompute-granularity selective --recompute-modules mamba",
            {"--recompute-modules mamba has no effect: no layer is Mamba-2"},
        ),
        (
            f"{PATTERN} E* --num-experts 2 --moe-layer-freq 2",
            {"--moe-layer-freq has no effect: --hybrid-layer-pattern says which layers have experts"},
        ),
    ],
)
def test_what_has_no_effect_is_said(flags: str, notices: set[str]):
    expected = {notice for notice in load_config([*BASE, *flags.split()]).notices if "mamba-head" not in notice}
    expected = {notice for notice in expected if "mamba-num-groups" not in notice}
    assert expected == notices


def test_which_settings_make_another_model():
    run = run_of(f"{PATTERN} M-M*")
    ours = model_identity(run.model, None)
    plain = model_identity(run_of("--num-layers 4").model, None)
    assert not any(name.startswith(("mamba_", "hybrid_")) for name in plain)
    assert identity_differences(ours, ours) == []
    assert "hybrid_layer_pattern" in identity_differences(plain, ours) + identity_differences(ours, plain)
    same = model_identity(run_of(f"{PATTERN} M-M* --mamba-chunk-size 16").model, None)
    assert identity_differences(same, ours) == []
    for flags, name in (
        ("--mamba-state-dim 16", "mamba_state_dim"),
        ("--mamba-norm-groups 1", "mamba_norm_groups"),
        ("--mamba-gated-norm none", "mamba_gated_norm"),
        ("--ssm-multipliers 1 1 1 1 2", "ssm_multipliers"),
    ):
        assert identity_differences(model_identity(run_of(f"{PATTERN} M-M* {flags}").model, None), ours) == [name]
