"""The Triton gated delta rule and its gradients against the plain one in float64: every shape, documents, states, strong decays."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.ssm import chunk_delta_rule as plain
from petatron.kernels.ssm.chunk_delta_rule import DeltaGrads
from tests.kernels.triton.test_triton_scan import far, wide
from tests.longform import later

pytest.importorskip("triton")
from petatron.kernels.triton.ssm import chunk_delta_rule as ours
from petatron.kernels.triton.ssm.delta_rule.tiles import delta_chunks
from petatron.kernels.triton.ssm.delta_rule.ut_transform import ut_transform

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
"""The interpreter multiplies the bits of half-precision numbers, not the numbers."""
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Norm of the difference over the norm."""
CASES = [
    # (length, batch, value heads, value dim, key heads, key dim, chunk size), packed documents, initial state and gradient of the final one
    ((18, 1, 2, 16, 1, 12, 16), True, True),
    ((35, 1, 1, 40, 1, 16, 64), False, False),
    later((18, 2, 2, 16, 2, 16, 16), False, True),
    later((35, 1, 3, 12, 1, 20, 32), True, False),
    later((50, 2, 4, 16, 2, 16, 16), True, True),
    later((7, 1, 2, 64, 1, 128, 64), False, True),
    later((130, 1, 2, 128, 1, 128, 64), True, True),
    later((130, 1, 2, 128, 1, 128, 64), False, False),
    later((40, 1, 2, 144, 2, 16, 64), True, True),
    later((40, 1, 1, 16, 1, 144, 64), True, True),
]
NAMES = ("q", "k", "v", "g", "beta", "initial state")


def rule_inputs(case: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k and v are parts of wider rows, as the convolution leaves them."""
    length, batch, heads, value_dim, key_heads, key_dim, _ = case
    torch.manual_seed(length)
    sections = (key_heads * key_dim, key_heads * key_dim, heads * value_dim)
    q, k, v = torch.randn(length, batch, sum(sections), device=DEVICE).to(dtype).split(sections, dim=-1)
    return (
        q.unflatten(-1, (key_heads, key_dim)),
        k.unflatten(-1, (key_heads, key_dim)),
        v.unflatten(-1, (heads, value_dim)),
        -F.softplus(torch.randn(length, batch, heads, device=DEVICE) - 2.0),
        torch.rand(length, batch, heads, device=DEVICE),
    )


def compare(
    inputs: tuple[Tensor, ...],
    *,
    chunk_size: int,
    starts: Tensor | None = None,
    state: Tensor | None = None,
    grad_state: Tensor | None = None,
    bound: float,
    ours: ModuleType = ours,
    plain: ModuleType = plain,
) -> tuple[DeltaGrads, DeltaGrads]:
    """Holds outputs, final state and all gradients against float64; returns the gradients and the true ones."""
    options = {"chunk_size": chunk_size, "starts_SB": starts}
    wide_state = None if state is None else state.double()
    o, final = ours.chunk_delta_rule(*inputs, **options, initial_state=state)
    true_o, true_final = plain.chunk_delta_rule(*wide(inputs), **options, initial_state=wide_state)
    assert o.dtype == inputs[2].dtype and final.dtype == torch.float32
    assert far(o, true_o) <= bound and far(final, true_final) <= bound

    grad_o = torch.randn(o.shape, device=DEVICE).to(o.dtype)
    grads = ours.chunk_delta_rule_backward(grad_o, grad_state, *inputs, **options, initial_state=state)
    wide_grad = None if grad_state is None else grad_state.double()
    true = plain.chunk_delta_rule_backward(
        grad_o.double(), wide_grad, *wide(inputs), **options, initial_state=wide_state
    )
    for name, grad, exact, tensor in zip(NAMES, grads, true, (*inputs, state), strict=True):
        assert (grad is None) == (exact is None) == (tensor is None), name
        if grad is not None and exact is not None and tensor is not None:
            assert grad.dtype == tensor.dtype, name
            assert far(grad, exact) <= bound, name
    return grads, true


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


def test_decays_of_all_sizes_and_strengths_of_zero_and_one():
    """One head forgets nearly all at every token, the other at some; the gradients of the first one's decays are tiny, and still right."""
    q, k, v, g, beta = rule_inputs((20, 1, 2, 16, 1, 16, 16), torch.float32)
    g[:, :, 0], g[::7, :, 1] = -30.0, -30.0
    beta[::3], beta[1::3] = 0.0, 1.0
    grads, true = compare((q, k, v, g, beta), chunk_size=16, bound=3e-5)
    found, exact = grads[3][:, :, 0], true[3][:, :, 0]
    assert 0 < float(exact.abs().max()) < 1e-10
    assert far(found, exact) <= 1e-4


@pytest.mark.parametrize("chunk", [16, 64, later(32)])
def test_ut_transform_where_powers_of_L_explode(chunk: int):
    """Keys that are much alike: entries of L to a high power are astronomical, those of T = (I + L)^{-1} are at most 1."""
    torch.manual_seed(chunk)
    k = torch.randn(chunk, 1, 1, 16, device=DEVICE) + 3.0
    v, g, beta = (torch.zeros(chunk, 1, 1, *width, device=DEVICE) for width in ((16,), (), ()))
    T = ut_transform(k, delta_chunks(k, k, v, g, beta + 1.0, None, chunk)).squeeze()
    unit_k = F.normalize(k.squeeze().double(), dim=-1)
    L = (unit_k @ unit_k.T).tril(-1)
    assert float(torch.linalg.matrix_power(L, chunk // 2).abs().max()) > 1e3
    assert far(T, torch.linalg.inv(torch.eye(chunk, dtype=torch.float64, device=DEVICE) + L)) <= 1e-5


@pytest.mark.matrix
def test_the_same_result_every_time():
    inputs = rule_inputs((18, 1, 2, 16, 1, 16, 16), torch.float32)
    grad_o = torch.randn(inputs[2].shape, device=DEVICE)
    once, again = (ours.chunk_delta_rule_backward(grad_o, None, *inputs, chunk_size=16)[:5] for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))
