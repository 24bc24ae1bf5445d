"""The Triton delta rule with a decay of every key channel, and its gradients, against the plain one in float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.ssm import chunk_channel_delta_rule as plain
from tests.kernels.triton.test_triton_scan import far
from tests.longform import later

pytest.importorskip("triton")
from petatron.kernels.triton.ssm import chunk_channel_delta_rule as ours
from petatron.kernels.triton.ssm import chunk_delta_rule as scalar
from tests.kernels.triton import test_triton_delta_rule as scalar_tests
from tests.kernels.triton.test_triton_delta_rule import BOUNDS, DEVICE, DTYPES

compare = partial(scalar_tests.compare, ours=ours, plain=plain)
CASES = [
    # (length, batch, value heads, value dim, key heads, key dim, chunk size), packed documents, initial state and gradient of the final one
    ((18, 1, 2, 16, 1, 12, 16), True, True),
    ((35, 1, 1, 40, 1, 16, 64), False, False),
    later((18, 2, 2, 16, 2, 16, 16), False, True),
    later((35, 1, 3, 12, 1, 40, 32), True, False),
    later((50, 2, 4, 16, 2, 16, 16), True, True),
    later((7, 1, 2, 64, 1, 128, 64), False, True),
    later((130, 1, 2, 128, 2, 128, 64), True, True),
    later((130, 1, 2, 128, 2, 128, 64), False, False),
    later((40, 1, 2, 144, 2, 16, 64), True, True),
    later((40, 1, 1, 16, 1, 144, 64), True, True),
]


def rule_inputs(case: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    q, k, v, g, beta = scalar_tests.rule_inputs(case, dtype)
    return q, k, v, -F.softplus(torch.randn(*g.shape, q.shape[-1], device=DEVICE) - 1.0), beta


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("case", "packed", "with_state"), CASES, ids=str)
def test_rule_and_gradients(case: tuple[int, ...], packed: bool, with_state: bool, dtype: torch.dtype):
    inputs = rule_inputs(case, dtype)
    length, batch, heads, value_dim, _, key_dim, chunk_size = case
    starts = torch.rand(length, batch, device=DEVICE) < 0.1 if packed else None
    state, grad_state = None, None
    if with_state:
        state, grad_state = torch.randn(2, batch, heads, value_dim, key_dim, device=DEVICE).mT
    compare(inputs, chunk_size=chunk_size, starts=starts, state=state, grad_state=grad_state, bound=BOUNDS[dtype])


def test_equal_decays_of_all_channels_are_a_decay_of_the_head():
    q, k, v, g, beta = scalar_tests.rule_inputs((20, 1, 2, 16, 1, 16, 16), torch.float32)
    expanded = g[..., None].expand(*g.shape, 16)
    found = ours.chunk_delta_rule(q, k, v, expanded, beta, chunk_size=16)
    for one, other in zip(found, scalar.chunk_delta_rule(q, k, v, g, beta, chunk_size=16), strict=True):
        assert far(one, other) <= 1e-6
    grad_o = torch.randn(v.shape, device=DEVICE)
    found = ours.chunk_delta_rule_backward(grad_o, None, q, k, v, expanded, beta, chunk_size=16)
    expected = scalar.chunk_delta_rule_backward(grad_o, None, q, k, v, g, beta, chunk_size=16)
    for number, (one, other) in enumerate(zip(found[:5], expected[:5], strict=True)):
        assert far(one.sum(dim=-1) if number == 3 else one, other) <= 1e-5


@pytest.mark.parametrize(("chunk", "bound"), [(16, 3e-5), later(32, 1e-4)])
def test_strong_decays_beside_weak_ones_and_strengths_of_zero_and_one(chunk: int, bound: float):
    """Channels forget nearly all at every token, at every second, at the first ones or hardly anything; the tiny gradients of strong
    decays are right too, which no sum of larger terms that cancel would give. Weak decays after strong ones of a chunk are differences
    of its sums, with their rounding."""
    q, k, v, g, beta = rule_inputs((40, 1, 2, 16, 1, 16, 16), torch.float32)
    g[..., 0], g[..., 1] = -20.0, -1e-9
    g[::2, ..., 2], g[1::2, ..., 2] = -20.0, 0.0
    g[:20, ..., 3], g[20:, ..., 3] = -20.0, -1e-3
    beta[::3], beta[1::3] = 0.0, 1.0
    grads, true = compare((q, k, v, g, beta), chunk_size=chunk, bound=bound)
    found, exact = grads[3][..., 0], true[3][..., 0]
    assert 0 < float(exact.abs().max()) < 1e-6
    assert far(found, exact) <= 1e-4


@pytest.mark.matrix
def test_the_same_result_every_time():
    inputs = rule_inputs((18, 1, 2, 16, 1, 16, 16), torch.float32)
    grad_o = torch.randn(inputs[2].shape, device=DEVICE)
    once, again = (ours.chunk_delta_rule_backward(grad_o, None, *inputs, chunk_size=16)[:5] for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))
