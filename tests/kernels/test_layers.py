"""Norms, rotary embedding, activations and dropout against their formulas and transformers' own functions."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from petatron.config.schema.model import ModelConfig
from petatron.kernels.activation import ACTIVATIONS, GATE_ACTIVATIONS
from petatron.kernels.rope import apply_rope as rotate
from petatron.layers.dropout import Dropout
from petatron.layers.norm import LayerNorm, RMSNorm
from petatron.layers.rope import RopeSpec, RotaryEmbedding, inverse_frequencies
from petatron.models.branch_specs import rope_spec


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_is_that_of_llama_bit_for_bit(dtype: torch.dtype):
    torch.manual_seed(0)
    x, weight = (torch.randn(7, 3, 48) * 5).to(dtype), torch.randn(48).to(dtype)
    ours, theirs = RMSNorm(48, eps=1e-5), LlamaRMSNorm(48, eps=1e-5)
    ours.weight.data, theirs.weight.data = weight, weight.clone()
    assert torch.equal(ours(x), theirs(x))


def test_norms_follow_their_formulas():
    torch.manual_seed(1)
    x = torch.randn(5, 2, 16, dtype=torch.float64)
    weight, bias = torch.randn(16, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    rms, layer = RMSNorm(16, eps=1e-2), LayerNorm(16, eps=1e-2)
    rms.weight.data, layer.weight.data, layer.bias.data = weight, weight.clone(), bias
    torch.testing.assert_close(rms(x), x / (x.pow(2).mean(-1, keepdim=True) + 1e-2).sqrt() * weight)
    centered = x - x.mean(-1, keepdim=True)
    torch.testing.assert_close(
        layer(x), centered / (centered.pow(2).mean(-1, keepdim=True) + 1e-2).sqrt() * weight + bias
    )


def rope_of(head_dim: int, **changes) -> RopeSpec:
    return rope_spec(ModelConfig(**{"position_embedding_type": "rope", **changes}), head_dim)


_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_SCALED = {"rope_scaling_factor": 8.0, "original_max_position_embeddings": 32}
ROTARY = {
    "plain": ({"rope_type": "default"}, {}),
    "theta": ({"rope_type": "default", "rope_theta": 5e5}, {"rotary_base": 5e5}),
    "llama3": ({**_LLAMA3, "original_max_position_embeddings": 32}, dict(use_rope_scaling=True, **_SCALED)),
    "llama3-real": (
        {**_LLAMA3, "original_max_position_embeddings": 8192, "rope_theta": 5e5},
        {
            "use_rope_scaling": True,
            "rope_scaling_factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rotary_base": 5e5,
        },
    ),
    "yarn": (
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32},
        dict(position_embedding_type="yarn", **_SCALED),
    ),
    "yarn-real": (
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
        },
        {
            "position_embedding_type": "yarn",
            "rope_scaling_factor": 40.0,
            "original_max_position_embeddings": 4096,
            "yarn_mscale_all_dim": 0.8,
        },
    ),
    "yarn-betas": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16, "beta_slow": 2},
        {
            "position_embedding_type": "yarn",
            "rope_scaling_factor": 4.0,
            "original_max_position_embeddings": 64,
            "yarn_beta_fast": 16.0,
            "yarn_beta_slow": 2.0,
        },
    ),
}


@pytest.mark.parametrize("width", [8, 64, 128])
@pytest.mark.parametrize("case", ROTARY)
def test_rotary_is_that_of_transformers(case: str, width: int):
    theirs, ours = ROTARY[case]
    config = transformers.LlamaConfig(
        hidden_size=4 * width,
        num_attention_heads=4,
        num_hidden_layers=1,
        max_position_embeddings=65536,
        rope_parameters={"rope_theta": 1e4, **theirs},
    )
    embedding = LlamaRotaryEmbedding(config)
    rotary = RotaryEmbedding(rope_of(width, **ours))
    torch.testing.assert_close(rotary.inv_freq, embedding.inv_freq, rtol=1e-6, atol=0)
    assert rotary.attention_scaling == pytest.approx(embedding.attention_scaling)
    torch.manual_seed(width)
    positions = torch.stack((torch.arange(40), torch.randint(0, 300, (40,))))
    q, k = torch.randn(2, 4, 40, width), torch.randn(2, 1, 40, width)
    wanted = apply_rotary_pos_emb(q, k, *embedding(q, positions))
    rotation = rotary(positions, torch.float32)
    for mine, true in zip((q, k), wanted):  # theirs are [batch, heads, sequence, width]
        torch.testing.assert_close(
            rotate(mine.permute(2, 0, 1, 3), *rotation).permute(1, 2, 0, 3), true, rtol=0, atol=2e-4
        )


@settings(max_examples=20, deadline=None)
@given(
    first=st.integers(0, 500),
    second=st.integers(0, 500),
    shift=st.integers(0, 500),
    percent=st.sampled_from([0.5, 1.0]),
)
def test_a_score_depends_on_the_distance_only(first: int, second: int, shift: int, percent: float):
    rotary = RotaryEmbedding(rope_of(16, rotary_percent=percent))
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 1, 16, dtype=torch.float64), torch.randn(1, 1, 1, 16, dtype=torch.float64)

    def score(at_q: int, at_k: int) -> float:
        turned = [rotate(x, *rotary(torch.tensor([at]), torch.float64)) for x, at in ((q, at_q), (k, at_k))]
        return (turned[0] * turned[1]).sum().item()

    assert score(first, second) == pytest.approx(score(first + shift, second + shift), abs=2e-3)


def test_partial_rotation_leaves_the_rest_of_a_head():
    x = torch.randn(6, 2, 3, 16)
    turned = rotate(x, *RotaryEmbedding(rope_of(16, rotary_percent=0.25))(torch.arange(6), torch.float32))
    assert torch.equal(turned[..., 4:], x[..., 4:]) and not torch.allclose(turned[1:, ..., :4], x[1:, ..., :4])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))


def test_scaling_keeps_high_and_slows_low_frequencies():
    plain = inverse_frequencies(rope_of(64))
    for change in ({"use_rope_scaling": True}, {"position_embedding_type": "yarn"}):
        scaled = inverse_frequencies(rope_of(64, **change, **_SCALED))
        assert scaled[0] == plain[0] and scaled[-1] == pytest.approx(plain[-1].item() / 8)
        assert (scaled.diff() < 0).all()
    yarn = RotaryEmbedding(rope_of(64, position_embedding_type="yarn"))
    assert yarn.attention_scaling == pytest.approx(0.1 * math.log(8) + 1)
    unscaled = RotaryEmbedding(rope_of(64, position_embedding_type="yarn", rope_scaling_factor=1.0))
    assert unscaled.attention_scaling == 1.0


def test_activations_are_those_of_transformers():
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    names = {"gelu_tanh": "gelu_new", "squared_relu": "relu2"}
    for name, activation in ACTIVATIONS.items():
        torch.testing.assert_close(activation(x), ACT2FN[names.get(name, name)](x))
    gates = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_pytorch_tanh", "reglu": "relu"}
    gates["quick_geglu"] = "quick_gelu"
    assert gates.keys() == GATE_ACTIVATIONS.keys()
    for name, gate in GATE_ACTIVATIONS.items():
        torch.testing.assert_close(ACTIVATIONS[gate](x), ACT2FN[gates[name]](x))


@pytest.mark.parametrize("shared", [False, True])
def test_dropout_zeroes_a_share_and_scales_the_rest(shared: bool):
    torch.manual_seed(3)
    dropout = Dropout(0.25)
    dropout.generator = torch.Generator().manual_seed(5) if shared else None
    x = torch.ones(40_000)
    y = dropout(x)
    assert set(y.unique().tolist()) == {0.0, F.dropout(x, 0.25).max().item()}
    assert (y == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    assert not torch.equal(dropout(x), y), "the next mask is another"
    assert torch.equal(dropout.eval()(x), x)


def test_a_shared_stream_gives_the_same_mask():
    masks = []
    for _ in range(2):
        dropout = Dropout(0.5)
        dropout.generator = torch.Generator().manual_seed(11)
        torch.rand(1)  # the rank's own stream moves on
        masks.append(dropout(torch.ones(1000)))
    assert torch.equal(*masks)
