"""Packed documents: what is worked out on the host, rows moved there and back, and attention in padded rows."""

from __future__ import annotations

import importlib.util
import itertools
from types import ModuleType
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from petatron.kernels.attention import cudnn, document_layout, flash, gather_scatter_rows
from petatron.kernels.attention.dense_attention import equal_length_attention
from petatron.kernels.attention.document_layout import (
    MIN_PADDED_DOCUMENT,
    PADDED_LENGTHS_PER_OCTAVE,
    Documents,
    padded_lengths,
)
from petatron.kernels.attention.packed_document_attention import PaddedKernels, padded_attention
from tests import reference_attention as reference
from tests.longform import diagonal, later

if importlib.util.find_spec("triton") is None:
    TWINS: list[ModuleType] = [gather_scatter_rows]
else:
    from petatron.kernels.triton.attention import gather_scatter_rows as triton_rows

    TWINS = [gather_scatter_rows, triton_rows]


def starts_of(*lengths: list[int]) -> Tensor:
    """Document starts [B, S] from the lengths of each row's documents."""
    return torch.tensor([[sum(row[:i]) for i, n in enumerate(row) for _ in range(n)] for row in lengths])


@st.composite
def packings(draw: st.DrawFn, longest: int = 3000) -> list[list[int]]:
    length = draw(st.integers(1, longest))
    lengths = []
    for _ in range(draw(st.integers(1, 3))):
        edges = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=8))})
        lengths.append(np.diff(edges).tolist())
    return lengths


class TestDocuments:
    @settings(max_examples=60, deadline=None)
    @given(packings())
    def test_every_token_has_one_row(self, lengths: list[list[int]]):
        found = Documents.of(starts_of(*lengths))
        flat = [n for row in lengths for n in row]
        assert found.cu_seqlens.tolist() == [0, *np.cumsum(flat).tolist()] and found.cu_seqlens.dtype == torch.int32
        assert found.max_seqlen == max(flat)
        assert (found.padded_rows is None) == (max(flat) < MIN_PADDED_DOCUMENT)
        if found.padded_rows is not None:
            source = found.padded_rows.token_index
            assert sorted(source[source >= 0].tolist()) == list(range(sum(flat))) and source.dtype == torch.int32

    @settings(max_examples=60, deadline=None)
    @given(packings())
    def test_long_documents_are_padded_and_short_ones_follow(self, lengths: list[list[int]]):
        found = Documents.of(starts_of(*lengths))
        if found.padded_rows is None:
            return
        edges = set(zip(found.cu_seqlens.tolist(), found.cu_seqlens.tolist()[1:]))
        row, source = 0, found.padded_rows.token_index
        for group in found.padded_rows.groups:
            assert group.first_row == row and group.count & (group.count - 1) == 0
            for document in source[row : row + group.count * group.length].view(group.count, -1).tolist():
                real = [number for number in document if number >= 0]
                assert len(real) >= MIN_PADDED_DOCUMENT and document == real + [-1] * (group.length - len(real))
                edges.remove((real[0], real[-1] + 1))
                assert real == list(range(real[0], real[-1] + 1))
            row += group.count * group.length
        assert row == found.padded_rows.first_short_row
        short = source[row:].tolist()
        ends = found.padded_rows.short_cu_seqlens.tolist()
        assert ends[0] == 0 and ends[-1] == len(short) and found.padded_rows.short_cu_seqlens.dtype == torch.int32
        for begin, end in itertools.pairwise(ends):
            edges.remove((short[begin], short[end - 1] + 1))
            assert (
                short[begin:end] == list(range(short[begin], short[end - 1] + 1)) and end - begin < MIN_PADDED_DOCUMENT
            )
        assert found.padded_rows.short_max_seqlen == max(np.diff(ends), default=0)
        assert not edges, "every document is somewhere"

    @given(st.lists(st.integers(1, 1 << 20), min_size=1, max_size=50))
    def test_padded_lengths_are_few_and_close(self, lengths: list[int]):
        real, padded = np.array(lengths), padded_lengths(np.array(lengths))
        assert (padded >= real).all() and (
            padded - real
            < np.maximum(MIN_PADDED_DOCUMENT / PADDED_LENGTHS_PER_OCTAVE, 2 * real / PADDED_LENGTHS_PER_OCTAVE)
        ).all()
        assert (padded_lengths(padded) == padded).all(), "a padded length is one of the lengths"

    def test_shapes_are_few(self):
        assert len(np.unique(padded_lengths(np.arange(MIN_PADDED_DOCUMENT, 8193)))) == 25

    def test_equal_documents(self):
        found = Documents.of(starts_of([2048] * 4, [2048] * 4))
        assert found.equal_length == 2048
        assert found.padded_rows is not None and [(g.count, g.length) for g in found.padded_rows.groups] == [(8, 2048)]
        assert (
            found.padded_rows.token_index.tolist() == list(range(8 * 2048)) and found.padded_rows.short_max_seqlen == 0
        )
        assert Documents.of(starts_of([2000] * 4)).equal_length is None, "that would be a shape of its own"
        assert Documents.of(starts_of([2048, 1024])).equal_length is None

    def test_short_documents_keep_their_place(self):
        found = Documents.of(starts_of([10] * 100))
        assert (
            found.padded_rows is None
            and found.max_seqlen == 10
            and found.cu_seqlens.tolist() == list(range(0, 1001, 10))
        )

    def test_to_a_device(self):
        found = Documents.of(starts_of([3, 1200, 5])).to(torch.device("meta"))
        assert [x.device.type for x in found.tensors] == ["meta"] * 4
        assert found.max_seqlen == 1200 and found.padded_rows is not None and len(found.padded_rows.groups) == 1


def tensors(length: int, heads: int, groups: int, width: int, order: str) -> list[Tensor]:
    """[S, 2, H, E]: of their own, batch first, or slices of one tensor as a product makes them."""
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    if order == "sequence first":
        found = [make(length, 2, h, width) for h in (heads, groups, groups)]
    elif order == "batch first":
        found = [make(2, length, h, width).transpose(0, 1) for h in (heads, groups, groups)]
    else:
        found = make(2, length, heads + 2 * groups, width).transpose(0, 1).split((heads, groups, groups), dim=2)
    return [x.detach().requires_grad_() for x in found]


ORDERS = ["sequence first", "batch first", "slices"]


class Looped:
    """Ragged attention, a document at a time."""

    def varlen_forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor, max_seqlen: int
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        assert max_seqlen == cu_seqlens.diff().max()
        found = [flash.forward(*(dense(x, edge) for x in (q, k, v)), causal=True) for edge in edges(cu_seqlens)]
        return torch.cat([out[0].transpose(0, 1) for out, _ in found]), tuple(lse for _, lse in found)

    def varlen_backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        out: Tensor,
        saved: tuple,
        cu_seqlens: Tensor,
        max_seqlen: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = []
        for edge, lse in zip(edges(cu_seqlens), saved, strict=True):
            g, q1, k1, v1, o = (dense(x, edge) for x in (grad, q, k, v, out))
            found.append(flash.backward(g, q1, k1, v1, out=o, lse=lse, causal=True))
        dq, dk, dv = (torch.cat([x[0].transpose(0, 1) for x in parts]) for parts in zip(*found, strict=True))
        return dq, dk, dv


def edges(ends: Tensor) -> list[tuple[int, int]]:
    return list(itertools.pairwise(ends.tolist()))


def dense(rows_RHE: Tensor, edge: tuple[int, int]) -> Tensor:
    return rows_RHE[edge[0] : edge[1]].transpose(0, 1).unsqueeze(0)


KERNELS = PaddedKernels(gather_scatter_rows, flash, Looped())


def assert_attends(inputs: list[Tensor], starts: Tensor) -> Tensor:
    """Output and gradients are those of the reference."""
    layout = Documents.of(starts).padded_rows
    assert layout is not None
    out = padded_attention(inputs[0], inputs[1], inputs[2], layout, KERNELS)
    wanted = reference.attention(inputs[0], inputs[1], inputs[2], document_starts_BS=starts)
    grad = torch.randn_like(out)
    ours = [out, *torch.autograd.grad(out, inputs, grad)]
    for mine, true in zip(ours, [wanted, *torch.autograd.grad(wanted, inputs, grad)], strict=True):
        torch.testing.assert_close(mine, true, rtol=0, atol=1e-11)
    return out


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of 32 tokens are long, so that a test is short."""
    monkeypatch.setattr(document_layout, "MIN_PADDED_DOCUMENT", 32)


@pytest.mark.usefixtures("small")
class TestPadded:
    @pytest.mark.parametrize("order", ORDERS)
    @pytest.mark.parametrize(("heads", "groups"), [(2, 2), (4, 2), (3, 1)])
    @pytest.mark.parametrize("starts", [starts_of([40, 3, 57], [99, 1]), starts_of([50, 50], [33, 67])])
    def test_equals_reference(self, heads: int, groups: int, order: str, starts: Tensor):
        out = assert_attends(tensors(100, heads, groups, 8, order), starts)
        assert (out.stride(1) > out.stride(0)) == (order != "sequence first"), "the memory order of the queries"

    def test_gradient_that_is_expanded(self):
        """A sum hands over a gradient without memory of its own."""
        starts, inputs = starts_of([50], [40, 10]), tensors(50, 2, 1, 4, "batch first")
        layout = Documents.of(starts).padded_rows
        assert layout is not None
        out = padded_attention(inputs[0], inputs[1], inputs[2], layout, KERNELS)
        wanted = reference.attention(inputs[0], inputs[1], inputs[2], document_starts_BS=starts)
        for mine, true in zip(*(torch.autograd.grad(x.sum(), inputs) for x in (out, wanted)), strict=True):
            torch.testing.assert_close(mine, true, rtol=0, atol=1e-11)


@settings(max_examples=15, deadline=None)
@given(packings(200), st.sampled_from([(2, 2), (4, 2), (3, 1)]))
def test_any_packing_equals_reference(lengths: list[list[int]], heads: tuple[int, int]):
    starts = starts_of(*lengths)
    with mock.patch.object(document_layout, "MIN_PADDED_DOCUMENT", 32):
        if Documents.of(starts).padded_rows is not None:
            batch, length = starts.shape
            shapes = [(length, batch, count, 4) for count in (*heads, heads[1])]
            assert_attends([torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes], starts)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("length", [16, 48])
def test_documents_of_one_length_are_a_larger_batch(order: str, length: int):
    inputs = tensors(48, 4, 2, 8, order)
    starts = (torch.arange(48) // length * length).expand(2, 48)
    ours = equal_length_attention(*inputs, length, causal=True)
    wanted = reference.attention(*inputs, document_starts_BS=starts)
    grad = torch.randn_like(wanted)
    for mine, true in zip(
        [ours, *torch.autograd.grad(ours, inputs, grad)],
        [wanted, *torch.autograd.grad(wanted, inputs, grad)],
        strict=True,
    ):
        torch.testing.assert_close(mine, true, rtol=0, atol=1e-11)


@diagonal(3)
@pytest.mark.parametrize("twin", TWINS, ids=lambda module: module.__name__.split(".")[2])
@pytest.mark.parametrize(
    ("heads", "width", "order"),
    [
        *((3, 5, order) for order in ORDERS),
        *((4, 8, order) if order == "slices" else later(4, 8, order) for order in ORDERS),
    ],
)
def test_moves_there_and_back(twin: ModuleType, heads: int, width: int, order: str):
    """Documents of 20 and 12 tokens of one row, and one of 32 of the other, in padded rows of 16 and 32."""
    x = tensors(32, heads, 1, width, order)[0].detach()
    first, second, third = list(range(20)) + [-1] * 12, list(range(32, 64)), list(range(20, 32)) + [-1] * 4
    source = torch.tensor(first + second + third, dtype=torch.int32)
    number, real = source.long(), source >= 0
    flat = x.transpose(0, 1).flatten(0, 1)
    for others in range(3):
        given_ = [x, *tensors(32, heads + 1, 1, width, order)[1:]][: others + 1]
        found = twin.gather_rows(given_, source)
        assert torch.equal(found[0][real], flat[number[real]]) and (found[0][~real] == 0).all()
        back = [torch.full_like(one, float("nan")) for one in given_]
        for start, stop in ((64, 80), (0, 64)):
            twin.scatter_rows([rows[start:stop] for rows in found], source[start:stop], into_SBHE=back)
        assert all(torch.equal(mine, true) for mine, true in zip(back, given_, strict=True))


class TestCudnn:
    def test_why_not(self):
        q = torch.empty(1, 1, 128, 64, dtype=torch.bfloat16)
        assert cudnn.unsupported_tensors_reason(q, q) == "the device is no NVIDIA GPU"
        assert (
            cudnn.unsupported_tensors_reason(q, q[..., :32])
            == "heads of 64 and 32 values; equal multiples of 8 up to 128, 192, 256, and 192 with 128 are served"
        )
        wide = torch.empty(1, 1, 128, 256, dtype=torch.bfloat16)
        for served in ((192, 128), (192, 192), (256, 256)):
            of_width = (wide[..., :width] for width in served)
            assert cudnn.unsupported_tensors_reason(*of_width) == "the device is no NVIDIA GPU"
        assert "heads of 256 and 128" in str(cudnn.unsupported_tensors_reason(wide, wide[..., :128]))
        assert "heads of 160" in str(cudnn.unsupported_tensors_reason(wide[..., :160], wide[..., :160]))

    @pytest.mark.skipif(torch.version.cuda is not None, reason="says what it says about a build for CUDA")
    def test_a_build_without_cuda_has_neither(self):
        for kernel in (cudnn, flash):
            assert kernel.unsupported_reason("cuda", (9, 0), torch.bfloat16) == "the device is no NVIDIA GPU"

    @pytest.mark.parametrize(
        ("kernel", "capability", "dtype", "reason"),
        [
            (cudnn, (8, 0), torch.bfloat16, "the device is no Hopper GPU"),
            (cudnn, (9, 0), torch.float32, "torch.float32 is not half precision"),
            (cudnn, (9, 0), torch.float16, "cuDNN 91400 is older than 9.15"),
            (flash, (7, 5), torch.float16, "the device is older than Ampere"),
            (flash, (9, 0), torch.float64, "torch.float64 is not half precision"),
            (flash, (9, 0), torch.bfloat16, None),
        ],
    )
    def test_what_is_lacking(self, kernel: ModuleType, capability: tuple[int, int], dtype: torch.dtype, reason: str):
        with (
            mock.patch.object(torch.version, "cuda", "13.0"),
            mock.patch.object(torch.backends.cudnn, "version", lambda: 91400),
        ):
            assert kernel.unsupported_reason("cuda", capability, dtype) == reason

    def test_determinism(self):
        with (
            mock.patch.object(torch.version, "cuda", "13.0"),
            mock.patch.object(torch.backends.cudnn, "version", lambda: 91900),
        ):
            assert cudnn.unsupported_reason("cuda", (9, 0), torch.bfloat16) is None
            torch.use_deterministic_algorithms(True)
            try:
                assert "not deterministic" in str(cudnn.unsupported_reason("cuda", (9, 0), torch.bfloat16))
            finally:
                torch.use_deterministic_algorithms(False)

    @pytest.mark.parametrize(
        ("grad", "copied"),
        [
            (torch.randn(1, 6, 2, 4).transpose(1, 2), False),
            (torch.randn(1, 2, 6, 4), True),
            (torch.randn(6, 1, 2, 4).permute(1, 2, 0, 3), False),
            (torch.zeros(()).expand(1, 2, 6, 4), True),
        ],
    )
    def test_the_gradient_is_laid_out_as_the_output(self, grad: Tensor, copied: bool):
        """Strides over a single element may differ; others make a copy."""
        out = torch.randn(1, 6, 2, 4).transpose(1, 2)
        found = cudnn._with_strides_of(out, grad)
        assert found.stride() == out.stride() and torch.equal(found, grad)
        assert (found.data_ptr() != grad.data_ptr()) == copied


def test_room_for_more_documents_is_filled_with_empty_ones():
    some = Documents.of(torch.tensor([[0, 0, 2, 2], [0, 1, 1, 1]]))
    other = Documents.of(torch.tensor([[0, 0, 0, 0], [0, 0, 0, 3]]))
    room = some.bounded(6)
    assert room.cu_seqlens.tolist() == [0, 2, 4, 5, 8, 8, 8] and room.max_seqlen == 4
    room.copy_(other)
    assert room.cu_seqlens.tolist() == [0, 4, 7, 8, 8, 8, 8] and torch.equal(room.starts_BS, other.starts_BS)
    assert some.num_documents == 4 and some.cu_seqlens.tolist() == [0, 2, 4, 5, 8], "it has memory of its own"
