"""The Triton gated delta rule and its gradients against the plain one in float64: every shape, documents, states, strong decays."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.ssm import chunk_delta_rule as plain
from tests.kernels.test_triton_scan import far, wide
from tests.longform import later

pytest.importorskip("triton")
from petatron.kernels.triton.ssm import chunk_delta_rule as ours

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
"""The interpreter multiplies the bits of half-precision numbers, not the numbers."""
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Norm of the difference over the norm."""
CASES = [
    # length, batch, value heads, value dim, key heads, key dim, chunk size
    (18, 2, 2, 16, 2, 16, 16),
    (35, 1, 3, 12, 1, 20, 32),
    later((70, 1, 4, 16, 2, 16, 64)),
    later((50, 2, 4, 16, 2, 16, 16)),
    later((7, 1, 2, 64, 1, 128, 64)),
    later((130, 1, 2, 128, 1, 128, 64)),
    later((40, 1, 2, 144, 2, 16, 64)),
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
) -> None:
    """Outputs, final state and all gradients against float64."""
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("packed", "with_state"), [(False, False), (True, True), later(False, True), later(True, False)]
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule_and_gradients(case: tuple[int, ...], packed: bool, with_state: bool, dtype: torch.dtype):
    inputs = rule_inputs(case, dtype)
    length, batch, heads, value_dim, _, key_dim, chunk_size = case
    starts = torch.rand(length, batch, device=DEVICE) < 0.1 if packed else None
    state, grad_state = torch.randn(2, batch, heads, key_dim, value_dim, device=DEVICE) if with_state else (None, None)
    compare(inputs, chunk_size=chunk_size, starts=starts, state=state, grad_state=grad_state, bound=BOUNDS[dtype])
