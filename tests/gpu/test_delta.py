"""The gated delta rule and its norm on a CUDA device against float64, at the sizes of Qwen3-Next's heads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.registry import KernelContext, choose_kernel
from petatron.kernels.ssm import chunk_delta_rule, norm_then_gate
from petatron.layers.ssm.delta_ops import DeltaInputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

RULE_BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Norm of the difference over the norm; the rule computes in float32 and rounds its outputs once."""


def far(ours: Tensor, true: Tensor) -> float:
    assert ours.shape == true.shape and ours.isfinite().all()
    return float((ours.double() - true.double()).norm() / true.double().norm())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", RULE_BOUNDS, ids=str)
def test_the_delta_rule_and_its_gradients(dtype: torch.dtype, packed: bool):
    torch.manual_seed(3)
    length, batch, key_heads, heads, width = 300, 2, 2, 4, 128
    inputs = DeltaInputs(
        torch.randn(length, batch, key_heads, width, device="cuda", dtype=dtype),
        torch.randn(length, batch, key_heads, width, device="cuda", dtype=dtype),
        torch.randn(length, batch, heads, width, device="cuda", dtype=dtype),
        -F.softplus(torch.randn(length, batch, heads, device="cuda")),
        torch.rand(length, batch, heads, device="cuda"),
    )
    exact = DeltaInputs(*(tensor.double() for tensor in inputs))
    starts = torch.rand(length, batch, device="cuda") < 0.02 if packed else None
    options = {"chunk_size": 64, "starts_SB": starts}
    found = choose_kernel(
        "gated delta rule", KernelContext.of(torch.device("cuda"), dtype, allow_compile=True)
    ).functions
    outputs = zip(
        found.chunk_delta_rule(*inputs, **options), chunk_delta_rule.chunk_delta_rule(*exact, **options), strict=True
    )
    assert all(far(ours, true) <= RULE_BOUNDS[dtype] for ours, true in outputs)
    grad = torch.randn(length, batch, heads, width, device="cuda", dtype=dtype)
    *ours, none = found.chunk_delta_rule_backward(grad, None, *inputs, **options)
    *true, _ = chunk_delta_rule.chunk_delta_rule_backward(grad.double(), None, *exact, **options)
    assert none is None
    assert all(far(one, other) <= RULE_BOUNDS[dtype] for one, other in zip(ours, true, strict=True))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-3)], ids=str)
def test_the_norm_and_its_gate(dtype: torch.dtype, bound: float):
    choice = choose_kernel("norm, then gate", KernelContext.of(torch.device("cuda"), dtype, allow_compile=True))
    assert choice.name == "compiled", str(choice)
    y, z, grad = (torch.randn(64, 2, 32, 128, device="cuda").to(dtype) for _ in range(3))
    weight = torch.randn(128, device="cuda").to(dtype)
    exact = [tensor.double() for tensor in (y, z, weight)]
    assert (
        far(choice.functions.norm_then_gate(y, z, weight, eps=1e-6), norm_then_gate.norm_then_gate(*exact, eps=1e-6))
        <= bound
    )
    ours = choice.functions.norm_then_gate_backward(grad, y, z, weight, eps=1e-6)
    true = norm_then_gate.norm_then_gate_backward(grad.double(), *exact, eps=1e-6)
    assert all(far(one, other) <= bound for one, other in zip(ours, true, strict=True))
