"""Packed documents and plain batches on a Hopper GPU: cuDNN against the reference in float64, and no waiting for the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from petatron.kernels.attention import attention, cudnn, flash
from petatron.kernels.attention import gather_scatter_rows as reference_rows
from petatron.kernels.attention.document_layout import Documents
from petatron.kernels.attention.packed_document_attention import PaddedKernels, padded_attention
from petatron.kernels.attention.visibility import Visibility
from tests import reference_attention as reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ORDERS = ["sequence first", "batch first", "slices"]
BOUND = 8e-3  # relative error in norm; bfloat16 operands give 2e-3 to 3e-3
hopper = pytest.mark.skipif(
    not torch.cuda.is_available()
    or cudnn.unsupported_reason("cuda", torch.cuda.get_device_capability(), torch.bfloat16) is not None,
    reason="needs cuDNN on Hopper",
)


@pytest.fixture
def moves():
    return pytest.importorskip("petatron.kernels.triton.attention.gather_scatter_rows")


def starts_of(lengths: list[list[int]]) -> Tensor:
    return torch.tensor([[sum(row[:i]) for i, n in enumerate(row) for _ in range(n)] for row in lengths])


def random_lengths(batch: int, length: int, seed: int) -> list[list[int]]:
    """From single tokens to documents as long as a row."""
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(batch):
        row: list[int] = []
        while sum(row) < length:
            row.append(min(length - sum(row), int(np.ceil(generator.lognormal(6, 2)))))
        rows.append(row)
    return rows


def tensors(batch: int, length: int, heads: int, groups: int, width: int, order: str) -> list[Tensor]:
    def make(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    if order == "sequence first":
        found = [make(length, batch, h, width) for h in (heads, groups, groups)]
    elif order == "batch first":
        found = [make(batch, length, h, width).transpose(0, 1) for h in (heads, groups, groups)]
    else:
        found = make(batch, length, heads + 2 * groups, width).transpose(0, 1).split((heads, groups, groups), dim=2)
    return [x.detach().requires_grad_() for x in found]


def both_ways(out: Tensor, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, inputs, grad.to(out.dtype))]


def assert_close(ours: list[Tensor], wanted: list[Tensor]) -> None:
    for mine, true in zip(ours, wanted, strict=True):
        error = (mine.double() - true).norm() / true.norm()
        assert mine.shape == true.shape and float(error) < BOUND


def wanted_for(inputs: list[Tensor], grad: Tensor, starts: Tensor | None = None) -> list[Tensor]:
    exact = [x.detach().double().requires_grad_() for x in inputs]
    return both_ways(reference.attention(*exact, document_starts_BS=starts), exact, grad)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("heads", "groups", "width"), [(32, 8, 128), (8, 8, 64), (4, 1, 96)])
@pytest.mark.parametrize("seed", [1, 2])
def test_documents_of_any_length(moves, order: str, heads: int, groups: int, width: int, seed: int):
    lengths = [[1100, 1, 355], *random_lengths(1, 1456, seed)]
    documents = Documents.of(starts_of(lengths).cuda())
    inputs = tensors(2, 1456, heads, groups, width, order)
    grad = torch.randn(1456, 2, heads, width, device="cuda").bfloat16()
    ours = both_ways(attention(*inputs, Visibility(documents=documents), packing_kernels=moves), inputs, grad)
    assert_close(ours, wanted_for(inputs, grad, documents.starts_BS))


@hopper
@pytest.mark.parametrize("order", ORDERS)
def test_groups_and_short_documents(moves, order: str):
    """Both kernels, padding and groups of several; the twin's moves and the reference's give the same bits."""
    lengths = [[1030, 1100, 1, 2, 1], [1000, 1050, 84], [2134]]
    documents = Documents.of(starts_of(lengths).cuda())
    assert documents.padded_rows is not None and [(g.count, g.length) for g in documents.padded_rows.groups] == [
        (1, 2304),
        (2, 1152),
        (1, 1152),
    ]
    inputs = tensors(3, 2134, 8, 2, 128, order)
    grad = torch.randn(2134, 3, 8, 128, device="cuda").bfloat16()
    ours, theirs = (
        both_ways(padded_attention(*inputs, documents.padded_rows, PaddedKernels(way, cudnn, flash)), inputs, grad)
        for way in (moves, reference_rows)
    )
    assert_close(ours, wanted_for(inputs, grad, documents.starts_BS))
    assert torch.equal(ours[0], theirs[0])
    assert_close(ours, [x.double() for x in theirs])


@pytest.mark.parametrize("order", ORDERS)
def test_documents_of_one_length(moves, order: str):
    documents = Documents.of(starts_of([[256] * 3] * 2).cuda())
    assert documents.equal_length == 256
    inputs = tensors(2, 768, 8, 2, 64, order)
    grad = torch.randn(768, 2, 8, 64, device="cuda").bfloat16()
    ours = both_ways(attention(*inputs, Visibility(documents=documents), packing_kernels=moves), inputs, grad)
    assert_close(ours, wanted_for(inputs, grad, documents.starts_BS))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("batch", [1, 3])
def test_gradients_in_any_order(order: str, batch: int):
    """The plan for one layout of the output's gradient is not used for another."""
    inputs = tensors(batch, 320, 8, 2, 64, order)
    numbers = torch.randn(320, batch, 8, 64, device="cuda").bfloat16()
    wanted = wanted_for(inputs, numbers)
    for permutation in ((0, 1, 2, 3), (1, 0, 2, 3), (1, 2, 0, 3)):
        back = tuple(permutation.index(dim) for dim in range(4))
        grad = numbers.permute(permutation).contiguous().permute(back)
        assert_close(both_ways(attention(*inputs), inputs, grad), wanted)
    summed = torch.autograd.grad(attention(*inputs).sum(), inputs)
    assert_close([inputs[0], *summed], [inputs[0].double(), *wanted_for(inputs, torch.ones_like(numbers))[1:]])


@hopper
@pytest.mark.parametrize("documents", [None, [[1030, 1100, 4], [2134]], [[1067, 1067], [2134]], [[10] * 213 + [4]] * 2])
def test_cudnn_is_what_runs_and_nothing_waits(moves, documents: list[list[int]] | None):
    packed = None if documents is None else Documents.of(starts_of(documents).cuda())
    inputs = tensors(2, 2134, 8, 2, 64, "batch first")
    grad = torch.randn(2134, 2, 8, 64, device="cuda").bfloat16()

    def run() -> None:
        both_ways(attention(*inputs, Visibility(documents=packed), packing_kernels=moves), inputs, grad)

    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    fast = any("cudnn" in event.key for event in trace.key_averages())
    assert fast == (packed is None or packed.padded_rows is not None)
