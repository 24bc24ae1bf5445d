"""Lightning attention is its equation: against plain PyTorch, against transformers, and counted by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.estimate.flops import flops_formula, linear_attention_kind, model_flops_per_token, parameter_count
from petatron.layers.ssm.lightning_attention import LightningSpec
from petatron.models.registry import model_spec
from tests.unit.layers.ssm.mixer_checks import (
    B,
    D,
    S,
    check_forward_flops,
    check_outputs_and_gradients,
    check_packed_documents,
    check_transformers_module,
    mixer_of,
    run_of,
)

H, N = 3, 6
INNER = H * N
LIGHTNING = (
    f"--num-layers 2 --num-attention-heads {H} --kv-channels {N} --experimental-attention-variant lightning_attention "
    "--linear-attention-freq [1,1] --linear-chunk-size 4 --disable-bias-linear --ffn-hidden-size 24"
)
WIDE_HEADS = f"{LIGHTNING} --num-attention-heads 2 --kv-channels 128"


def plain_lightning(x_SBD: Tensor, weights: dict[str, Tensor], spec: LightningSpec) -> Tensor:
    """Token by token, head by head."""
    q, k, v, z = (x_SBD @ weights["in_proj.weight"].T).chunk(4, dim=-1)
    outputs = []
    for head, slope in enumerate(spec.slopes(0)):
        columns = slice(head * spec.head_dim, (head + 1) * spec.head_dim)
        queries, keys, values = (F.silu(part[..., columns]) for part in (q, k, v))
        state = x_SBD.new_zeros(B, spec.head_dim, spec.head_dim)
        of_head = []
        for token in range(S):
            state = math.exp(-slope) * state + values[token, :, :, None] * keys[token, :, None]
            of_head.append((state * queries[token, :, None]).sum(-1))
        outputs.append(torch.stack(of_head))
    y = torch.cat(outputs, dim=-1)
    normed = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * weights["norm.weight"]
    return (normed * z.sigmoid()) @ weights["out_proj.weight"].T


@pytest.mark.parametrize("flags", [LIGHTNING, WIDE_HEADS], ids=["one head each", "two heads of the kernels each"])
def test_outputs_and_gradients_are_those_of_plain_pytorch(flags: str):
    spec = mixer_of(LightningSpec, flags)
    assert spec.heads_per_group == (2 if spec.head_dim == 128 else 1)
    check_outputs_and_gradients(spec, lambda x, weights: plain_lightning(x, weights, spec))


def test_packed_documents_are_documents_by_themselves():
    check_packed_documents(mixer_of(LightningSpec, LIGHTNING))


@pytest.mark.parametrize("block_size", [4, 256])
def test_it_is_the_mixer_of_transformers(block_size: int):
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.minimax.modeling_minimax")
    config = transformers.MiniMaxConfig(
        hidden_size=D, num_attention_heads=H, head_dim=N, num_hidden_layers=2, block_size=block_size, rms_norm_eps=0.3
    )

    class Mixer(modeling.MiniMaxLightningAttention):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x, None, None)[0]

    def stored(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        q, k, v, z = weights["in_proj.weight"].chunk(4)
        heads = torch.stack([part.unflatten(0, (H, N)) for part in (q, k, v)], dim=1)
        return {
            "qkv_proj.weight": heads.flatten(0, 2), "output_gate.weight": z, "norm.weight": weights["norm.weight"],
            "out_proj.weight": weights["out_proj.weight"],
        }  # fmt: skip

    check_transformers_module(Mixer(config, 0), mixer_of(LightningSpec, LIGHTNING), stored)


def test_slopes_fall_with_heads_and_layers():
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.minimax.modeling_minimax")
    config = transformers.MiniMaxConfig(hidden_size=64, num_attention_heads=16, num_hidden_layers=5)
    spec = mixer_of(LightningSpec, f"{LIGHTNING} --num-attention-heads 16 --num-layers 5 --linear-attention-freq [1]*5")
    for layer in range(5):
        theirs = modeling.MiniMaxLightningAttention(config, layer).slope_rate.flatten()
        torch.testing.assert_close(torch.tensor(spec.slopes(layer)), theirs)
    assert spec.slopes(5) == spec.slopes(4), "a depth of multi-token prediction has the last layer's"
    assert max(spec.slopes(4)) < 1e-5 < min(spec.slopes(0))


def test_parameters_and_flops_by_hand():
    spec = model_spec(run_of(LIGHTNING))
    gemms, mlps = 5 * D * INNER, 2 * 24 * D
    assert parameter_count(spec) == 2 * (gemms + mlps + INNER + 2 * D) + D + 2 * 90 * D
    # Half of a chunk of 4 inside chunks, twice; a token enters a state and leaves it.
    scan = 2 * 2 * 2 * INNER + 2 * 2 * INNER * N
    assert model_flops_per_token(spec) == pytest.approx(6 * (2 * (gemms + mlps) + 90 * D) + 2 * 3 * scan)
    kind = linear_attention_kind(spec)
    assert kind is LightningSpec
    formula = flops_formula(linear=kind, experts=True)
    assert "X 5 h p" in formula and "3 T X (2 c p + 4 p P)" in formula


def test_forward_flops_on_one_rank_are_a_third_of_the_layer_s():
    check_forward_flops(mixer_of(LightningSpec, LIGHTNING), run_of(LIGHTNING), inner_size=INNER)
