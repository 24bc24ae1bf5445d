"""The selective scan in chunks, the causal convolution and the norm of a gated output against their definitions, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.ssm import causal_conv as conv_kernels
from petatron.kernels.ssm import chunk_scan as scan_kernels
from petatron.kernels.ssm import gate_then_norm as norm_kernels
from petatron.kernels.ssm import silu_gate as gate_kernels
from petatron.kernels.ssm.causal_conv import causal_conv
from petatron.kernels.ssm.chunk_scan import chunk_scan
from petatron.kernels.ssm.recurrence import scan_by_token, state_update
from petatron.layers.comm_slot import identity
from petatron.layers.ssm import ops
from petatron.layers.ssm.ops import NormGroups, ScanInputs

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def scan_inputs(length: int, *, batch: int = 2, heads: int = 4, groups: int = 2, seed: int = 0) -> ScanInputs:
    torch.manual_seed(seed)
    kind = {"dtype": torch.float64}
    return ScanInputs(
        torch.randn(length, batch, heads, 3, **kind),
        F.softplus(torch.randn(length, batch, heads, **kind)),
        -torch.rand(heads, **kind) - 0.1,
        torch.randn(length, batch, groups, 5, **kind),
        torch.randn(length, batch, groups, 5, **kind),
        torch.randn(heads, **kind),
    )


def initial(inputs: ScanInputs) -> Tensor:
    _, batch, heads, head_dim = inputs.x_SBHP.shape
    return torch.randn(batch, heads, head_dim, inputs.B_SBGN.shape[-1], dtype=torch.float64)


def document_starts(length: int, *positions: tuple[int, ...]) -> Tensor:
    starts = torch.zeros(length, len(positions), dtype=torch.bool)
    for row, begins in enumerate(positions):
        starts[list(begins), row] = True
    return starts


def part(inputs: ScanInputs, tokens: slice) -> ScanInputs:
    x, dt, A, B, C, D = inputs
    return ScanInputs(x[tokens], dt[tokens], A, B[tokens], C[tokens], D)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize(("length", "chunk_size"), [(1, 4), (7, 1), (12, 4), (13, 4), (13, 64), (16, 5)])
def test_no_chunk_size_changes_the_scan(length: int, chunk_size: int, with_state: bool, packed: bool):
    inputs = scan_inputs(length)
    options = {
        "starts_SB": document_starts(length, (0, length // 3, length // 2), (length - 1,)) if packed else None,
        "initial_state": initial(inputs) if with_state else None,
    }
    expected, expected_state = scan_by_token(*inputs, **options)
    y, state = chunk_scan(*inputs, chunk_size=chunk_size, **options)
    torch.testing.assert_close(y, expected, **EXACT)
    torch.testing.assert_close(state, expected_state, **EXACT)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_heads_of_a_group_share_inputs_and_outputs_of_the_state(groups: int):
    inputs = scan_inputs(6, groups=groups)
    wide = inputs._replace(
        B_SBGN=inputs.B_SBGN.repeat_interleave(4 // groups, 2), C_SBGN=inputs.C_SBGN.repeat_interleave(4 // groups, 2)
    )
    for one, other in zip(chunk_scan(*inputs, chunk_size=4), scan_by_token(*wide)):
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize("cut", [1, 5, 8])
def test_a_sequence_in_parts_passes_its_state_on(cut: int):
    inputs = scan_inputs(13)
    whole, last = scan_by_token(*inputs)
    first_y, state = chunk_scan(*part(inputs, slice(0, cut)), chunk_size=4)
    second_y, state = chunk_scan(*part(inputs, slice(cut, 13)), chunk_size=4, initial_state=state)
    torch.testing.assert_close(torch.cat((first_y, second_y)), whole, **EXACT)
    torch.testing.assert_close(state, last, **EXACT)


def test_packed_documents_are_documents_by_themselves():
    inputs = scan_inputs(14, batch=1)
    begins = (0, 3, 4, 9)
    packed, state = chunk_scan(*inputs, chunk_size=4, starts_SB=document_starts(14, begins))
    last = torch.empty(0)
    for begin, end in zip(begins, (*begins[1:], 14)):
        alone, last = chunk_scan(*part(inputs, slice(begin, end)), chunk_size=4)
        torch.testing.assert_close(packed[begin:end], alone, **EXACT)
    torch.testing.assert_close(state, last, **EXACT)


def test_decoding_step_by_step_is_the_scan():
    inputs = scan_inputs(9)
    whole, last = chunk_scan(*inputs, chunk_size=4)
    state = torch.zeros_like(last)
    for token in range(9):
        x, dt, A, B, C, D = inputs
        y, state = state_update(state, x[token], dt[token], A, B[token], C[token], D)
        torch.testing.assert_close(y, whole[token], **EXACT)
    torch.testing.assert_close(state, last, **EXACT)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("length", "chunk_size"), [(5, 2), (4, 4)])
def test_the_gradients_of_the_scan(length: int, chunk_size: int, packed: bool):
    inputs = scan_inputs(length, batch=1, heads=2, groups=1)
    starts = document_starts(length, (2,)) if packed else None
    tensors = [tensor.requires_grad_() for tensor in (*inputs, initial(inputs))]

    def scan(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        *given, state = tensors
        return ops.selective_scan(
            ScanInputs(*given), kernels=scan_kernels, chunk_size=chunk_size, starts_SB=starts, initial_state=state
        )

    assert torch.autograd.gradcheck(scan, tensors)


def test_the_gradients_of_the_scan_are_those_of_the_recurrence():
    inputs, starts = scan_inputs(11), document_starts(11, (0, 4), (7,))
    grads = []
    for chunked in (True, False):
        leaves = ScanInputs(*(tensor.detach().clone().requires_grad_() for tensor in inputs))
        options = {"kernels": scan_kernels, "chunk_size": 4}
        y, _ = (
            ops.selective_scan(leaves, starts_SB=starts, **options)
            if chunked
            else scan_by_token(*leaves, starts_SB=starts)
        )
        grads.append(torch.autograd.grad((y * y.detach().cos()).sum(), leaves))
    for one, other in zip(*grads):
        torch.testing.assert_close(one, other, **EXACT)


def test_a_state_that_alone_is_used_has_its_gradient():
    inputs = ScanInputs(*(tensor.requires_grad_() for tensor in scan_inputs(5)))
    _, state = ops.selective_scan(inputs, kernels=scan_kernels, chunk_size=2)
    _, expected = scan_by_token(*inputs)
    wanted = inputs.x_SBHP, inputs.B_SBGN
    for one, other in zip(
        torch.autograd.grad(state.square().sum(), wanted), torch.autograd.grad(expected.square().sum(), wanted)
    ):
        torch.testing.assert_close(one, other, **EXACT)


def test_half_precision_is_computed_in_float32():
    inputs = scan_inputs(12)
    exact, state = chunk_scan(*inputs, chunk_size=4)
    half = ScanInputs(*(tensor.to(torch.bfloat16) for tensor in inputs))._replace(dt_SBH=inputs.dt_SBH.float())
    y, half_state = chunk_scan(*half, chunk_size=4)
    assert y.dtype == torch.bfloat16 and half_state.dtype == torch.float32
    assert (y - exact).norm() / exact.norm() < 0.02 and (half_state - state).norm() / state.norm() < 0.02


def conv_inputs(length: int, *, taps: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    kind = {"dtype": torch.float64}
    return torch.randn(length, 2, 3, **kind), torch.randn(3, taps, **kind), torch.randn(3, **kind)


@pytest.mark.parametrize("length", [1, 2, 9])
def test_the_convolution_is_that_of_torch(length: int):
    x, weight, bias = conv_inputs(length)
    padded = F.pad(x.permute(1, 2, 0), (3, 0))
    expected = F.silu(F.conv1d(padded, weight[:, None], bias, groups=3)).permute(2, 0, 1)
    torch.testing.assert_close(causal_conv(x, weight, bias), expected, **EXACT)


def test_the_convolution_of_parts_takes_the_end_of_the_part_before():
    x, weight, bias = conv_inputs(9)
    second = causal_conv(x[5:], weight, bias, window=x[2:5])
    torch.testing.assert_close(second, causal_conv(x, weight, bias)[5:], **EXACT)


def test_the_convolution_does_not_cross_documents():
    x, weight, bias = conv_inputs(9)
    starts = document_starts(9, (0, 2, 3), (5,))
    packed = causal_conv(x, weight, bias, starts_SB=starts, window=torch.ones(3, 2, 3, dtype=torch.float64))
    for row, begin, end in ((0, 0, 2), (0, 2, 3), (0, 3, 9), (1, 5, 9)):
        alone = causal_conv(x[begin:end, row : row + 1], weight, bias)
        torch.testing.assert_close(packed[begin:end, row : row + 1], alone, **EXACT)


@pytest.mark.parametrize("packed", [False, True])
def test_the_gradients_of_the_convolution(packed: bool):
    x, weight, bias = conv_inputs(4)
    starts = document_starts(4, (1,), (0, 3)) if packed else None
    window = torch.randn(3, 2, 3, dtype=torch.float64)
    tensors = [tensor.requires_grad_() for tensor in (x, weight, bias, window)]

    def conv(x: Tensor, weight: Tensor, bias: Tensor, window: Tensor) -> Tensor:
        return ops.causal_conv(x, weight, bias, kernels=conv_kernels, starts_SB=starts, window=window)

    assert torch.autograd.gradcheck(conv, tensors)
    without = ops.causal_conv(x, weight, None, kernels=conv_kernels)
    zero_bias = ops.causal_conv(x, weight, torch.zeros_like(bias), kernels=conv_kernels)
    torch.testing.assert_close(without, zero_bias, **EXACT)
    grads = (torch.autograd.grad(y.square().sum(), (x, weight)) for y in (without, zero_bias))
    for one, other in zip(*grads):
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize("num_groups", [1, 3])
def test_the_norm_after_the_gate_normalises_each_group(num_groups: int):
    torch.manual_seed(2)
    y, z, weight = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in ((4, 2, 6), (4, 2, 6), (6,)))
    norm = NormGroups(6 // num_groups, num_groups, 1e-5, identity)

    def gated(y: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        return ops.gate_then_norm(y, z, weight, norm, kernels=norm_kernels)

    value = (y * F.silu(z)).unflatten(-1, (num_groups, -1))
    expected = F.rms_norm(value, value.shape[-1:], eps=1e-5).flatten(-2) * weight
    torch.testing.assert_close(gated(y, z, weight), expected, **EXACT)
    assert torch.autograd.gradcheck(gated, (y, z, weight))


@pytest.mark.parametrize("num_groups", [1, 3])
def test_the_norm_without_a_gate_normalises_each_group(num_groups: int):
    torch.manual_seed(3)
    y, weight = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in ((4, 2, 6), (6,)))
    norm = NormGroups(6 // num_groups, num_groups, 1e-5, identity)

    def normed(y: Tensor, weight: Tensor) -> Tensor:
        return ops.gate_then_norm(y, None, weight, norm, kernels=norm_kernels)

    groups = y.unflatten(-1, (num_groups, -1))
    expected = F.rms_norm(groups, groups.shape[-1:], eps=1e-5).flatten(-2) * weight
    torch.testing.assert_close(normed(y, weight), expected, **EXACT)
    assert torch.autograd.gradcheck(normed, (y, weight))


def test_the_gate_is_that_of_pytorch():
    torch.manual_seed(4)
    y, z = (torch.randn(4, 2, 6, dtype=torch.float64).requires_grad_() for _ in range(2))

    def gated(y: Tensor, z: Tensor) -> Tensor:
        return ops.silu_gate(y, z, kernels=gate_kernels)

    torch.testing.assert_close(gated(y, z), y * F.silu(z), **EXACT)
    assert torch.autograd.gradcheck(gated, (y, z))


def test_every_kernel_is_one_graph():
    """What is compiled on a GPU must be traced whole; the backend `eager` traces and compiles nothing."""
    inputs, starts = scan_inputs(6), document_starts(6, (2,), (3,))
    options = {"chunk_size": 4, "starts_SB": starts, "initial_state": initial(inputs)}
    (x, weight, bias), grad = conv_inputs(6), torch.randn(6, 2, 3, dtype=torch.float64)
    rstd = torch.rand(6, 1, dtype=torch.float64)
    calls = [
        (scan_kernels.chunk_scan, inputs, options),
        (scan_kernels.chunk_scan_backward, (inputs.x_SBHP, None, *inputs), options),
        (conv_kernels.causal_conv, (x, weight, bias), {"starts_SB": starts}),
        (conv_kernels.causal_conv_backward, (grad, x, weight, bias), {"starts_SB": starts}),
        (norm_kernels.gate_then_norm_backward, (grad[:, 0], x[:, 0], x[:, 1], rstd, bias, rstd), {}),
        (gate_kernels.silu_gate_backward, (grad, x, x), {}),
    ]
    for function, arguments, keywords in calls:
        traced = torch.compile(function, fullgraph=True, backend="eager")
        for one, other in zip(traced(*arguments, **keywords), function(*arguments, **keywords)):
            torch.testing.assert_close(one, other, **EXACT)
