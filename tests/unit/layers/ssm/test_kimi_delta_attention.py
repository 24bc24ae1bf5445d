"""Kimi delta attention is the equation of the paper: against plain PyTorch, against transformers, and counted by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.estimate.flops import flops_formula, model_flops_per_token, parameter_count
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.ssm.initial_values import LogDecayValues, StepBiasValues
from petatron.layers.ssm.kimi_delta_attention import KimiDeltaSpec
from petatron.models.registry import model_spec
from tests.unit.layers.ssm.mixer_checks import (
    D,
    check_forward_flops,
    check_outputs_and_gradients,
    check_packed_documents,
    check_transformers_module,
    mixer_of,
    plain_conv,
    run_of,
)
from tests.unit.layers.ssm.plain_delta_rule import plain_delta_rule

H, P, G, N, W = 4, 5, 2, 6, 4
KEYS, VALUES, DECAYS = G * N, H * P, H * N
KIMI = (
    "--num-layers 2 --num-attention-heads 4 --experimental-attention-variant kimi_delta_attention --linear-attention-freq [1,1] "
    f"--linear-key-head-dim {N} --linear-value-head-dim {P} --linear-num-key-heads {G} --linear-num-value-heads {H} "
    "--linear-chunk-size 4 --disable-bias-linear --ffn-hidden-size 24"
)


def plain_mixer(x_SBD: Tensor, weights: dict[str, Tensor], spec: KimiDeltaSpec) -> Tensor:
    channels, b = (x_SBD @ weights["in_proj.weight"].T).split((2 * KEYS + VALUES, H), dim=-1)
    f, z = (x_SBD @ weights[f"{name}_down.weight"].T @ weights[f"{name}_up.weight"].T for name in ("decay", "gate"))
    steps = F.softplus(f + weights["dt_bias"]).unflatten(-1, (H, N))
    decays = torch.exp(-weights["A_log"].flatten()[:, None].exp() * steps)
    channels = plain_conv(channels, weights["conv.weight"])
    return plain_delta_rule(channels, b.sigmoid(), decays, z.sigmoid(), weights, spec)


def test_outputs_and_gradients_are_those_of_plain_pytorch():
    spec = mixer_of(KimiDeltaSpec, KIMI)
    check_outputs_and_gradients(spec, lambda x, weights: plain_mixer(x, weights, spec))


def test_packed_documents_are_documents_by_themselves():
    check_packed_documents(mixer_of(KimiDeltaSpec, KIMI))


def test_it_is_the_mixer_of_transformers():
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    config = transformers.KimiLinearConfig(
        hidden_size=D, linear_head_dim=P, linear_num_heads=H, linear_conv_kernel_dim=W, rms_norm_eps=1e-5,
        num_hidden_layers=1,
    )  # fmt: skip

    def stored(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        q, k, v, b = weights["in_proj.weight"].split((VALUES, VALUES, VALUES, H))
        return {
            "q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v, "b_proj.weight": b, "conv1d.weight": weights["conv.weight"],
            "forget_gate.f_a_proj.weight": weights["decay_down.weight"], "forget_gate.f_b_proj.weight": weights["decay_up.weight"],
            "forget_gate.dt_bias": weights["dt_bias"], "forget_gate.A_log": weights["A_log"],
            "g_a_proj.weight": weights["gate_down.weight"], "g_b_proj.weight": weights["gate_up.weight"],
            "o_norm.weight": weights["norm.weight"], "o_proj.weight": weights["out_proj.weight"],
        }  # fmt: skip

    equal_heads = mixer_of(KimiDeltaSpec, f"{KIMI} --linear-num-key-heads {H} --linear-key-head-dim {P}")
    check_transformers_module(modeling.KimiLinearDeltaAttention(config, 0), equal_heads, stored)


def test_parameters_and_flops_by_hand():
    spec = model_spec(run_of(KIMI))
    channels = 2 * KEYS + VALUES
    gemms = D * (channels + H + N + P) + DECAYS * N + VALUES * P + VALUES * D
    others = channels * W + H + DECAYS + P + D
    mlps = 2 * 24 * D
    assert parameter_count(spec) == 2 * (gemms + others + mlps + D) + D + 2 * 90 * D
    # Half of a chunk of 4 inside chunks and in the solve; a state meets keys twice and queries once.
    rule = 2 * 2 * (2 * DECAYS + VALUES) + 2 * 2 * (VALUES + H * N) + 6 * H * N * P
    expected = 6 * (2 * (gemms + mlps) + 90 * D) + 2 * 3 * (rule + 2 * W * channels)
    assert model_flops_per_token(spec) == pytest.approx(expected)
    formula = flops_formula(linear=KimiDeltaSpec, latent=True, experts=True)
    assert "X (h (2 n + 2 p + H + N + P) + H N^2 + p P)" in formula and "c (2 H N + 2 p + H N)" in formula


def test_forward_flops_on_one_rank_are_a_third_of_the_layer_s():
    check_forward_flops(mixer_of(KimiDeltaSpec, KIMI), run_of(KIMI), inner_size=VALUES)


def test_down_projections_are_whole_on_every_rank():
    """Under sequence parallelism a rank projects its own tokens; without it, all of them."""
    spec, down = mixer_of(KimiDeltaSpec, KIMI), 2 * D * (N + P)
    shapes = {
        flags: ActivationShape.from_config(run_of(f"{KIMI} --seq-length 12 --tp 2 {flags}"), device="cpu")
        for flags in ("", "--sequence-parallel")
    }
    plain, sequence = (spec.forward_flops(shape) - spec.norm_flops(shape) for shape in shapes.values())
    assert plain - sequence == pytest.approx(down * shapes[""].tokens / 2)


def test_initial_values_are_those_of_transformers():
    params = mixer_of(KimiDeltaSpec, KIMI).params()
    assert params["A_log"].init == LogDecayValues(1.0, 16.0)
    assert params["dt_bias"].init == StepBiasValues(1e-3, 1e-1, 1e-4)
