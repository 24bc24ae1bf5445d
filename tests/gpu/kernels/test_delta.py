"""The gated delta rule, with decays of heads and of channels, and its norm on a CUDA device against float64, at published sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.registry import KernelContext, choose_kernel
from petatron.kernels.ssm import chunk_channel_delta_rule, chunk_delta_rule, output_gate
from petatron.layers.ssm.autograd_ops import DeltaInputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WIDTH = 128
RULE_BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Norm of the difference over the norm; GEMMs of bfloat16 have operands that were rounded, each to 2e-3."""
OPTIONS = {"chunk_size": 64}
OPERATIONS = {3: ("gated delta rule", chunk_delta_rule), 4: ("gated delta rule by channel", chunk_channel_delta_rule)}
"""By the dimensions of g."""


def far(ours: Tensor, true: Tensor) -> float:
    assert ours.shape == true.shape and ours.isfinite().all()
    return float((ours.double() - true.double()).norm() / true.double().norm().clamp(min=1e-30))


def triton_rule(dtype: torch.dtype, operation: str = "gated delta rule") -> Any:
    choice = choose_kernel(operation, KernelContext.of(torch.device("cuda"), dtype, allow_compile=True))
    assert choice.name == "triton", str(choice)
    return choice.functions


def rule_inputs(
    length: int, dtype: torch.dtype, *, batch: int = 2, key_heads: int = 2, heads: int = 4, value_dim: int = WIDTH
) -> DeltaInputs:
    """Queries, keys and values are parts of wider rows, as the convolution leaves them."""
    torch.manual_seed(3)
    keys, values = key_heads * WIDTH, heads * value_dim
    rows = torch.randn(length, batch, 2 * keys + values, device="cuda", dtype=dtype)
    q, k, v = rows.split((keys, keys, values), dim=-1)
    return DeltaInputs(
        q.unflatten(-1, (key_heads, WIDTH)),
        k.unflatten(-1, (key_heads, WIDTH)),
        v.unflatten(-1, (heads, value_dim)),
        -F.softplus(torch.randn(length, batch, heads, device="cuda")),
        torch.rand(length, batch, heads, device="cuda"),
    )


def with_channels(inputs: DeltaInputs, *, strong: bool = False) -> DeltaInputs:
    """With a decay of every key channel; strong: of which some are exp(-20), some hardly any."""
    g = -F.softplus(torch.randn(*inputs.v_SBHP.shape[:3], WIDTH, device="cuda"))
    if strong:
        g[..., ::3], g[..., 1::3] = -20.0, -1e-6
    return inputs._replace(g=g)


def compare(
    inputs: DeltaInputs, *, starts: Tensor | None = None, state: Tensor | None = None, grad_state: Tensor | None = None
) -> None:
    """Outputs, final state and all gradients against float64."""
    dtype = inputs.v_SBHP.dtype
    operation, plain = OPERATIONS[inputs.g.dim()]
    found, bound = triton_rule(dtype, operation), RULE_BOUNDS[dtype]
    exact = DeltaInputs(*(tensor.double() for tensor in inputs))
    wide_state, wide_grad = (None if tensor is None else tensor.double() for tensor in (state, grad_state))
    ours = found.chunk_delta_rule(*inputs, **OPTIONS, starts_SB=starts, initial_state=state)
    true = plain.chunk_delta_rule(*exact, **OPTIONS, starts_SB=starts, initial_state=wide_state)
    assert [far(one, other) <= bound for one, other in zip(ours, true, strict=True)] == [True] * 2
    grad = torch.randn(inputs.v_SBHP.shape, device="cuda", dtype=dtype)
    ours = found.chunk_delta_rule_backward(grad, grad_state, *inputs, **OPTIONS, starts_SB=starts, initial_state=state)
    true = plain.chunk_delta_rule_backward(
        grad.double(), wide_grad, *exact, **OPTIONS, starts_SB=starts, initial_state=wide_state
    )
    for name, one, other in zip((*DeltaInputs._fields, "initial state"), ours, true, strict=True):
        assert (one is None) == (other is None), name
        if one is not None and other is not None:
            assert far(one, other) <= bound, (name, far(one, other))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", RULE_BOUNDS, ids=str)
def test_the_delta_rule_and_its_gradients(dtype: torch.dtype, packed: bool):
    inputs = rule_inputs(300, dtype)
    compare(inputs, starts=torch.rand(300, 2, device="cuda") < 0.02 if packed else None)


@pytest.mark.parametrize("dtype", RULE_BOUNDS, ids=str)
def test_the_delta_rule_after_a_state(dtype: torch.dtype):
    """With values as wide as context parallelism makes them, from one state for all heads."""
    inputs = rule_inputs(200, dtype, value_dim=2 * WIDTH)
    state = torch.eye(WIDTH, 2 * WIDTH, device="cuda").roll(WIDTH, dims=1).expand(2, 4, -1, -1)
    compare(inputs, state=state, grad_state=torch.randn(2, 4, WIDTH, 2 * WIDTH, device="cuda"))


@pytest.mark.parametrize("length", [1, 15, 64])
def test_the_delta_rule_of_few_tokens_and_one_head(length: int):
    compare(rule_inputs(length, torch.bfloat16, batch=1, key_heads=1, heads=1))


def test_decays_of_all_sizes_and_strengths_of_zero_and_one():
    inputs = rule_inputs(200, torch.bfloat16)
    inputs.g[::7] = -30.0
    inputs.g[:, :, 1] = -1e-4
    inputs.beta_SBH[::3], inputs.beta_SBH[1::3] = 0.0, 1.0
    compare(inputs)


def test_keys_that_are_much_alike():
    """Powers of such a system explode where its inverse does not."""
    inputs = rule_inputs(200, torch.bfloat16)
    inputs.k_SBGN.add_(3.0)
    inputs.g.mul_(1e-3)
    found, exact = triton_rule(torch.bfloat16), DeltaInputs(*(tensor.double() for tensor in inputs))
    ours = found.chunk_delta_rule(*inputs, **OPTIONS)
    true = chunk_delta_rule.chunk_delta_rule(*exact, **OPTIONS)
    assert all(far(one, other) <= 3e-2 for one, other in zip(ours, true, strict=True))


@pytest.mark.parametrize(
    "channels", [pytest.param(False, id="one layer of Qwen3-Next"), pytest.param(True, id="one layer of Kimi-Linear")]
)
def test_all_heads_of_one_sequence_and_the_same_result_every_time(channels: bool):
    """Against the reference in float32."""
    inputs = rule_inputs(4096, torch.bfloat16, batch=1, key_heads=32 if channels else 16, heads=32)
    inputs = with_channels(inputs) if channels else inputs
    operation, plain = OPERATIONS[inputs.g.dim()]
    found = triton_rule(torch.bfloat16, operation)
    grad = torch.randn(inputs.v_SBHP.shape, device="cuda", dtype=torch.bfloat16)

    def results(rule: Any, inputs: DeltaInputs, grad: Tensor) -> tuple[Tensor, ...]:
        gradients = rule.chunk_delta_rule_backward(grad, None, *inputs, **OPTIONS)[:5]
        return *rule.chunk_delta_rule(*inputs, **OPTIONS), *gradients

    once, again = (results(found, inputs, grad) for _ in range(2))
    true = results(plain, DeltaInputs(*(tensor.float() for tensor in inputs)), grad.float())
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))
    assert all(far(one, other) <= RULE_BOUNDS[torch.bfloat16] for one, other in zip(once, true, strict=True))


def test_states_beyond_two_billion_elements():
    """A sequence in one run and in two: the last part's offsets into the states do not fit 32 bits."""
    length, last = 265_000, 1_000
    assert length // 64 * 32 * WIDTH**2 > 2**31
    inputs, found = rule_inputs(length, torch.bfloat16, batch=1, key_heads=16, heads=32), triton_rule(torch.bfloat16)
    inputs.g.mul_(1e-2)
    whole, final = found.chunk_delta_rule(*inputs, **OPTIONS)
    _, state = found.chunk_delta_rule(*(tensor[:-last] for tensor in inputs), **OPTIONS)
    rest = DeltaInputs(*(tensor[-last:] for tensor in inputs))
    outputs, end = found.chunk_delta_rule(*rest, **OPTIONS, initial_state=state)
    assert far(whole[-last:], outputs) <= 1e-2 and far(final, end) <= 1e-2
    grad = torch.randn(inputs.v_SBHP.shape, device="cuda", dtype=torch.bfloat16)
    of_whole = found.chunk_delta_rule_backward(grad, None, *inputs, **OPTIONS)[:5]
    of_rest = found.chunk_delta_rule_backward(grad[-last:], None, *rest, **OPTIONS, initial_state=state)[:5]
    assert all(far(one[-last:], other) <= 1e-2 for one, other in zip(of_whole, of_rest, strict=True))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-3)], ids=str)
def test_the_norm_and_its_gate(dtype: torch.dtype, bound: float):
    choice = choose_kernel("norm, then gate", KernelContext.of(torch.device("cuda"), dtype, allow_compile=True))
    assert choice.name == "compiled", str(choice)
    y, z, grad = (torch.randn(64, 2, 32, 128, device="cuda").to(dtype) for _ in range(3))
    weight = torch.randn(128, device="cuda").to(dtype)
    exact = [tensor.double() for tensor in (y, z, weight)]
    assert (
        far(choice.functions.norm_then_gate(y, z, weight, eps=1e-6), output_gate.norm_then_gate(*exact, eps=1e-6))
        <= bound
    )
    ours = choice.functions.norm_then_gate_backward(grad, y, z, weight, eps=1e-6)
    true = output_gate.norm_then_gate_backward(grad.double(), *exact, eps=1e-6)
    assert all(far(one, other) <= bound for one, other in zip(ours, true, strict=True))


@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("dtype", RULE_BOUNDS, ids=str)
def test_decays_of_channels_and_their_gradients(dtype: torch.dtype, strong: bool):
    starts = torch.rand(300, 2, device="cuda") < 0.02
    compare(with_channels(rule_inputs(300, dtype, key_heads=4), strong=strong), starts=None if strong else starts)


@pytest.mark.parametrize("dtype", RULE_BOUNDS, ids=str)
def test_decays_of_channels_after_a_state(dtype: torch.dtype):
    """With two value heads for a key head, and values as wide as context parallelism makes them."""
    state = torch.eye(WIDTH, 2 * WIDTH, device="cuda").roll(WIDTH, dims=1).expand(2, 4, -1, -1)
    inputs = with_channels(rule_inputs(200, dtype, value_dim=2 * WIDTH))
    compare(inputs, state=state, grad_state=torch.randn(2, 4, WIDTH, 2 * WIDTH, device="cuda"))


@pytest.mark.parametrize("length", [1, 15, 64])
def test_decays_of_channels_of_few_tokens_and_one_head(length: int):
    compare(with_channels(rule_inputs(length, torch.bfloat16, batch=1, key_heads=1, heads=1)))
