"""The delta rule with a decay of every key channel, in chunks, against its definition in float64, also where decays are strong."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.ssm import chunk_channel_delta_rule as kernels
from petatron.kernels.ssm.chunk_channel_delta_rule import chunk_delta_rule
from petatron.kernels.ssm.chunk_delta_rule import chunk_delta_rule as scalar_rule
from petatron.kernels.ssm.delta_recurrence import delta_gates, delta_rule_by_token, delta_update
from petatron.layers.ssm import delta_ops as ops
from petatron.layers.ssm.delta_ops import DeltaInputs
from tests.kernels.test_delta_rule import EXACT, N, delta_inputs, initial, part
from tests.kernels.test_ssm import document_starts
from tests.longform import later


def channel_inputs(length: int, *, strength: float = 1.0, **sizes: int) -> DeltaInputs:
    """Log decays are softplus values times `strength`, those of every channel others."""
    inputs = delta_inputs(length, **sizes)
    decays = torch.randn(*inputs.v_SBHP.shape[:3], N, dtype=torch.float64)
    return inputs._replace(g=-strength * F.softplus(decays))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize(("length", "chunk_size"), [(1, 4), (7, 1), (12, 4), (13, 64), (16, 5), (37, 16)])
def test_no_chunk_size_changes_the_rule(length: int, chunk_size: int, with_state: bool, packed: bool):
    inputs = channel_inputs(length)
    options = {
        "starts_SB": document_starts(length, (0, length // 3, length // 2), (length - 1,)) if packed else None,
        "initial_state": initial(inputs) if with_state else None,
    }
    for one, other in zip(
        chunk_delta_rule(*inputs, chunk_size=chunk_size, **options), delta_rule_by_token(*inputs, **options)
    ):
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize("key_heads", [1, 4])
def test_equal_decays_of_all_channels_are_a_decay_of_the_head(key_heads: int):
    inputs = delta_inputs(13, key_heads=key_heads)
    by_channel = inputs._replace(g=inputs.g[..., None].expand(*inputs.g.shape, N))
    for one, other in zip(chunk_delta_rule(*by_channel, chunk_size=8), scalar_rule(*inputs, chunk_size=8)):
        torch.testing.assert_close(one, other, **EXACT)


def strong_and_weak(length: int) -> DeltaInputs:
    """Decays of exp(-20) per token, of hardly any, and both in turn: what a sum over a chunk of 64 would lose is in every channel."""
    inputs = channel_inputs(length)
    g = torch.empty_like(inputs.g)
    g[..., 0], g[..., 1], g[..., 2:] = -20.0, -1e-9, inputs.g[..., 2:]
    g[::2, ..., 3], g[1::2, ..., 3] = -20.0, 0.0
    g[:32, ..., 4], g[32:, ..., 4] = -20.0, -1e-3
    return inputs._replace(g=g)


def test_strong_decays_neither_overflow_nor_lose_weak_ones():
    inputs = strong_and_weak(70)
    exact, state = delta_rule_by_token(*inputs)
    for chunk_size in (16, 64):
        o, last = chunk_delta_rule(*inputs, chunk_size=chunk_size)
        torch.testing.assert_close(o, exact, **EXACT)
        torch.testing.assert_close(last, state, **EXACT)
    narrow, last = chunk_delta_rule(*(tensor.float() for tensor in inputs), chunk_size=64)
    assert (narrow - exact).norm() / exact.norm() < 1e-6 and (last - state).norm() / state.norm() < 1e-6


def gradients(inputs: DeltaInputs, *, chunked: bool, starts: Tensor | None = None) -> tuple[Tensor, ...]:
    leaves = DeltaInputs(*(tensor.detach().clone().requires_grad_() for tensor in inputs))
    options = {"starts_SB": starts}
    if chunked:
        o, state = ops.delta_rule(leaves, kernels=kernels, chunk_size=16, **options)
    else:
        o, state = delta_rule_by_token(*leaves, **options)
    return torch.autograd.grad((o * o.detach().cos()).sum() + state.square().sum(), leaves)


@pytest.mark.parametrize("strong", [False, True])
def test_gradients_are_those_of_the_recurrence(strong: bool):
    inputs, starts = (strong_and_weak(40), None) if strong else (channel_inputs(11), document_starts(11, (0, 4), (7,)))
    ours, expected = (gradients(inputs, chunked=chunked, starts=starts) for chunked in (True, False))
    for one, other in zip(ours, expected):
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize("packed", [later(False), True])
def test_the_gradients_of_the_rule(packed: bool):
    inputs = channel_inputs(5, batch=1, heads=2, key_heads=1)
    starts = document_starts(5, (2,)) if packed else None
    tensors = [tensor.requires_grad_() for tensor in (*inputs, initial(inputs))]

    def rule(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        *given, state = tensors
        return ops.delta_rule(DeltaInputs(*given), kernels=kernels, chunk_size=4, starts_SB=starts, initial_state=state)

    assert torch.autograd.gradcheck(rule, tensors)


def test_a_state_that_alone_is_used_has_its_gradient():
    inputs = DeltaInputs(*(tensor.requires_grad_() for tensor in channel_inputs(5)))
    wanted = inputs.k_SBGN, inputs.v_SBHP, inputs.g
    _, state = ops.delta_rule(inputs, kernels=kernels, chunk_size=2)
    _, expected = delta_rule_by_token(*inputs)
    for one, other in zip(
        torch.autograd.grad(state.square().sum(), wanted), torch.autograd.grad(expected.square().sum(), wanted)
    ):
        torch.testing.assert_close(one, other, **EXACT)


def test_decoding_step_by_step_is_the_rule():
    inputs = channel_inputs(9)
    whole, last = chunk_delta_rule(*inputs, chunk_size=4)
    state = torch.zeros_like(last)
    for token in range(9):
        o, state = delta_update(state, *(tensor[token] for tensor in inputs))
        torch.testing.assert_close(o, whole[token], **EXACT)
    torch.testing.assert_close(state, last, **EXACT)


@pytest.mark.parametrize("cut", [1, 8])
def test_a_sequence_in_parts_passes_its_state_on(cut: int):
    inputs = channel_inputs(13)
    whole, last = delta_rule_by_token(*inputs)
    first, state = chunk_delta_rule(*part(inputs, slice(0, cut)), chunk_size=4)
    second, state = chunk_delta_rule(*part(inputs, slice(cut, 13)), chunk_size=4, initial_state=state)
    torch.testing.assert_close(torch.cat((first, second)), whole, **EXACT)
    torch.testing.assert_close(state, last, **EXACT)


def test_half_precision_is_computed_in_float32():
    inputs = channel_inputs(12)
    exact, state = chunk_delta_rule(*inputs, chunk_size=4)
    half = DeltaInputs(*(tensor.to(torch.bfloat16) for tensor in inputs))._replace(g=inputs.g.float())
    o, half_state = chunk_delta_rule(*half, chunk_size=4)
    assert o.dtype == torch.bfloat16 and half_state.dtype == torch.float32
    assert (o - exact).norm() / exact.norm() < 0.02 and (half_state - state).norm() / state.norm() < 0.02


def test_a_head_s_rate_is_that_of_all_its_channels():
    b, a = torch.randn(3, 2, dtype=torch.float64), torch.randn(3, 2, 4, dtype=torch.float64)
    A_log, bias = torch.randn(2, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)
    g, beta = delta_gates(b, a, A_log, bias)
    for head in range(2):
        expected = -A_log[head].exp() * torch.log1p((a[:, head] + bias[head]).exp())
        torch.testing.assert_close(g[:, head], expected, **EXACT)
    torch.testing.assert_close(beta, b.sigmoid(), **EXACT)
