"""The gated delta rule in chunks, and the norm with its gate, against their definitions, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.ssm import chunk_delta_rule as delta_kernels
from petatron.kernels.ssm import norm_then_gate as norm_kernels
from petatron.kernels.ssm.chunk_delta_rule import chunk_delta_rule
from petatron.kernels.ssm.delta_recurrence import L2_EPS, delta_rule_by_token, delta_update
from petatron.layers.ssm import delta_ops as ops
from petatron.layers.ssm.delta_ops import DeltaInputs
from tests.kernels.test_ssm import document_starts

EXACT = {"rtol": 1e-10, "atol": 1e-10}
N, P = 5, 3


def delta_inputs(length: int, *, batch: int = 2, heads: int = 4, key_heads: int = 2, seed: int = 0) -> DeltaInputs:
    torch.manual_seed(seed)
    kind = {"dtype": torch.float64}
    return DeltaInputs(
        torch.randn(length, batch, key_heads, N, **kind),
        torch.randn(length, batch, key_heads, N, **kind),
        torch.randn(length, batch, heads, P, **kind),
        -F.softplus(torch.randn(length, batch, heads, **kind)),
        torch.rand(length, batch, heads, **kind),
    )


def initial(inputs: DeltaInputs) -> Tensor:
    return torch.randn(*inputs.v_SBHP.shape[1:3], N, P, dtype=torch.float64)


def part(inputs: DeltaInputs, tokens: slice) -> DeltaInputs:
    return DeltaInputs(*(tensor[tokens] for tensor in inputs))


def test_a_state_returns_the_value_under_its_key():
    """Without decay and with full strength, a written value is read back exactly, also where others were written in between."""
    _, _, v, g, beta = delta_inputs(3, batch=1, heads=1, key_heads=1)
    k = torch.eye(N, dtype=torch.float64)[[0, 1, 0]].reshape(3, 1, 1, N)
    inputs = DeltaInputs(k.flip(0), k, v, torch.zeros_like(g), torch.ones_like(beta))
    outputs, state = delta_rule_by_token(*inputs)
    unit = (1.0 + L2_EPS) ** -0.5
    torch.testing.assert_close(outputs[2, 0, 0], v[2, 0, 0] * unit**2 / N**0.5, rtol=0, atol=1e-5)
    torch.testing.assert_close(state[0, 0, 1], v[1, 0, 0] * unit, rtol=0, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize(("length", "chunk_size"), [(1, 4), (7, 1), (12, 4), (13, 4), (13, 64), (16, 5)])
def test_no_chunk_size_changes_the_rule(length: int, chunk_size: int, with_state: bool, packed: bool):
    inputs = delta_inputs(length)
    options = {
        "starts_SB": document_starts(length, (0, length // 3, length // 2), (length - 1,)) if packed else None,
        "initial_state": initial(inputs) if with_state else None,
    }
    for one, other in zip(
        chunk_delta_rule(*inputs, chunk_size=chunk_size, **options), delta_rule_by_token(*inputs, **options)
    ):
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_value_heads_of_a_group_share_queries_and_keys(key_heads: int):
    inputs = delta_inputs(6, key_heads=key_heads)
    q, k = (part.repeat_interleave(4 // key_heads, dim=2) for part in inputs[:2])
    for one, other in zip(chunk_delta_rule(*inputs, chunk_size=4), delta_rule_by_token(q, k, *inputs[2:])):
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize("cut", [1, 5, 8])
def test_a_sequence_in_parts_passes_its_state_on(cut: int):
    inputs = delta_inputs(13)
    whole, last = delta_rule_by_token(*inputs)
    first, state = chunk_delta_rule(*part(inputs, slice(0, cut)), chunk_size=4)
    second, state = chunk_delta_rule(*part(inputs, slice(cut, 13)), chunk_size=4, initial_state=state)
    torch.testing.assert_close(torch.cat((first, second)), whole, **EXACT)
    torch.testing.assert_close(state, last, **EXACT)


def test_packed_documents_are_documents_by_themselves():
    inputs = delta_inputs(14, batch=1)
    begins = (0, 3, 4, 9)
    packed, state = chunk_delta_rule(*inputs, chunk_size=4, starts_SB=document_starts(14, begins))
    last = torch.empty(0)
    for begin, end in zip(begins, (*begins[1:], 14)):
        alone, last = chunk_delta_rule(*part(inputs, slice(begin, end)), chunk_size=4)
        torch.testing.assert_close(packed[begin:end], alone, **EXACT)
    torch.testing.assert_close(state, last, **EXACT)


def test_decoding_step_by_step_is_the_rule():
    inputs = delta_inputs(9)
    whole, last = chunk_delta_rule(*inputs, chunk_size=4)
    state = torch.zeros_like(last)
    for token in range(9):
        o, state = delta_update(state, *(tensor[token] for tensor in inputs))
        torch.testing.assert_close(o, whole[token], **EXACT)
    torch.testing.assert_close(state, last, **EXACT)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("length", "chunk_size"), [(5, 2), (4, 4)])
def test_the_gradients_of_the_rule(length: int, chunk_size: int, packed: bool):
    inputs = delta_inputs(length, batch=1, heads=2, key_heads=1)
    starts = document_starts(length, (2,)) if packed else None
    tensors = [tensor.requires_grad_() for tensor in (*inputs, initial(inputs))]

    def rule(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        *given, state = tensors
        return ops.delta_rule(
            DeltaInputs(*given), kernels=delta_kernels, chunk_size=chunk_size, starts_SB=starts, initial_state=state
        )

    assert torch.autograd.gradcheck(rule, tensors)


def test_the_gradients_of_the_rule_are_those_of_the_recurrence():
    inputs, starts = delta_inputs(11), document_starts(11, (0, 4), (7,))
    grads = []
    for chunked in (True, False):
        leaves = DeltaInputs(*(tensor.detach().clone().requires_grad_() for tensor in inputs))
        options = {"kernels": delta_kernels, "chunk_size": 4}
        o, state = (
            ops.delta_rule(leaves, starts_SB=starts, **options)
            if chunked
            else delta_rule_by_token(*leaves, starts_SB=starts)
        )
        grads.append(torch.autograd.grad((o * o.detach().cos()).sum() + state.square().sum(), leaves))
    for one, other in zip(*grads):
        torch.testing.assert_close(one, other, **EXACT)


def test_a_state_that_alone_is_used_has_its_gradient():
    inputs = DeltaInputs(*(tensor.requires_grad_() for tensor in delta_inputs(5)))
    _, state = ops.delta_rule(inputs, kernels=delta_kernels, chunk_size=2)
    _, expected = delta_rule_by_token(*inputs)
    wanted = inputs.k_SBGN, inputs.v_SBHP
    for one, other in zip(
        torch.autograd.grad(state.square().sum(), wanted), torch.autograd.grad(expected.square().sum(), wanted)
    ):
        torch.testing.assert_close(one, other, **EXACT)


def test_half_precision_is_computed_in_float32():
    inputs = delta_inputs(12)
    exact, state = chunk_delta_rule(*inputs, chunk_size=4)
    half = DeltaInputs(*(tensor.to(torch.bfloat16) for tensor in inputs))._replace(g=inputs.g.float())
    o, half_state = chunk_delta_rule(*half, chunk_size=4)
    assert o.dtype == torch.bfloat16 and half_state.dtype == torch.float32
    assert (o - exact).norm() / exact.norm() < 0.02 and (half_state - state).norm() / state.norm() < 0.02


def test_long_sequences_stay_finite_without_decay():
    """Keys that repeat, at full strength: the triangular system is as far from the identity as it can be."""
    q, k, v, g, beta = delta_inputs(256, batch=1, heads=2, key_heads=1)
    inputs = DeltaInputs(q, k[:1].expand_as(k), v, torch.zeros_like(g), torch.ones_like(beta))
    single = DeltaInputs(*(tensor.float() for tensor in inputs))
    exact, _ = delta_rule_by_token(*inputs)
    o, _ = chunk_delta_rule(*single, chunk_size=64)
    assert (o - exact).norm() / exact.norm() < 1e-5


def norm_then_gate_inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(2)
    shapes = ((4, 2, 3, 6), (4, 2, 3, 6), (6,))
    y, z, weight = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes)
    return y, z, weight


def test_the_norm_comes_before_its_gate():
    y, z, weight = norm_then_gate_inputs()

    def gated(y: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        return ops.norm_then_gate(y, z, weight, eps=1e-5, kernels=norm_kernels)

    expected = F.rms_norm(y, (6,), weight, eps=1e-5) * F.silu(z)
    torch.testing.assert_close(gated(y, z, weight), expected, **EXACT)
    assert torch.autograd.gradcheck(gated, (y, z, weight))


def test_every_kernel_is_one_graph():
    """What is compiled on a GPU must be traced whole; the backend `eager` traces and compiles nothing."""
    y, z, weight = (tensor.detach() for tensor in norm_then_gate_inputs())
    for function, arguments in (
        (norm_kernels.norm_then_gate, (y, z, weight)),
        (norm_kernels.norm_then_gate_backward, (y, y, z, weight)),
    ):
        traced = torch.compile(function, fullgraph=True, backend="eager")
        for one, other in zip(traced(*arguments, eps=1e-5), function(*arguments, eps=1e-5)):
            torch.testing.assert_close(one, other, **EXACT)
