"""The selective scan in chunks, the causal convolution and the norm of a gated output against their definitions, in float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.ssm import causal_conv as conv_kernels
from petatron.kernels.ssm import chunk_scan as scan_kernels
from petatron.kernels.ssm import output_gate as gate_kernels
from petatron.kernels.ssm import output_gate as norm_kernels
from petatron.kernels.ssm.causal_conv import causal_conv
from petatron.kernels.ssm.chunk_scan import chunk_scan
from petatron.kernels.ssm.mamba2_recurrence import state_update
from petatron.layers.parallel_slots import identity
from petatron.layers.ssm import autograd_ops
from petatron.layers.ssm.autograd_ops import NormGroups, ScanInputs
from petatron.layers.ssm.chunked_recurrence import chunked_recurrence
from tests.kernels.ssm.by_token import scan_by_token
from tests.kernels.ssm.recurrence_checks import EXACT, Recurrence, assert_exact, document_starts
from tests.longform import later


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


SCAN = Recurrence(
    by_token=scan_by_token,
    chunked=chunk_scan,
    operation=partial(chunked_recurrence, kernels=scan_kernels),
    update=state_update,
    draw=scan_inputs,
    initial=initial,
    of_every_token=("x_SBHP", "dt_SBH", "B_SBGN", "C_SBGN"),
    decay="dt_SBH",
)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize(("length", "chunk_size"), [(1, 4), (7, 1), (12, 4), (13, 4), (13, 64), (16, 5)])
def test_no_chunk_size_changes_the_scan(length: int, chunk_size: int, with_state: bool, packed: bool):
    SCAN.check_chunk_size(length, chunk_size, with_state=with_state, packed=packed)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_heads_of_a_group_share_inputs_and_outputs_of_the_state(groups: int):
    inputs = scan_inputs(6, groups=groups)
    wide = inputs._replace(
        B_SBGN=inputs.B_SBGN.repeat_interleave(4 // groups, 2), C_SBGN=inputs.C_SBGN.repeat_interleave(4 // groups, 2)
    )
    assert_exact(chunk_scan(*inputs, chunk_size=4), scan_by_token(*wide))


@pytest.mark.parametrize("cut", [1, 5, 8])
def test_a_sequence_in_parts_passes_its_state_on(cut: int):
    SCAN.check_parts(cut)


def test_packed_documents_are_documents_by_themselves():
    SCAN.check_packed_documents()


def test_decoding_step_by_step_is_the_scan():
    SCAN.check_decoding()


@pytest.mark.parametrize(
    ("length", "chunk_size", "packed"), [(5, 2, True), later(5, 2, False), later(4, 4, True), later(4, 4, False)]
)
def test_the_gradients_of_the_scan(length: int, chunk_size: int, packed: bool):
    inputs = scan_inputs(length, batch=1, heads=2, groups=1)
    SCAN.check_gradients_by_differences(inputs, chunk_size, packed=packed)


def test_the_gradients_of_the_scan_are_those_of_the_recurrence():
    SCAN.check_gradients_by_token(scan_inputs(11), 4, starts=document_starts(11, (0, 4), (7,)))


def test_a_state_that_alone_is_used_has_its_gradient():
    SCAN.check_gradients_of_the_state("x_SBHP", "B_SBGN")


def test_half_precision_is_computed_in_float32():
    SCAN.check_half_precision()


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
        return autograd_ops.causal_conv(x, weight, bias, kernels=conv_kernels, starts_SB=starts, window=window)

    assert torch.autograd.gradcheck(conv, tensors)
    without = autograd_ops.causal_conv(x, weight, None, kernels=conv_kernels)
    zero_bias = autograd_ops.causal_conv(x, weight, torch.zeros_like(bias), kernels=conv_kernels)
    torch.testing.assert_close(without, zero_bias, **EXACT)
    grads = (torch.autograd.grad(y.square().sum(), (x, weight)) for y in (without, zero_bias))
    for one, other in zip(*grads):
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize("num_groups", [1, 3])
def test_the_norm_after_the_gate_normalizes_each_group(num_groups: int):
    torch.manual_seed(2)
    y, z, weight = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in ((4, 2, 6), (4, 2, 6), (6,)))
    norm = NormGroups(6 // num_groups, num_groups, 1e-5, identity)

    def gated(y: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        return autograd_ops.gate_then_norm(y, z, weight, norm, kernels=norm_kernels)

    value = (y * F.silu(z)).unflatten(-1, (num_groups, -1))
    expected = F.rms_norm(value, value.shape[-1:], eps=1e-5).flatten(-2) * weight
    torch.testing.assert_close(gated(y, z, weight), expected, **EXACT)
    assert torch.autograd.gradcheck(gated, (y, z, weight))


@pytest.mark.parametrize("num_groups", [1, 3])
def test_the_norm_without_a_gate_normalizes_each_group(num_groups: int):
    torch.manual_seed(3)
    y, weight = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in ((4, 2, 6), (6,)))
    norm = NormGroups(6 // num_groups, num_groups, 1e-5, identity)

    def normed(y: Tensor, weight: Tensor) -> Tensor:
        return autograd_ops.gate_then_norm(y, None, weight, norm, kernels=norm_kernels)

    groups = y.unflatten(-1, (num_groups, -1))
    expected = F.rms_norm(groups, groups.shape[-1:], eps=1e-5).flatten(-2) * weight
    torch.testing.assert_close(normed(y, weight), expected, **EXACT)
    assert torch.autograd.gradcheck(normed, (y, weight))


def test_the_gate_is_that_of_pytorch():
    torch.manual_seed(4)
    y, z = (torch.randn(4, 2, 6, dtype=torch.float64).requires_grad_() for _ in range(2))

    def gated(y: Tensor, z: Tensor) -> Tensor:
        return autograd_ops.silu_gate(y, z, kernels=gate_kernels)

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
