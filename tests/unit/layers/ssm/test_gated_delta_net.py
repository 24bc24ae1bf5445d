"""The gated delta net is the equation of the paper: against plain PyTorch, against transformers, and counted by hand."""

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
from petatron.layers.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSpec
from petatron.layers.ssm.initial_values import LogDecayValues
from petatron.models.registry import model_spec
from petatron.sharding.initial_values import ONES
from tests.unit.layers.ssm.test_mamba2 import shard

S, B, D, H, P, G, N, W = 11, 2, 16, 4, 5, 2, 6, 4
KEYS, VALUES = G * N, H * P
BASE = (
    f"--hybrid-layer-pattern GG --hidden-size {D} --seq-length {S} --vocab-size 90 --normalization RMSNorm "
    f"--position-embedding-type none --hidden-dropout 0 --make-vocab-size-divisible-by 2 --linear-key-head-dim {N} "
    f"--linear-value-head-dim {P} --linear-num-key-heads {G} --linear-num-value-heads {H} --linear-chunk-size 4 "
    "--untie-embeddings-and-output-weights"
)
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def run_of(flags: str = ""):
    return load_config([*BASE.split(), *flags.split()], require_training=False).config


def mixer_of(flags: str = "") -> GatedDeltaNetSpec:
    mixer = model_spec(run_of(flags)).layers[0].mixer
    assert isinstance(mixer, GatedDeltaNetSpec)
    return mixer


def module_of(spec: GatedDeltaNetSpec) -> GatedDeltaNet:
    module = spec.build(0).double()
    generator = torch.Generator().manual_seed(5)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.4, generator=generator)
    return module


def inputs() -> Tensor:
    return torch.randn(S, B, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)


def unit(x: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def plain_delta_net(x_SBD: Tensor, weights: dict[str, Tensor], spec: GatedDeltaNetSpec) -> Tensor:
    """Token by token, head by head."""
    rows = x_SBD @ weights["in_proj.weight"].T
    channels, z, b, a = rows.split((2 * KEYS + VALUES, VALUES, H, H), dim=-1)
    padded = F.pad(channels.permute(1, 2, 0), (spec.conv_width - 1, 0))
    conv = F.conv1d(padded, weights["conv.weight"], groups=channels.shape[-1])
    q, k, v = F.silu(conv).permute(2, 0, 1).split((KEYS, KEYS, VALUES), dim=-1)
    decays = torch.exp(-weights["A_log"].exp() * F.softplus(a + weights["dt_bias"]))
    outputs = []
    for head in range(H):
        of_key, of_value = slice(head // (H // G) * N, (head // (H // G) + 1) * N), slice(head * P, (head + 1) * P)
        state, of_head = x_SBD.new_zeros(B, N, P), []
        for token in range(S):
            key, query = unit(k[token, :, of_key]), unit(q[token, :, of_key]) / math.sqrt(N)
            state = decays[token, :, head, None, None] * state
            missing = v[token, :, of_value] - torch.einsum("bnp,bn->bp", state, key)
            state = state + b[token, :, head, None, None].sigmoid() * torch.einsum("bn,bp->bnp", key, missing)
            of_head.append(torch.einsum("bnp,bn->bp", state, query))
        o = torch.stack(of_head)
        normed = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + spec.norm_eps) * weights["norm.weight"]
        outputs.append(normed * F.silu(z[..., of_value]))
    return torch.cat(outputs, dim=-1) @ weights["out_proj.weight"].T


@pytest.mark.parametrize("flags", ["", "--linear-conv-kernel-dim 2"])
def test_outputs_and_gradients_are_those_of_plain_pytorch(flags: str):
    spec = mixer_of(flags)
    module, x = module_of(spec), inputs()
    target = torch.randn(S, B, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    y = module(x, ForwardContext())
    names, parameters = zip(*module.named_parameters())
    theirs = plain_delta_net(x, dict(zip(names, parameters)), spec)
    torch.testing.assert_close(y, theirs, **EXACT)
    found = torch.autograd.grad((y * target).sum(), [x, *parameters])
    expected = torch.autograd.grad((theirs * target).sum(), [x, *parameters])
    for name, ours, right in zip(["x", *names], found, expected):
        torch.testing.assert_close(ours, right, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


def test_packed_documents_are_documents_by_themselves():
    module, x = module_of(mixer_of()), inputs().detach()
    begins = ((0, 2, 7), (0, 5))
    starts = torch.zeros(B, S, dtype=torch.int64)
    for row, first in enumerate(begins):
        for begin in first:
            starts[row, begin:] = begin
    packed = module(x, ForwardContext(documents=Documents.of(starts)))
    for row, first in enumerate(begins):
        for begin, end in zip(first, (*first[1:], S)):
            alone = module(x[begin:end, row : row + 1], ForwardContext())
            torch.testing.assert_close(packed[begin:end, row : row + 1], alone, **EXACT)


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
    theirs = Qwen3NextGatedDeltaNet(config, 0).eval()
    ours = module_of(mixer_of()).float()
    weights = dict(ours.named_parameters())
    q, k, v, z, b, a = weights["in_proj.weight"].split((KEYS, KEYS, VALUES, VALUES, H, H))
    stored = {
        "in_proj_qkvz.weight": by_key_head(q, k, v, z),
        "in_proj_ba.weight": by_key_head(b, a),
        "conv1d.weight": weights["conv.weight"],
    }
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(stored[name] if name in stored else weights[name])
        x = inputs().detach().float()
        y = theirs(x.transpose(0, 1))
        torch.testing.assert_close(ours(x, ForwardContext()), y.transpose(0, 1), rtol=1e-4, atol=1e-5)


def test_parameters_and_flops_by_hand():
    spec = model_spec(run_of())
    channels = 2 * KEYS + VALUES
    gemms = D * (channels + VALUES + 2 * H) + VALUES * D
    others = channels * W + 2 * H + P + D
    assert parameter_count(spec) == 2 * (gemms + others) + D + 2 * 90 * D
    # Half of a chunk of 4 inside chunks and in the solve; a state meets keys twice and queries once.
    rule = 2 * 2 * (2 * KEYS + VALUES) + 2 * 2 * (VALUES + H * N) + 6 * H * N * P
    for kinds in ({"hybrid": True}, {"experts": True}, {}):
        formula = flops_formula(delta=True, gated=True, **kinds)
        assert "X h (2 n + 3 p + 2 H)" in formula and "A (h (2q + 2k) + q h)" in formula and "12 A q" in formula
    assert model_flops_per_token(spec) == pytest.approx(6 * (2 * gemms + 90 * D) + 2 * 3 * (rule + 2 * W * channels))


def test_forward_flops_on_one_rank_are_a_third_of_the_layer_s():
    run, spec = run_of(), mixer_of()
    shape = ActivationShape.from_config(run, device="cpu")
    gemms = sum(param.num_elements for param in spec.params().values() if param.is_gemm)
    mixing = spec.mixing_flops(S, causal=True) / 3
    assert spec.forward_flops(shape) - spec.norm_flops(shape) == pytest.approx(2 * gemms * S + mixing)
    assert spec.recompute_flops(shape, "delta") == pytest.approx(spec.forward_flops(shape) - 2 * S * VALUES * D)


def test_initial_values_are_those_of_transformers():
    params = mixer_of().params()
    assert params["A_log"].init == LogDecayValues(0.01, 16.0)
    assert params["dt_bias"].init == params["norm.weight"].init == ONES
    values = torch.empty(4096)
    LogDecayValues(0.01, 16.0).fill(values, shard(0, 4096, whole=4096), seed=3)
    assert values.exp().mean().item() == pytest.approx(8.0, abs=0.3) and values.min() >= math.log(0.01) - 1e-5
