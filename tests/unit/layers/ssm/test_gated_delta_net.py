"""The gated delta net is the equation of the paper: against plain PyTorch, against transformers, and counted by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.estimate.flops import flops_formula, model_flops_per_token, parameter_count
from petatron.layers.ssm.gated_delta_net import GatedDeltaNetSpec
from petatron.layers.ssm.initial_values import LogDecayValues
from petatron.models.registry import model_spec
from petatron.sharding.initial_values import ONES
from tests.unit.layers.ssm.mixer_checks import (
    D,
    check_forward_flops,
    check_outputs_and_gradients,
    check_packed_documents,
    check_transformers_module,
    mixer_of,
    plain_conv,
    run_of,
    shard,
)
from tests.unit.layers.ssm.plain_delta_rule import plain_delta_rule

H, P, G, N, W = 4, 5, 2, 6, 4
KEYS, VALUES = G * N, H * P
NET = (
    f"--hybrid-layer-pattern GG --linear-key-head-dim {N} --linear-value-head-dim {P} --linear-num-key-heads {G} "
    f"--linear-num-value-heads {H} --linear-chunk-size 4"
)


def plain_delta_net(x_SBD: Tensor, weights: dict[str, Tensor], spec: GatedDeltaNetSpec) -> Tensor:
    channels, z, b, a = (x_SBD @ weights["in_proj.weight"].T).split((2 * KEYS + VALUES, VALUES, H, H), dim=-1)
    decays = torch.exp(-weights["A_log"].exp() * F.softplus(a + weights["dt_bias"]))
    channels = plain_conv(channels, weights["conv.weight"])
    return plain_delta_rule(channels, b.sigmoid(), decays[..., None], F.silu(z), weights, spec)


@pytest.mark.parametrize("flags", ["", "--linear-conv-kernel-dim 2"])
def test_outputs_and_gradients_are_those_of_plain_pytorch(flags: str):
    spec = mixer_of(GatedDeltaNetSpec, f"{NET} {flags}")
    check_outputs_and_gradients(spec, lambda x, weights: plain_delta_net(x, weights, spec))


def test_packed_documents_are_documents_by_themselves():
    check_packed_documents(mixer_of(GatedDeltaNetSpec, NET))


def by_key_head(*parts: Tensor) -> Tensor:
    """Rows of q, k, v and z (or of b and a) as transformers stores them: those of the first key head, then of the next."""
    return torch.cat([part.unflatten(0, (G, -1)) for part in parts], dim=1).flatten(0, 1)


def test_it_is_the_mixer_of_transformers():
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    config = transformers.Qwen3NextConfig(
        hidden_size=D, linear_num_value_heads=H, linear_num_key_heads=G, linear_key_head_dim=N, linear_value_head_dim=P,
        linear_conv_kernel_dim=W, rms_norm_eps=1e-5, num_hidden_layers=1,
    )  # fmt: skip

    def stored(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        q, k, v, z, b, a = weights.pop("in_proj.weight").split((KEYS, KEYS, VALUES, VALUES, H, H))
        conv = weights.pop("conv.weight")
        return weights | {
            "in_proj_qkvz.weight": by_key_head(q, k, v, z), "in_proj_ba.weight": by_key_head(b, a), "conv1d.weight": conv
        }  # fmt: skip

    check_transformers_module(Qwen3NextGatedDeltaNet(config, 0), mixer_of(GatedDeltaNetSpec, NET), stored)


def test_parameters_and_flops_by_hand():
    spec = model_spec(run_of(NET))
    channels = 2 * KEYS + VALUES
    gemms = D * (channels + VALUES + 2 * H) + VALUES * D
    others = channels * W + 2 * H + P + D
    assert parameter_count(spec) == 2 * (gemms + others) + D + 2 * 90 * D
    # Half of a chunk of 4 inside chunks and in the solve; a state meets keys twice and queries once.
    rule = 2 * 2 * (2 * KEYS + VALUES) + 2 * 2 * (VALUES + H * N) + 6 * H * N * P
    for kinds in ({"hybrid": True}, {"experts": True}, {}):
        formula = flops_formula(linear=GatedDeltaNetSpec, gated=True, **kinds)
        assert "X h (2 n + 3 p + 2 H)" in formula and "A (h (2q + 2k) + q h)" in formula and "12 A q" in formula
    assert model_flops_per_token(spec) == pytest.approx(6 * (2 * gemms + 90 * D) + 2 * 3 * (rule + 2 * W * channels))


def test_forward_flops_on_one_rank_are_a_third_of_the_layer_s():
    check_forward_flops(mixer_of(GatedDeltaNetSpec, NET), run_of(NET), inner_size=VALUES)


def test_initial_values_are_those_of_transformers():
    params = mixer_of(GatedDeltaNetSpec, NET).params()
    assert params["A_log"].init == LogDecayValues(0.01, 16.0)
    assert params["dt_bias"].init == params["norm.weight"].init == ONES
    values = torch.empty(4096)
    LogDecayValues(0.01, 16.0).fill(values, shard(0, 4096, whole=4096), seed=3)
    assert values.exp().mean().item() == pytest.approx(8.0, abs=0.3) and values.min() >= math.log(0.01) - 1e-5
