"""Mamba-2 is the equation of the paper: against plain PyTorch, against transformers, and counted by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.estimate.flops import flops_formula, model_flops_per_token, parameter_count
from petatron.layers.ssm.initial_values import LogDecayValues, StepBiasValues
from petatron.layers.ssm.mamba2 import Mamba2Spec
from petatron.models.registry import model_spec
from petatron.sharding.initial_values import UniformValues
from tests.unit.layers.ssm.mixer_checks import (
    B,
    D,
    S,
    check_forward_flops,
    check_outputs_and_gradients,
    check_packed_documents,
    check_transformers_module,
    mixer_of,
    plain_conv,
    run_of,
    shard,
)

H, P, G, N, W = 4, 8, 2, 6, 4
INNER = H * P
MAMBA = (
    f"--hybrid-layer-pattern MM --mamba-state-dim {N} --mamba-head-dim {P} --mamba-num-groups {G} --mamba-chunk-size 4"
)


def plain_mamba2(x_SBD: Tensor, weights: dict[str, Tensor], spec: Mamba2Spec) -> Tensor:
    """Token by token, head by head."""
    rows = x_SBD @ weights["in_proj.weight"].T
    factors = zip(rows.split((INNER, INNER, G * N, G * N, H), dim=-1), spec.multipliers or (1.0,) * 5)
    z, *of_channels, dt = (part * factor for part, factor in factors)
    channels = torch.cat(of_channels, dim=-1)
    conv = plain_conv(channels, weights["conv.weight"], weights["conv.bias"])
    x, B_states, C_states = conv.split((INNER, G * N, G * N), dim=-1)
    steps = F.softplus(dt + weights["dt_bias"])
    outputs = []
    for head in range(H):
        group, columns = head // (H // G), slice(head * P, (head + 1) * P)
        states = slice(group * N, (group + 1) * N)
        state = x.new_zeros(B, P, N)
        of_head = []
        for token in range(S):
            step, own = steps[token, :, head, None, None], x[token, :, columns]
            decay = torch.exp(-step * weights["A_log"][head].exp())
            state = decay * state + step * own[:, :, None] * B_states[token, :, None, states]
            of_head.append((state * C_states[token, :, None, states]).sum(-1) + weights["D"][head] * own)
        outputs.append(torch.stack(of_head))
    return plain_gate(torch.cat(outputs, dim=-1), F.silu(z), weights, spec) @ weights["out_proj.weight"].T


def plain_gate(y: Tensor, gate: Tensor, weights: dict[str, Tensor], spec: Mamba2Spec) -> Tensor:
    def norm(x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (spec.norm_groups, -1))
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + spec.norm_eps)
        return normed.flatten(-2) * weights["norm.weight"]

    if spec.output_gate == "none":
        return y * gate
    return norm(y) * gate if spec.output_gate == "norm_then_gate" else norm(y * gate)


FACTORS = "--ssm-in-multiplier 1.2 --ssm-multipliers 0.7 0.8 1.3 0.6 1.1"


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--mamba-norm-groups 1",
        f"--mamba-gated-norm none {FACTORS}",
        "--mamba-gated-norm norm_then_gate",
        f"--mamba-gated-norm norm_then_gate --mamba-norm-groups 1 {FACTORS}",
    ],
)
def test_outputs_and_gradients_are_those_of_plain_pytorch(flags: str):
    spec = mixer_of(Mamba2Spec, f"{MAMBA} {flags}")
    check_outputs_and_gradients(spec, lambda x, weights: plain_mamba2(x, weights, spec))


def test_packed_documents_are_documents_by_themselves():
    check_packed_documents(mixer_of(Mamba2Spec, MAMBA))


def test_it_is_the_mixer_of_transformers():
    transformers = pytest.importorskip("transformers")
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = transformers.Mamba2Config(
        hidden_size=D, num_heads=H, head_dim=P, expand=2, state_size=N, n_groups=G, conv_kernel=W, chunk_size=4,
        layer_norm_epsilon=1e-5, num_hidden_layers=1, use_bias=False, use_conv_bias=True,
    )  # fmt: skip
    spec = mixer_of(Mamba2Spec, f"{MAMBA} --mamba-norm-groups 1")
    check_transformers_module(
        Mamba2Mixer(config, 0), spec, lambda ours: {name.replace("conv", "conv1d"): x for name, x in ours.items()}
    )


def test_parameters_and_flops_by_hand():
    spec = model_spec(run_of(MAMBA))
    gemms = D * (2 * INNER + 2 * G * N + H) + INNER * D
    channels = INNER + 2 * G * N
    others = channels * (W + 1) + 3 * H + INNER + D
    assert parameter_count(spec) == 2 * (gemms + others) + D + 2 * 90 * D
    scan = 2 * 2 * (G * N + INNER) + 4 * INNER * N  # half of a chunk of 4; into the states and out of them
    assert "12 A q" in flops_formula(hybrid=True) and "F g h f + MoE" in flops_formula(hybrid=True, experts=True)
    assert model_flops_per_token(spec) == pytest.approx(6 * (2 * gemms + 90 * D) + 2 * 3 * (scan + 2 * W * channels))
    beside = model_spec(
        run_of(
            f"{MAMBA} --hybrid-layer-pattern PM --num-attention-heads 2 --disable-bias-linear --mamba-gated-norm none"
        )
    )
    assert parameter_count(beside) == parameter_count(spec) + 4 * D * D - 2 * INNER
    attention = 6 * 4 * D * D + 12 * D * S / 2
    assert model_flops_per_token(beside) == pytest.approx(model_flops_per_token(spec) + attention)


def test_forward_flops_on_one_rank_are_a_third_of_the_layer_s():
    check_forward_flops(mixer_of(Mamba2Spec, MAMBA), run_of(MAMBA), inner_size=INNER)


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        (LogDecayValues(), 0.0, math.log(16.0)),
        (StepBiasValues(), math.log(math.expm1(1e-3)), math.log(math.expm1(1e-1))),
        (UniformValues(-0.5, 0.5), -0.5, 0.5),
    ],
)
def test_initial_values_are_a_function_of_seed_name_and_index(values, low: float, high: float):
    whole, half, other = torch.empty(64), torch.empty(32), torch.empty(64)
    values.fill(whole, shard(0, 64), seed=7)
    values.fill(half, shard(32, 32), seed=7)
    assert torch.equal(whole[32:], half)
    assert whole.min() >= low - 1e-5 and whole.max() <= high + 1e-5 and whole.std() > 0.2 * (high - low)
    values.fill(other, shard(0, 64), seed=8)
    assert not torch.equal(whole, other)
    values.fill(other, shard(0, 64, name="layers.1.mamba.A_log"), seed=7)
    assert not torch.equal(whole, other)


def test_step_sizes_are_log_uniform():
    bias = torch.empty(4096)
    StepBiasValues().fill(bias, shard(0, 4096, whole=4096), seed=1)
    logs = F.softplus(bias.double()).log10()
    assert logs.mean().item() == pytest.approx(-2.0, abs=0.05) and logs.std().item() == pytest.approx(
        2 / 12**0.5, abs=0.02
    )
