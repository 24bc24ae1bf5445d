"""Kimi delta attention is the equation of the paper: against plain PyTorch, against transformers, and counted by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.config import load_config
from petatron.estimate.flops import flops_formula, model_flops_per_token, parameter_count
from petatron.kernels.attention.documents import Documents
from petatron.layers.forward_context import ForwardContext
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.ssm.initial_values import LogDecayValues, StepBiasValues
from petatron.layers.ssm.kimi_delta_attention import KimiDeltaAttention, KimiDeltaSpec
from petatron.models.registry import model_spec
from tests.unit.layers.ssm.test_gated_delta_net import EXACT, unit

S, B, D, H, P, G, N, W = 11, 2, 16, 4, 5, 2, 6, 4
KEYS, VALUES, DECAYS = G * N, H * P, H * N
BASE = (
    f"--num-layers 2 --num-attention-heads 4 --hidden-size {D} --seq-length {S} --vocab-size 90 --normalization RMSNorm "
    "--experimental-attention-variant kimi_delta_attention --linear-attention-freq [1,1] --position-embedding-type none "
    f"--hidden-dropout 0 --make-vocab-size-divisible-by 2 --linear-key-head-dim {N} --linear-value-head-dim {P} "
    f"--linear-num-key-heads {G} --linear-num-value-heads {H} --linear-chunk-size 4 --untie-embeddings-and-output-weights "
    "--disable-bias-linear --ffn-hidden-size 24"
)


def run_of(flags: str = ""):
    return load_config([*BASE.split(), *flags.split()], require_training=False).config


def mixer_of(flags: str = "") -> KimiDeltaSpec:
    mixer = model_spec(run_of(flags)).layers[0].mixer
    assert isinstance(mixer, KimiDeltaSpec)
    return mixer


def module_of(spec: KimiDeltaSpec) -> KimiDeltaAttention:
    module = spec.build(0).double()
    generator = torch.Generator().manual_seed(5)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.4, generator=generator)
    return module


def inputs() -> Tensor:
    return torch.randn(S, B, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)


def plain_mixer(x_SBD: Tensor, weights: dict[str, Tensor], spec: KimiDeltaSpec) -> Tensor:
    """Token by token, head by head."""
    channels, b = (x_SBD @ weights["in_proj.weight"].T).split((2 * KEYS + VALUES, H), dim=-1)
    f, z = (x_SBD @ weights[f"{name}_down.weight"].T @ weights[f"{name}_up.weight"].T for name in ("decay", "gate"))
    padded = F.pad(channels.permute(1, 2, 0), (spec.conv_width - 1, 0))
    conv = F.conv1d(padded, weights["conv.weight"], groups=channels.shape[-1])
    q, k, v = F.silu(conv).permute(2, 0, 1).split((KEYS, KEYS, VALUES), dim=-1)
    steps = F.softplus(f + weights["dt_bias"])
    outputs = []
    for head in range(H):
        of_key, of_value = slice(head // (H // G) * N, (head // (H // G) + 1) * N), slice(head * P, (head + 1) * P)
        decays = torch.exp(-weights["A_log"].flatten()[head].exp() * steps[..., head * N : (head + 1) * N])
        state, of_head = x_SBD.new_zeros(B, N, P), []
        for token in range(S):
            key, query = unit(k[token, :, of_key]), unit(q[token, :, of_key]) / math.sqrt(N)
            state = decays[token, :, :, None] * state
            missing = v[token, :, of_value] - torch.einsum("bnp,bn->bp", state, key)
            state = state + b[token, :, head, None, None].sigmoid() * torch.einsum("bn,bp->bnp", key, missing)
            of_head.append(torch.einsum("bnp,bn->bp", state, query))
        o = torch.stack(of_head)
        normed = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + spec.norm_eps) * weights["norm.weight"]
        outputs.append(normed * z[..., of_value].sigmoid())
    return torch.cat(outputs, dim=-1) @ weights["out_proj.weight"].T


def test_outputs_and_gradients_are_those_of_plain_pytorch():
    spec = mixer_of()
    module, x = module_of(spec), inputs()
    target = torch.randn(S, B, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    y = module(x, ForwardContext())
    names, parameters = zip(*module.named_parameters())
    theirs = plain_mixer(x, dict(zip(names, parameters)), spec)
    torch.testing.assert_close(y, theirs, **EXACT)
    found = torch.autograd.grad((y * target).sum(), [x, *parameters])
    expected = torch.autograd.grad((theirs * target).sum(), [x, *parameters])
    for name, ours, right in zip(["x", *names], found, expected):
        torch.testing.assert_close(ours, right, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


def test_packed_documents_are_documents_by_themselves():
    module, x = module_of(mixer_of()), inputs().detach()
    starts = torch.zeros(B, S, dtype=torch.int64)
    begins = ((0, 2, 7), (0, 5))
    for row, first in enumerate(begins):
        for begin in first:
            starts[row, begin:] = begin
    packed = module(x, ForwardContext(documents=Documents.of(starts)))
    for row, first in enumerate(begins):
        for begin, end in zip(first, (*first[1:], S)):
            alone = module(x[begin:end, row : row + 1], ForwardContext())
            torch.testing.assert_close(packed[begin:end, row : row + 1], alone, **EXACT)


def test_it_is_the_mixer_of_transformers():
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    config = transformers.KimiLinearConfig(
        hidden_size=D, linear_head_dim=P, linear_num_heads=H, linear_conv_kernel_dim=W, rms_norm_eps=1e-5,
        num_hidden_layers=1,
    )  # fmt: skip
    theirs = modeling.KimiLinearDeltaAttention(config, 0).eval()
    equal_heads = f"--linear-num-key-heads {H} --linear-key-head-dim {P}"
    ours = module_of(mixer_of(equal_heads)).float()
    weights = dict(ours.named_parameters())
    q, k, v, b = weights["in_proj.weight"].split((VALUES, VALUES, VALUES, H))
    stored = {
        "q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v, "b_proj.weight": b, "conv1d.weight": weights["conv.weight"],
        "forget_gate.f_a_proj.weight": weights["decay_down.weight"], "forget_gate.f_b_proj.weight": weights["decay_up.weight"],
        "forget_gate.dt_bias": weights["dt_bias"], "forget_gate.A_log": weights["A_log"],
        "g_a_proj.weight": weights["gate_down.weight"], "g_b_proj.weight": weights["gate_up.weight"],
        "o_norm.weight": weights["norm.weight"], "o_proj.weight": weights["out_proj.weight"],
    }  # fmt: skip
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(stored.pop(name))
        assert not stored
        x = inputs().detach().float()
        y = theirs(x.transpose(0, 1))
        torch.testing.assert_close(ours(x, ForwardContext()), y.transpose(0, 1), rtol=1e-4, atol=1e-5)


def test_parameters_and_flops_by_hand():
    spec = model_spec(run_of())
    channels = 2 * KEYS + VALUES
    gemms = D * (channels + H + N + P) + DECAYS * N + VALUES * P + VALUES * D
    others = channels * W + H + DECAYS + P + D
    mlps = 2 * 24 * D
    assert parameter_count(spec) == 2 * (gemms + others + mlps + D) + D + 2 * 90 * D
    # Half of a chunk of 4 inside chunks and in the solve; a state meets keys twice and queries once.
    rule = 2 * 2 * (2 * DECAYS + VALUES) + 2 * 2 * (VALUES + H * N) + 6 * H * N * P
    expected = 6 * (2 * (gemms + mlps) + 90 * D) + 2 * 3 * (rule + 2 * W * channels)
    assert model_flops_per_token(spec) == pytest.approx(expected)
    formula = flops_formula(delta=True, by_channel=True, latent=True, experts=True)
    assert "X (h (2 n + 2 p + H + N + P) + H N^2 + p P)" in formula and "c (2 H N + 2 p + H N)" in formula


def test_forward_flops_on_one_rank_are_a_third_of_the_layer_s():
    run, spec = run_of(), mixer_of()
    shape = ActivationShape.from_config(run, device="cpu")
    gemms = sum(param.num_elements for param in spec.params().values() if param.is_gemm)
    mixing = spec.mixing_flops(S, causal=True) / 3
    assert spec.forward_flops(shape) - spec.norm_flops(shape) == pytest.approx(2 * gemms * S + mixing)
    assert spec.recompute_flops(shape, "delta") == pytest.approx(spec.forward_flops(shape) - 2 * S * VALUES * D)


def test_down_projections_are_whole_on_every_rank():
    """Under sequence parallelism a rank projects its own tokens; without it, all of them."""
    spec, down = mixer_of(), 2 * D * (N + P)
    shapes = {
        flags: ActivationShape.from_config(run_of(f"--seq-length 12 --tp 2 {flags}"), device="cpu")
        for flags in ("", "--sequence-parallel")
    }
    plain, sequence = (spec.forward_flops(shape) - spec.norm_flops(shape) for shape in shapes.values())
    assert plain - sequence == pytest.approx(down * shapes[""].tokens / 2)


def test_initial_values_are_those_of_transformers():
    params = mixer_of().params()
    assert params["A_log"].init == LogDecayValues(1.0, 16.0)
    assert params["dt_bias"].init == StepBiasValues(1e-3, 1e-1, 1e-4)
