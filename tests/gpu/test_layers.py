"""Norms, activations and rotary embeddings on a CUDA device against float64: Triton kernels, and compiled ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from petatron.kernels import activation, norm, qk_norm_rope, rope
from petatron.kernels.attention import attention
from petatron.kernels.qk_norm_rope import QKNormSpec
from petatron.kernels.registry import KernelContext, choose_kernel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
"""Norm of the difference over the norm. bfloat16 rounds to 9 bits, a norm twice: 1.7e-3 and 3.0e-3 on average."""


def kernels(operation: str, dtype: torch.dtype, wanted: str) -> Any:
    choice = choose_kernel(operation, KernelContext.of(torch.device("cuda"), dtype, allow_compile=True))
    assert choice.name == wanted, str(choice)
    return choice.functions


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda").mul_(1.5).to(dtype)


def far(ours: Tensor, true: Tensor) -> float:
    assert ours.shape == true.shape and ours.isfinite().all()
    return float((ours.double() - true.double()).norm() / true.double().norm())


NORMS = [
    ((8192, 4096), torch.bfloat16, True, False),
    ((4099, 2048), torch.bfloat16, False, False),
    ((301, 16384), torch.bfloat16, True, True),
    ((1000, 100), torch.float32, True, True),
]


@pytest.mark.parametrize(("shape", "dtype", "joined", "zero_centered_gamma"), NORMS, ids=str)
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype, joined: bool, zero_centered_gamma: bool):
    found = kernels("rms_norm", dtype, "triton")
    x, branch, grad, grad_residual = (draw(*shape, dtype=dtype) for _ in range(4))
    weight = draw(shape[1], dtype=dtype)
    total, normal, rstd = found.rms_norm(
        x, weight, eps=1e-5, zero_centered_gamma=zero_centered_gamma, branch=branch if joined else None
    )
    assert torch.equal(total, x + branch) if joined else total is x
    _, true, true_rstd = norm.rms_norm(
        total.double(), weight.double(), eps=1e-5, zero_centered_gamma=zero_centered_gamma
    )
    assert far(normal, true) <= BOUNDS[dtype] and far(rstd, true_rstd) <= 2e-6
    joining = grad_residual if joined else None
    ours = found.rms_norm_backward(
        grad, total, rstd, weight, zero_centered_gamma=zero_centered_gamma, grad_residual=joining, recompute_output=True
    )
    wide = [tensor.double() for tensor in (grad, total, rstd, weight)]
    true = norm.rms_norm_backward(
        *wide,
        zero_centered_gamma=zero_centered_gamma,
        grad_residual=grad_residual.double() if joined else None,
        recompute_output=False,
    )
    assert far(ours[0], true[0]) <= BOUNDS[dtype]
    assert ours[1].dtype == torch.float32 and far(ours[1], true[1]) <= 2e-6
    assert torch.equal(ours[2], normal), "made again, the same bits"


GATES = [("swiglu", (4099, 14336), torch.bfloat16), ("swiglu", (700, 100), torch.float32)]
GATES += [(name, (1000, 768), torch.bfloat16) for name in ("geglu", "geglu_tanh", "reglu")]


@pytest.mark.parametrize(("name", "shape", "dtype"), GATES, ids=str)
def test_gated_activation(name: str, shape: tuple[int, int], dtype: torch.dtype):
    found, (rows, width) = kernels("gated activation", dtype, "triton"), shape
    gate_up, grad = draw(rows, 2 * width, dtype=dtype), draw(rows, width, dtype=dtype)
    out = found.gated_activation(gate_up, name)
    assert far(out, activation.gated_activation(gate_up.double(), name)) <= BOUNDS[dtype]
    ours, again = found.gated_activation_backward(grad, gate_up, name, recompute_output=True)
    true, _ = activation.gated_activation_backward(grad.double(), gate_up.double(), name, recompute_output=False)
    assert far(ours, true) <= BOUNDS[dtype] and torch.equal(again, out)


HEADS = [
    (32, 8, 128, 128, True, torch.bfloat16),
    (16, 16, 64, 64, False, torch.bfloat16),
    (6, 2, 80, 32, True, torch.float32),
]


@pytest.mark.parametrize(("heads", "groups", "width", "turned", "batch_first", "dtype"), HEADS, ids=str)
def test_rotary_embedding(heads: int, groups: int, width: int, turned: int, batch_first: bool, dtype: torch.dtype):
    found, (length, batch) = kernels("rotary embedding", dtype, "triton"), (1001, 2)
    qkv = draw(length, batch, (heads + 2 * groups) * width, dtype=dtype)
    half = torch.rand(batch if batch_first else 1, length, 1, turned // 2, device="cuda") * 1000
    angles = torch.cat((half, half), dim=-1).transpose(0, 1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    options = {"num_heads": heads, "num_kv_heads": groups, "batch_first": batch_first}
    ours = found.split_qkv_rope(qkv, cos, sin, **options)
    for part, true in zip(ours, rope.split_qkv_rope(qkv.double(), cos.double(), sin.double(), **options), strict=True):
        assert far(part, true) <= BOUNDS[dtype]
    grads = [torch.randn_like(part) for part in ours]
    back = found.split_qkv_rope_backward(*grads, cos, sin, out=torch.full_like(qkv, float("nan")))
    wide = [tensor.double() for tensor in (*grads, cos, sin)]
    true = rope.split_qkv_rope_backward(*wide, out=torch.empty_like(qkv, dtype=torch.float64))
    assert far(back, true) <= BOUNDS[dtype]


NORMED = [
    (QKNormSpec(32, 8, 1e-6, False), 128, 128, True, torch.bfloat16),
    (QKNormSpec(9, 3, 1e-6, True), 64, 64, False, torch.bfloat16),
    (QKNormSpec(5, 5, 1e-5, False), 96, 96, True, torch.bfloat16),
    (QKNormSpec(6, 2, 1e-5, True), 80, 32, True, torch.float32),
]


@pytest.mark.parametrize(("how", "width", "turned", "batch_first", "dtype"), NORMED, ids=str)
def test_normed_rotary_embedding(how: QKNormSpec, width: int, turned: int, batch_first: bool, dtype: torch.dtype):
    found, (length, batch) = kernels("qk-norm and rotary embedding", dtype, "triton"), (4099, 2)
    columns = (how.num_heads + 2 * how.num_kv_heads) * width
    qkv = (
        draw(batch, length, columns, dtype=dtype).transpose(0, 1)
        if batch_first
        else draw(length, batch, columns, dtype=dtype)
    )
    half = torch.rand(batch if batch_first else 1, length, 1, turned // 2, device="cuda") * 1000
    angles = torch.cat((half, half), dim=-1).transpose(0, 1)
    weights, rotation = (
        (draw(width, dtype=dtype), draw(width, dtype=dtype)),
        (angles.cos().to(dtype), angles.sin().to(dtype)),
    )
    wide = [tuple(each.double() for each in pair) for pair in (weights, rotation)]
    ours = found.split_qkv_norm_rope(qkv, weights, rotation, how, batch_first=batch_first)
    true = qk_norm_rope.split_qkv_norm_rope(qkv.double(), *wide, how, batch_first=batch_first)
    for part, wanted in zip(ours, true, strict=True):
        assert far(part, wanted) <= BOUNDS[dtype]
    grads = tuple(torch.randn_like(part) for part in ours)

    def back(out: Tensor) -> tuple[Tensor, ...]:
        return out, *found.split_qkv_norm_rope_backward(grads, qkv, weights, rotation, how, out=out)

    gradient, *weight_gradients = first = back(torch.full_like(qkv, float("nan")))
    true_gradient = torch.empty_like(qkv, dtype=torch.float64)
    wide_grads = tuple(grad.double() for grad in grads)
    true = qk_norm_rope.split_qkv_norm_rope_backward(wide_grads, qkv.double(), *wide, how, out=true_gradient)
    assert far(gradient, true_gradient) <= BOUNDS[dtype]
    for part, wanted in zip(weight_gradients, true, strict=True):
        assert part.dtype == torch.float32 and far(part, wanted) <= 5e-6
    for one, other in zip(first, back(torch.full_like(qkv, float("nan"))), strict=True):
        assert torch.equal(one, other), "the same bits every time"


def test_attention_takes_values_that_lie_in_the_product():
    """They are a view with longer strides than queries and keys have."""
    found, how, dtype = (
        kernels("qk-norm and rotary embedding", torch.bfloat16, "triton"),
        QKNormSpec(8, 2, 1e-6, False),
        torch.bfloat16,
    )
    qkv = draw(2, 512, 12 * 128, dtype=dtype).transpose(0, 1)
    angles = torch.rand(512, 1, 1, 64, device="cuda").repeat(1, 1, 1, 2)
    weights = torch.ones(128, device="cuda", dtype=dtype), torch.ones(128, device="cuda", dtype=dtype)
    heads = found.split_qkv_norm_rope(
        qkv, weights, (angles.cos().to(dtype), angles.sin().to(dtype)), how, batch_first=True
    )
    q, k, v = (part.detach().requires_grad_() for part in heads)
    dense = v.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    assert v.stride() != dense.stride()
    outputs = [attention(q, k, values) for values in (v, dense)]
    grad = torch.randn_like(outputs[0])
    grads = [torch.autograd.grad(out, (q, k, values), grad) for out, values in zip(outputs, (v, dense), strict=True)]
    assert far(outputs[0], outputs[1]) <= BOUNDS[dtype]
    for one, other in zip(*grads, strict=True):
        assert far(one, other) <= BOUNDS[dtype]


def test_compiled_layer_norm():
    found, dtype = kernels("layer_norm", torch.bfloat16, "compiled"), torch.bfloat16
    x, grad, grad_residual = (draw(1001, 1536, dtype=dtype) for _ in range(3))
    weight, bias = draw(1536, dtype=dtype), draw(1536, dtype=dtype)
    total, normal, statistics = found.layer_norm(x, weight, bias, eps=1e-5, zero_centered_gamma=False)
    wide = [tensor.double() for tensor in (x, weight, bias)]
    _, true_normal, _ = norm.layer_norm(*wide, eps=1e-5, zero_centered_gamma=False)
    assert far(normal, true_normal) <= BOUNDS[dtype]
    *ours, again = found.layer_norm_backward(
        grad,
        total,
        statistics,
        weight,
        bias,
        zero_centered_gamma=False,
        grad_residual=grad_residual,
        recompute_output=True,
    )
    wide = [tensor.double() for tensor in (grad, total, statistics, weight, bias)]
    *true, _ = norm.layer_norm_backward(
        *wide, zero_centered_gamma=False, grad_residual=grad_residual.double(), recompute_output=False
    )
    for mine, wanted, bound in zip(ours, true, (BOUNDS[dtype], 1e-5, 1e-5), strict=True):
        assert far(mine, wanted) <= bound
    assert far(again, true_normal) <= BOUNDS[dtype]


@pytest.mark.parametrize("name", ["gelu", "squared_relu"])
def test_compiled_activation(name: str):
    found, dtype = kernels("plain activation", torch.bfloat16, "compiled"), torch.bfloat16
    x, grad = draw(1001, 1536, dtype=dtype), draw(1001, 1536, dtype=dtype)
    assert far(found.activation(x, name), activation.activation(x.double(), name)) <= BOUNDS[dtype]
    ours, again = found.activation_backward(grad, x, name, recompute_output=True)
    true, _ = activation.activation_backward(grad.double(), x.double(), name, recompute_output=False)
    assert far(ours, true) <= BOUNDS[dtype] and far(again, activation.activation(x.double(), name)) <= BOUNDS[dtype]
