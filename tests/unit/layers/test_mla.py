"""Multi-head latent attention is the equation of the paper: against plain PyTorch, against transformers, and counted by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.estimate.flops import flops_formula, model_flops_per_token, parameter_count
from petatron.layers.forward_context import ForwardContext
from petatron.layers.mla import MlaSpec, MultiLatentAttention
from petatron.layers.rope import RotaryEmbedding
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.models.registry import model_spec
from petatron.validate import load_config

S, B, D, H, NOPE, ROTARY, V = 10, 2, 24, 4, 6, 4, 7
BASE = (
    f"--num-layers 2 --hidden-size {D} --num-attention-heads {H} --seq-length {S} --vocab-size 90 --swiglu --ffn-hidden-size 40 "
    "--normalization RMSNorm --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --make-vocab-size-divisible-by 2 "
    f"--untie-embeddings-and-output-weights --multi-latent-attention --kv-lora-rank 12 --qk-head-dim {NOPE} "
    f"--qk-pos-emb-head-dim {ROTARY} --v-head-dim {V} --position-embedding-type rope"
)
KINDS = {
    "deepseek-v3": "--q-lora-rank 20 --qk-layernorm",
    "hidden queries": "--qk-layernorm",
    "no norms": "--q-lora-rank 20",
    "yarn": "--q-lora-rank 20 --qk-layernorm --position-embedding-type yarn --rotary-scaling-factor 8 "
    "--original-max-position-embeddings 6 --mscale 0.6 --mscale-all-dim 1.4",
    "window and bias": "--q-lora-rank 20 --window-size 3 --add-bias-linear",
}


def run_of(flags: str):
    return load_config([*BASE.split(), *flags.split()], require_training=False).config


def mixer_of(flags: str) -> MlaSpec:
    mixer = model_spec(run_of(flags)).layers[0].mixer
    assert isinstance(mixer, MlaSpec)
    return mixer


def module_of(spec: MlaSpec) -> MultiLatentAttention:
    module = spec.build(0).double()
    generator = torch.Generator().manual_seed(5)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return module


def inputs(spec: MlaSpec) -> tuple[Tensor, ForwardContext]:
    x = torch.randn(S, B, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    cos_sin = RotaryEmbedding(spec.rope)(torch.arange(S), torch.float64)
    return x, ForwardContext({spec.rope: cos_sin})


def rms(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[..., S, R] by pairs of neighbors, as one complex number each."""
    half = ROTARY // 2
    return torch.view_as_real(
        torch.view_as_complex(x.unflatten(-1, (half, 2)).contiguous()) * torch.complex(cos[:, :half], sin[:, :half])
    ).flatten(-2)


def plain_mla(x_SBD: Tensor, weights: dict[str, Tensor], spec: MlaSpec, context: ForwardContext) -> Tensor:
    """One head and one token pair after the other is what it means; here with whole score matrices."""
    cos, sin = (table[:, 0, 0] for table in context.rope_cos_sin[spec.rope])
    x = x_SBD.transpose(0, 1)
    latent = x if spec.q_rank is None else rms(x @ weights["q_down.weight"].T, weights.get("q_norm.weight"))
    q = (latent @ weights["q_up.weight"].T).view(B, S, H, NOPE + ROTARY).transpose(1, 2)
    compressed = x @ weights["kv_down.weight"].T
    kv = rms(compressed[..., : spec.kv_rank], weights.get("kv_norm.weight")) @ weights["kv_up.weight"].T
    kv = kv.view(B, S, H, NOPE + V).transpose(1, 2)
    k_rotary = rotate(compressed[..., spec.kv_rank :], cos, sin)
    scores = q[..., :NOPE] @ kv[..., :NOPE].transpose(-1, -2)
    scores = scores + rotate(q[..., NOPE:], cos, sin) @ k_rotary.unsqueeze(1).transpose(-1, -2)
    temperature = 1.0
    if spec.rope.scaling == "yarn":
        temperature = 0.1 * spec.rope.mscale_all_dim * math.log(spec.rope.scaling_factor) + 1.0
    scores = scores * temperature**2 / math.sqrt(NOPE + ROTARY)
    distance = torch.arange(S).unsqueeze(1) - torch.arange(S)
    hidden = (distance < 0) | (distance >= (spec.visibility.window or S))
    out = scores.masked_fill(hidden, -math.inf).softmax(-1) @ kv[..., NOPE:]
    out = F.linear(out.transpose(1, 2).reshape(B, S, H * V), weights["out.weight"], weights.get("out.bias"))
    return out.transpose(0, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_plain_pytorch(kind: str):
    spec = mixer_of(KINDS[kind])
    module = module_of(spec)
    x, context = inputs(spec)
    target = torch.randn(S, B, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    y = module(x, context)
    names, parameters = zip(*module.named_parameters())
    found = torch.autograd.grad((y * target).sum(), [x, *parameters])
    theirs = plain_mla(x, dict(zip(names, parameters)), spec, context)
    expected = torch.autograd.grad((theirs * target).sum(), [x, *parameters])
    torch.testing.assert_close(y, theirs, rtol=1e-10, atol=1e-10)
    for name, ours, right in zip(["x", *names], found, expected):
        torch.testing.assert_close(ours, right, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


def test_it_is_deepseek_v3_attention_of_transformers():
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    yarn = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "mscale": 0.6, "mscale_all_dim": 1.4, "beta_fast": 32.0,
        "beta_slow": 1.0, "original_max_position_embeddings": 6,
    }  # fmt: skip
    config = transformers.DeepseekV3Config(
        hidden_size=D, num_attention_heads=H, num_key_value_heads=H, q_lora_rank=20, kv_lora_rank=12, qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROTARY, v_head_dim=V, max_position_embeddings=48, rope_parameters=yarn, rms_norm_eps=1e-5,
        attn_implementation="sdpa", num_hidden_layers=1,
    )  # fmt: skip
    theirs = DeepseekV3Attention(config, 0)
    theirs.q_a_layernorm, theirs.kv_a_layernorm = (
        torch.nn.RMSNorm(width, eps=1e-5) for width in (20, 12)
    )  # its own: in float32
    theirs.double()
    spec = mixer_of(KINDS["yarn"])
    ours = module_of(spec)
    names = {
        "q_a_proj": "q_down", "q_a_layernorm": "q_norm", "q_b_proj": "q_up", "kv_a_proj_with_mqa": "kv_down",
        "kv_a_layernorm": "kv_norm", "kv_b_proj": "kv_up", "o_proj": "out",
    }  # fmt: skip
    weights = dict(ours.named_parameters())
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            module, leaf = name.rsplit(".", 1)
            parameter.copy_(weights[f"{names[module]}.{leaf}"])
    x, context = inputs(spec)
    hidden = x.detach().transpose(0, 1)
    positions = torch.arange(S).expand(B, S)
    embedding = DeepseekV3RotaryEmbedding(config)
    mask = torch.full((S, S), -math.inf, dtype=torch.float64).triu(1).expand(B, 1, S, S)
    tables = tuple(table[:, 0, 0].expand(B, S, ROTARY) for table in context.rope_cos_sin[spec.rope])
    for own, table in zip(tables, embedding(hidden, positions)):  # theirs are computed in float32
        torch.testing.assert_close(own, table, rtol=1e-6, atol=1e-6)
    y, _ = theirs(hidden, tables, mask)
    torch.testing.assert_close(ours(x, context), y.transpose(0, 1), rtol=1e-10, atol=1e-10)


def test_parameters_and_flops_by_hand():
    run = run_of(KINDS["deepseek-v3"])
    spec = model_spec(run)
    latents = D * 20 + D * (12 + ROTARY)
    heads = 20 * H * (NOPE + ROTARY) + 12 * H * (NOPE + V) + H * V * D
    mlp, tables = 3 * D * 40, 90 * D
    norms = 2 * (2 * D + 20 + 12) + D
    assert parameter_count(spec) == 2 * (latents + heads + mlp) + norms + 2 * tables
    pairs = S * S / 2
    scores = 2 * 6 * H * (NOPE + ROTARY + V) * pairs / S
    assert model_flops_per_token(spec) == pytest.approx(6 * (2 * (latents + heads + mlp) + tables) + scores)
    assert "c (k + v)" in flops_formula(latent=True) and "6 L (q + v)" in flops_formula(latent=True, experts=True)


@pytest.mark.parametrize("kind", ["deepseek-v3", "hidden queries"])
def test_forward_flops_on_one_rank_are_a_third_of_the_layer_s(kind: str):
    run = run_of(KINDS[kind])
    spec = mixer_of(KINDS[kind])
    shape = ActivationShape.from_config(run, device="cpu")
    gemms = sum(param.num_elements for param in spec.params().values() if param.is_gemm)
    mixing = spec.mixing_flops(S, causal=True) / 3
    assert spec.forward_flops(shape) - spec.norm_flops(shape) == pytest.approx(2 * gemms * S + mixing)
    assert spec.recompute_flops(shape, "core_attn") == pytest.approx(mixing)
    assert spec.recompute_flops(shape, "attention") == pytest.approx(spec.forward_flops(shape) - 2 * S * H * V * D)
