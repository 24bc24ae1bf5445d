"""The reference kernels of norms, activations and rotation: what they compute, and their derivatives, against autograd."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from petatron.kernels import activation, norm, rope

WIDE = torch.float64
SHORT = [torch.bfloat16, torch.float16]


def rows(*shape: int, dtype: torch.dtype = WIDE) -> Tensor:
    return torch.randn(shape, dtype=WIDE).mul_(1.5).to(dtype)


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def far(found: Tensor, wanted: Tensor) -> float:
    return float((found.to(WIDE) - wanted).norm() / wanted.norm().clamp(min=1e-30))


def whole(weight: Tensor, zero_centered_gamma: bool) -> Tensor:
    return weight + 1 if zero_centered_gamma else weight


NORM_CASES = {
    "plain": (False, False, False),
    "joined": (True, True, False),
    "from-one": (False, False, True),
    "joined-from-one": (True, True, True),
    "stream-unused": (True, False, False),
}
"""By name: with a branch, with a gradient of the total, weights as an offset from one."""


@pytest.mark.parametrize("shape", [(1, 1), (5, 8), (33, 7)])
@pytest.mark.parametrize("case", NORM_CASES)
def test_rms_norm(case: str, shape: tuple[int, int]):
    branched, streamed, zero_centered_gamma = NORM_CASES[case]
    x, branch, weight = leaf(rows(*shape)), leaf(rows(*shape)), leaf(rows(shape[1]))
    grad, grad_residual = rows(*shape), rows(*shape) if streamed else None
    total = x + branch if branched else x * 1.0
    wanted = F.rms_norm(total, (shape[1],), whole(weight, zero_centered_gamma), eps=1e-5)
    loss = (wanted * grad).sum() + (0 if grad_residual is None else (total * grad_residual).sum())
    grads = torch.autograd.grad(loss, [total, weight])
    options = {"eps": 1e-5, "zero_centered_gamma": zero_centered_gamma}
    with torch.no_grad():
        made, normal, rstd = norm.rms_norm(x, weight, branch=branch if branched else None, **options)
        assert (made is x) == (not branched)
        for again in (True, False):
            found = norm.rms_norm_backward(
                grad,
                made,
                rstd,
                weight,
                zero_centered_gamma=zero_centered_gamma,
                grad_residual=grad_residual,
                recompute_output=again,
            )
            close(found[0], grads[0])
            close(found[1], grads[1])
            assert found[2] is None if not again else torch.equal(found[2], normal)
    close(made, total)
    close(normal, wanted)
    close(rstd, (total.square().mean(-1) + 1e-5).rsqrt())


def test_a_layer_norm_without_a_bias_is_that_with_zeros():
    x, grad, weight = rows(5, 8), rows(5, 8), rows(8)
    options = {"zero_centered_gamma": False}
    _, normal, statistics = norm.layer_norm(x, weight, eps=1e-5, **options)
    _, wanted, _ = norm.layer_norm(x, weight, torch.zeros_like(weight), eps=1e-5, **options)
    assert torch.equal(normal, wanted)
    x_grad, weight_grad, none, again = norm.layer_norm_backward(grad, x, statistics, weight, **options)
    true = norm.layer_norm_backward(grad, x, statistics, weight, torch.zeros_like(weight), **options)
    assert none is None and again is not None and torch.equal(again, normal)
    assert torch.equal(x_grad, true[0]) and torch.equal(weight_grad, true[1])


@pytest.mark.parametrize("shape", [(1, 2), (5, 8), (33, 7)])
@pytest.mark.parametrize("case", NORM_CASES)
def test_layer_norm(case: str, shape: tuple[int, int]):
    branched, streamed, zero_centered_gamma = NORM_CASES[case]
    x, branch = leaf(rows(*shape) + 3.0), leaf(rows(*shape))
    weight, bias = leaf(rows(shape[1])), leaf(rows(shape[1]))
    grad, grad_residual = rows(*shape), rows(*shape) if streamed else None
    total = x + branch if branched else x * 1.0
    wanted = F.layer_norm(total, (shape[1],), whole(weight, zero_centered_gamma), bias, eps=1e-5)
    loss = (wanted * grad).sum() + (0 if grad_residual is None else (total * grad_residual).sum())
    grads = torch.autograd.grad(loss, [total, weight, bias])
    options = {"eps": 1e-5, "zero_centered_gamma": zero_centered_gamma}
    with torch.no_grad():
        made, normal, statistics = norm.layer_norm(x, weight, bias, branch=branch if branched else None, **options)
        for again in (True, False):
            found = norm.layer_norm_backward(
                grad,
                made,
                statistics,
                weight,
                bias,
                zero_centered_gamma=zero_centered_gamma,
                grad_residual=grad_residual,
                recompute_output=again,
            )
            for ours, true in zip(found[:3], grads, strict=True):
                close(ours, true)
            assert found[3] is None if not again else torch.equal(found[3], normal)
    assert statistics.shape == (2, shape[0])
    close(normal, wanted)


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_in_half_precision(kind: str, dtype: torch.dtype):
    """Statistics and weight gradients are in float32, and what is made again is made bit for bit."""
    x, branch, grad, grad_residual = (rows(40, 96, dtype=dtype) for _ in range(4))
    weight, bias = rows(96, dtype=dtype), rows(96, dtype=dtype)
    parameters = (weight,) if kind == "rms" else (weight, bias)
    forward, backward = (getattr(norm, f"{kind}_norm{end}") for end in ("", "_backward"))
    total, normal, statistics = forward(x, *parameters, eps=1e-5, zero_centered_gamma=False, branch=branch)
    assert total.dtype == normal.dtype == dtype and statistics.dtype == torch.float32
    *found, made = backward(
        grad, total, statistics, *parameters, zero_centered_gamma=False, grad_residual=grad_residual
    )
    assert torch.equal(made, normal) and found[0].dtype == dtype and found[1].dtype == torch.float32
    wide = [tensor.to(WIDE) for tensor in parameters]
    _, true_normal, true_statistics = forward(total.to(WIDE), *wide, eps=1e-5, zero_centered_gamma=False)
    wanted = backward(
        grad.to(WIDE),
        total.to(WIDE),
        true_statistics,
        *wide,
        zero_centered_gamma=False,
        grad_residual=grad_residual.to(WIDE),
    )
    rounding = torch.finfo(dtype).eps
    assert far(normal, true_normal) < 2 * rounding and far(found[0], wanted[0]) < 2 * rounding
    assert all(far(ours, true) < 1e-5 for ours, true in zip(found[1:], wanted[1:-1], strict=True))


def slope_of(function: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Tensor:
    x = leaf(x)
    return torch.autograd.grad((function(x) * grad).sum(), x)[0]


@pytest.mark.parametrize("name", activation.ACTIVATIONS)
def test_plain_activations(name: str):
    x, grad = rows(9, 11), rows(9, 11)
    x[0, :3] = torch.tensor([0.0, 30.0, -30.0])  # a corner, and where exponentials are large
    value = activation.activation(x, name)
    close(value, activation.ACTIVATIONS[name](x))
    found, made = activation.activation_backward(grad, x, name, recompute_output=True)
    close(found, slope_of(activation.ACTIVATIONS[name], x, grad))
    assert made is not None and torch.equal(made, value)
    alone, nothing = activation.activation_backward(grad, x, name, recompute_output=False)
    assert torch.equal(alone, found) and nothing is None


def test_activations_are_what_their_names_say():
    x = torch.tensor([[-2.0, -0.5, 0.0, 0.5, 2.0]], dtype=WIDE)
    sigmoid = 1 / (1 + (-x).exp())
    tanh = torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    wanted = {
        "gelu": x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
        "gelu_tanh": x * 0.5 * (1 + tanh),
        "quick_gelu": x / (1 + (-1.702 * x).exp()),
        "relu": x.clamp(min=0),
        "squared_relu": x.clamp(min=0) ** 2,
        "silu": x * sigmoid,
    }
    assert wanted.keys() == activation.ACTIVATIONS.keys()
    for name, value in wanted.items():
        close(activation.activation(x, name), value)
    up = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]], dtype=WIDE)
    for name, inner in activation.GATE_ACTIVATIONS.items():
        close(activation.gated_activation(torch.cat((x, up), -1), name), wanted[inner] * up)


@pytest.mark.parametrize("name", activation.GATE_ACTIVATIONS)
def test_gated_activations(name: str):
    gate_up, grad = rows(9, 14), rows(9, 7)
    inner = activation.ACTIVATIONS[activation.GATE_ACTIVATIONS[name]]

    def whole_function(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return inner(gate) * up

    value = activation.gated_activation(gate_up, name)
    close(value, whole_function(gate_up))
    found, made = activation.gated_activation_backward(grad, gate_up, name, recompute_output=True)
    close(found, slope_of(whole_function, gate_up, grad))
    assert made is not None and torch.equal(made, value)
    alone, nothing = activation.gated_activation_backward(grad, gate_up, name, recompute_output=False)
    assert torch.equal(alone, found) and nothing is None


@pytest.mark.parametrize("variant", [(0.7, 0.0, 1.0), (None, 1.0, 1.0), (0.7, 1.0, 1.6), (None, 0.0, 0.4)], ids=str)
def test_a_bounded_gated_activation_multiplies_clamps_and_adds(variant: tuple[float | None, float, float]):
    """Numbers beyond the clamp pass no gradient; the compiler takes the variant as they are."""
    gate_up, grad = rows(9, 14), rows(9, 7)
    clamp, offset, factor = variant
    assert (gate_up.abs() > 0.7).any() and (gate_up.abs() < 0.7).any()

    def whole_function(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        gate = gate * factor
        if clamp is not None:
            gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
        return gate * (1.702 * gate).sigmoid() * (up + offset)

    glu_variant = activation.GluVariant(clamp, offset, factor)
    value = activation.gated_activation(gate_up, "quick_geglu", glu_variant)
    close(value, whole_function(gate_up))
    found, made = activation.gated_activation_backward(grad, gate_up, "quick_geglu", glu_variant, recompute_output=True)
    close(found, slope_of(whole_function, gate_up, grad))
    assert made is not None and torch.equal(made, value)
    compiled = torch.compile(activation.gated_activation, fullgraph=True, backend="eager")
    assert torch.equal(compiled(gate_up, "quick_geglu", glu_variant), value)


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("name", [*activation.ACTIVATIONS, *activation.GATE_ACTIVATIONS])
def test_activations_in_half_precision_are_rounded_once(name: str, dtype: torch.dtype):
    gated = name in activation.GATE_ACTIVATIONS
    forward = activation.gated_activation if gated else activation.activation
    backward = activation.gated_activation_backward if gated else activation.activation_backward
    x, grad = rows(50, 32, dtype=dtype), rows(50, 16 if gated else 32, dtype=dtype)
    value = forward(x, name)
    found, made = backward(grad, x, name, recompute_output=True)
    assert made is not None and torch.equal(made, value) and found.dtype == value.dtype == dtype
    once = torch.finfo(dtype).eps / 2
    assert far(value, forward(x.to(WIDE), name)) < once
    assert far(found, backward(grad.to(WIDE), x.to(WIDE), name, recompute_output=False)[0]) < once


def laid_out(x: Tensor, batch_first: bool) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1) if batch_first else x.contiguous()


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 6),
    batch=st.integers(1, 3),
    groups=st.integers(1, 3),
    per_group=st.integers(1, 3),
    half=st.integers(1, 4),
    rest=st.integers(0, 3),
    batch_first=st.booleans(),
    per_row=st.booleans(),
)
def test_split_rotate(
    length: int, batch: int, groups: int, per_group: int, half: int, rest: int, batch_first: bool, per_row: bool
):
    """As numbers in the complex plane, with derivatives by autograd; in either order of memory, which is kept."""
    heads, width = groups * per_group, 2 * half + rest
    qkv = leaf(laid_out(rows(length, batch, (heads + 2 * groups) * width), batch_first))
    angles = rows(length, batch if per_row else 1, 1, half)
    turns = torch.polar(torch.ones_like(angles), angles)

    def turned(x: Tensor) -> Tensor:
        pairs = torch.complex(x[..., :half], x[..., half : 2 * half]) * turns
        return torch.cat((pairs.real, pairs.imag, x[..., 2 * half :]), -1)

    q, k, v = qkv.unflatten(-1, (-1, width)).split((heads, groups, groups), dim=2)
    wanted = (turned(q), turned(k), v)
    grads = tuple(rows(*part.shape) for part in wanted)
    (true,) = torch.autograd.grad(sum((part * grad).sum() for part, grad in zip(wanted, grads, strict=True)), qkv)
    cos, sin = (torch.cat((part, part), -1) for part in (angles.cos(), angles.sin()))
    with torch.no_grad():
        found = rope.split_qkv_rope(qkv, cos, sin, num_heads=heads, num_kv_heads=groups, batch_first=batch_first)
        out = rope.split_qkv_rope_backward(*grads, cos, sin, out=torch.full_like(qkv, float("nan")))
    for ours, part in zip(found, wanted, strict=True):
        close(ours, part)
        assert (ours.transpose(0, 1) if batch_first else ours).is_contiguous()
        alone = ours.untyped_storage().data_ptr() != qkv.untyped_storage().data_ptr()
        assert alone or length * batch == 1, "values of more than one token have memory of their own"
    close(out, true)


def test_turning_back_and_forth_changes_nothing():
    x, angles = rows(5, 2, 3, 8), rows(5, 1, 1, 4)
    cos, sin = (torch.cat((part, part), -1) for part in (angles.cos(), angles.sin()))
    turned = rope.apply_rope(x, cos, sin)
    assert far(turned, x) > 0.1
    assert far(rope.apply_rope(turned, cos, -sin), x) < 1e-12
