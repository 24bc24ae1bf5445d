"""The gated delta rule in chunks, and the norm with its gate, against their definitions, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.ssm import chunk_delta_rule as delta_kernels
from petatron.kernels.ssm import output_gate as norm_kernels
from petatron.kernels.ssm.chunk_delta_rule import chunk_delta_rule
from petatron.kernels.ssm.delta_recurrence import L2_EPS, delta_update
from petatron.layers.ssm import autograd_ops
from petatron.layers.ssm.autograd_ops import DeltaInputs
from petatron.layers.ssm.chunked_recurrence import chunked_recurrence
from tests.kernels.ssm.by_token import delta_rule_by_token
from tests.kernels.ssm.recurrence_checks import EXACT, Recurrence, assert_exact, document_starts
from tests.longform import later

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


def delta_recurrence(kernels: Any, draw: Callable[..., DeltaInputs]) -> Recurrence:
    return Recurrence(
        by_token=delta_rule_by_token,
        chunked=kernels.chunk_delta_rule,
        operation=partial(chunked_recurrence, kernels=kernels),
        update=delta_update,
        draw=draw,
        initial=initial,
        of_every_token=DeltaInputs._fields,
        decay="g",
    )


RULE = delta_recurrence(delta_kernels, delta_inputs)


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
    RULE.check_chunk_size(length, chunk_size, with_state=with_state, packed=packed)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_value_heads_of_a_group_share_queries_and_keys(key_heads: int):
    inputs = delta_inputs(6, key_heads=key_heads)
    q, k = (part.repeat_interleave(4 // key_heads, dim=2) for part in inputs[:2])
    assert_exact(chunk_delta_rule(*inputs, chunk_size=4), delta_rule_by_token(q, k, *inputs[2:]))


@pytest.mark.parametrize("cut", [1, 5, 8])
def test_a_sequence_in_parts_passes_its_state_on(cut: int):
    RULE.check_parts(cut)


def test_packed_documents_are_documents_by_themselves():
    RULE.check_packed_documents()


def test_decoding_step_by_step_is_the_rule():
    RULE.check_decoding()


@pytest.mark.parametrize(
    ("length", "chunk_size", "packed"), [(5, 2, True), later(5, 2, False), later(4, 4, True), later(4, 4, False)]
)
def test_the_gradients_of_the_rule(length: int, chunk_size: int, packed: bool):
    inputs = delta_inputs(length, batch=1, heads=2, key_heads=1)
    RULE.check_gradients_by_differences(inputs, chunk_size, packed=packed)


def test_the_gradients_of_the_rule_are_those_of_the_recurrence():
    RULE.check_gradients_by_token(delta_inputs(11), 4, starts=document_starts(11, (0, 4), (7,)))


def test_a_state_that_alone_is_used_has_its_gradient():
    RULE.check_gradients_of_the_state("k_SBGN", "v_SBHP")


def test_half_precision_is_computed_in_float32():
    RULE.check_half_precision()


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
        return autograd_ops.norm_then_gate(y, z, weight, eps=1e-5, kernels=norm_kernels)

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
