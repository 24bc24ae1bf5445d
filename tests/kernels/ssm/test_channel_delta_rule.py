"""The delta rule with a decay of every key channel, in chunks, against its definition in float64, also where decays are strong."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from petatron.kernels.ssm import chunk_channel_delta_rule as kernels
from petatron.kernels.ssm.chunk_channel_delta_rule import chunk_delta_rule
from petatron.kernels.ssm.chunk_delta_rule import chunk_delta_rule as scalar_rule
from petatron.kernels.ssm.delta_recurrence import delta_gates
from petatron.layers.ssm.autograd_ops import DeltaInputs
from tests.kernels.ssm.by_token import delta_rule_by_token
from tests.kernels.ssm.recurrence_checks import EXACT, assert_exact, document_starts
from tests.kernels.ssm.test_delta_rule import N, delta_inputs, delta_recurrence
from tests.longform import later


def channel_inputs(length: int, *, strength: float = 1.0, **sizes: int) -> DeltaInputs:
    """Log decays are softplus values times `strength`, those of every channel others."""
    inputs = delta_inputs(length, **sizes)
    decays = torch.randn(*inputs.v_SBHP.shape[:3], N, dtype=torch.float64)
    return inputs._replace(g=-strength * F.softplus(decays))


RULE = delta_recurrence(kernels, channel_inputs)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize(("length", "chunk_size"), [(1, 4), (7, 1), (12, 4), (13, 64), (16, 5), (37, 16)])
def test_no_chunk_size_changes_the_rule(length: int, chunk_size: int, with_state: bool, packed: bool):
    RULE.check_chunk_size(length, chunk_size, with_state=with_state, packed=packed)


@pytest.mark.parametrize("key_heads", [1, 4])
def test_equal_decays_of_all_channels_are_a_decay_of_the_head(key_heads: int):
    inputs = delta_inputs(13, key_heads=key_heads)
    by_channel = inputs._replace(g=inputs.g[..., None].expand(*inputs.g.shape, N))
    assert_exact(chunk_delta_rule(*by_channel, chunk_size=8), scalar_rule(*inputs, chunk_size=8))


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
        assert_exact(chunk_delta_rule(*inputs, chunk_size=chunk_size), (exact, state))
    narrow, last = chunk_delta_rule(*(tensor.float() for tensor in inputs), chunk_size=64)
    assert (narrow - exact).norm() / exact.norm() < 1e-6 and (last - state).norm() / state.norm() < 1e-6


@pytest.mark.parametrize("strong", [False, True])
def test_gradients_are_those_of_the_recurrence(strong: bool):
    inputs, starts = (strong_and_weak(40), None) if strong else (channel_inputs(11), document_starts(11, (0, 4), (7,)))
    RULE.check_gradients_by_token(inputs, 16, starts=starts)


@pytest.mark.parametrize("packed", [later(False), True])
def test_the_gradients_of_the_rule(packed: bool):
    inputs = channel_inputs(5, batch=1, heads=2, key_heads=1)
    RULE.check_gradients_by_differences(inputs, 4, packed=packed)


def test_a_state_that_alone_is_used_has_its_gradient():
    RULE.check_gradients_of_the_state("k_SBGN", "v_SBHP", "g")


def test_decoding_step_by_step_is_the_rule():
    RULE.check_decoding()


@pytest.mark.parametrize("cut", [1, 8])
def test_a_sequence_in_parts_passes_its_state_on(cut: int):
    RULE.check_parts(cut)


def test_half_precision_is_computed_in_float32():
    RULE.check_half_precision()


def test_a_head_s_rate_is_that_of_all_its_channels():
    b, a = torch.randn(3, 2, dtype=torch.float64), torch.randn(3, 2, 4, dtype=torch.float64)
    A_log, bias = torch.randn(2, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)
    g, beta = delta_gates(b, a, A_log, bias)
    for head in range(2):
        expected = -A_log[head].exp() * torch.log1p((a[:, head] + bias[head]).exp())
        torch.testing.assert_close(g[:, head], expected, **EXACT)
    torch.testing.assert_close(beta, b.sigmoid(), **EXACT)
