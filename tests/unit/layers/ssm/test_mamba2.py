"""Mamba-2 is the equation of the paper: against plain PyTorch, against transformers, and counted by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.config import load_config
from petatron.config.schema.fields import fields_by_name
from petatron.estimate.flops import flops_formula, model_flops_per_token, parameter_count
from petatron.kernels.attention.documents import Documents
from petatron.layers.forward_context import ForwardContext
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.ssm.initial_values import LogDecayValues, StepBiasValues
from petatron.layers.ssm.mamba2 import Mamba2, Mamba2Spec
from petatron.layers.ssm.output_gate import GateThenRMSNorm, GroupedRMSNorm, RMSNormThenGate
from petatron.models.registry import model_spec
from petatron.sharding.initial_values import UniformValues
from petatron.sharding.shard_spec import TensorShard

S, B, D, H, P, G, N, W = 11, 2, 16, 4, 8, 2, 6, 4
INNER = H * P
BASE = (
    f"--hybrid-layer-pattern MM --hidden-size {D} --seq-length {S} --vocab-size 90 --normalization RMSNorm "
    f"--position-embedding-type none --hidden-dropout 0 --make-vocab-size-divisible-by 2 --mamba-state-dim {N} "
    f"--mamba-head-dim {P} --mamba-num-groups {G} --mamba-chunk-size 4 --untie-embeddings-and-output-weights"
)
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def run_of(flags: str = ""):
    return load_config([*BASE.split(), *flags.split()], require_training=False).config


def mixer_of(flags: str = "") -> Mamba2Spec:
    mixer = model_spec(run_of(flags)).layers[0].mixer
    assert isinstance(mixer, Mamba2Spec)
    return mixer


def module_of(spec: Mamba2Spec) -> Mamba2:
    module = spec.build(0).double()
    generator = torch.Generator().manual_seed(5)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.4, generator=generator)
    return module


def inputs() -> Tensor:
    return torch.randn(S, B, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)


def plain_mamba2(x_SBD: Tensor, weights: dict[str, Tensor], spec: Mamba2Spec) -> Tensor:
    """Token by token, head by head."""
    rows = x_SBD @ weights["in_proj.weight"].T
    factors = zip(rows.split((INNER, INNER, G * N, G * N, H), dim=-1), spec.multipliers or (1.0,) * 5)
    z, *of_channels, dt = (part * factor for part, factor in factors)
    channels = torch.cat(of_channels, dim=-1)
    padded = F.pad(channels.permute(1, 2, 0), (W - 1, 0))
    conv = F.conv1d(padded, weights["conv.weight"], weights["conv.bias"], groups=channels.shape[-1])
    x, B_states, C_states = F.silu(conv).permute(2, 0, 1).split((INNER, G * N, G * N), dim=-1)
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
    spec = mixer_of(flags)
    module, x = module_of(spec), inputs()
    target = torch.randn(S, B, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    y = module(x, ForwardContext())
    names, parameters = zip(*module.named_parameters())
    theirs = plain_mamba2(x, dict(zip(names, parameters)), spec)
    torch.testing.assert_close(y, theirs, **EXACT)
    found = torch.autograd.grad((y * target).sum(), [x, *parameters])
    expected = torch.autograd.grad((theirs * target).sum(), [x, *parameters])
    for name, ours, right in zip(["x", *names], found, expected):
        torch.testing.assert_close(ours, right, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


def test_the_two_orders_share_a_norm_and_neither_is_the_other():
    assert issubclass(GateThenRMSNorm, GroupedRMSNorm) and issubclass(RMSNormThenGate, GroupedRMSNorm)
    assert not issubclass(RMSNormThenGate, GateThenRMSNorm)
    assert "with none y silu(z), gated without a norm" in fields_by_name()["mamba_gated_norm"].doc


def test_packed_documents_are_documents_by_themselves():
    spec = mixer_of()
    module, x = module_of(spec), inputs().detach()
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


def test_it_is_the_mixer_of_transformers():
    transformers = pytest.importorskip("transformers")
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = transformers.Mamba2Config(
        hidden_size=D, num_heads=H, head_dim=P, expand=2, state_size=N, n_groups=G, conv_kernel=W, chunk_size=4,
        layer_norm_epsilon=1e-5, num_hidden_layers=1, use_bias=False, use_conv_bias=True,
    )  # fmt: skip
    theirs = Mamba2Mixer(config, 0).eval()
    ours = module_of(mixer_of("--mamba-norm-groups 1")).float()
    weights = dict(ours.named_parameters())
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(weights[name.replace("conv1d", "conv")].reshape(parameter.shape))
        x = inputs().detach().float()
        y = theirs(x.transpose(0, 1))
        torch.testing.assert_close(ours(x, ForwardContext()), y.transpose(0, 1), rtol=1e-4, atol=1e-5)


def test_parameters_and_flops_by_hand():
    spec = model_spec(run_of())
    gemms = D * (2 * INNER + 2 * G * N + H) + INNER * D
    channels = INNER + 2 * G * N
    others = channels * (W + 1) + 3 * H + INNER + D
    assert parameter_count(spec) == 2 * (gemms + others) + D + 2 * 90 * D
    scan = 2 * 2 * (G * N + INNER) + 4 * INNER * N  # half of a chunk of 4; into the states and out of them
    assert "12 A q" in flops_formula(hybrid=True) and "F g h f + MoE" in flops_formula(hybrid=True, experts=True)
    assert model_flops_per_token(spec) == pytest.approx(6 * (2 * gemms + 90 * D) + 2 * 3 * (scan + 2 * W * channels))
    beside = model_spec(
        run_of("--hybrid-layer-pattern PM --num-attention-heads 2 --disable-bias-linear --mamba-gated-norm none")
    )
    assert parameter_count(beside) == parameter_count(spec) + 4 * D * D - 2 * INNER
    attention = 6 * 4 * D * D + 12 * D * S / 2
    assert model_flops_per_token(beside) == pytest.approx(model_flops_per_token(spec) + attention)


def test_forward_flops_on_one_rank_are_a_third_of_the_layer_s():
    run, spec = run_of(), mixer_of()
    shape = ActivationShape.from_config(run, device="cpu")
    gemms = sum(param.num_elements for param in spec.params().values() if param.is_gemm)
    mixing = spec.mixing_flops(S, causal=True) / 3
    assert spec.forward_flops(shape) - spec.norm_flops(shape) == pytest.approx(2 * gemms * S + mixing)
    assert spec.recompute_flops(shape, "mamba") == pytest.approx(spec.forward_flops(shape) - 2 * S * INNER * D)


def shard(start: int, size: int, *, name: str = "layers.0.mamba.A_log", whole: int = 64) -> TensorShard:
    return TensorShard(name, (whole,), (start,), (size,), (0,), True)


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
