"""FP8 weights between ranks: what is all-gathered is cast to the same numbers as what was sent, whichever rank owned which range."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from petatron.kernels.fp8 import cast_and_gemm, param_gather
from petatron.kernels.fp8.cast_and_gemm import BLOCK, E4M3, Fp8Matrix, dequantize, power_of_two_scale
from petatron.kernels.fp8.param_gather import REFERENCE, SCALE_RUN_ELEMENTS, Fp8ParamGatherKernels
from tests.longform import diagonal

TENSORS = [(16, 16), (48, 144), (112, 32)]
SQUARES = [(128, 128), (256, 384)]


def gathered(w: Tensor, *, squares: bool, cuts: Sequence[int], kernels: Fp8ParamGatherKernels = REFERENCE) -> Tensor:
    """A weight whose elements up to each cut belong to one rank each, as all of them get it."""
    flat, columns = w.flatten(), w.shape[1] if squares else None
    amax = torch.zeros(w.numel() // BLOCK**2 if squares else 1, device=w.device)
    edges = [0, *sorted(cuts), w.numel()]
    parts = [(begin, flat[begin:end]) for begin, end in pairwise(edges)]
    for begin, part in parts:
        kernels.update_shard_amax(part, amax, begin=begin, columns=columns)
    scale, sent = power_of_two_scale(amax, E4M3), torch.empty(flat.shape, dtype=E4M3, device=w.device)
    for begin, part in parts:
        kernels.quantize_shard(part, scale, sent[begin : begin + part.numel()], begin=begin, columns=columns)
    out = torch.full_like(flat, 7.0)
    kernels.dequantize_shards(sent.view(1, -1), scale, out.view(1, -1), columns=columns)
    return out.view(w.shape)


def same(ours: Tensor, wanted: Tensor) -> bool:
    """To the bit, but that one NaN is as good as another."""
    return torch.equal(ours.nan_to_num(nan=1e30), wanted.nan_to_num(nan=1e30)) and torch.equal(
        ours.isnan(), wanted.isnan()
    )


def assert_same_operands(ours: Fp8Matrix, wanted: Fp8Matrix) -> None:
    for one, other in ((ours.rows, wanted.rows), (ours.columns, wanted.columns)):
        assert same(dequantize(one), dequantize(other))


def draw(shape: tuple[int, int], *, seed: int, spread: float, top: float, dtype: torch.dtype) -> Tensor:
    """Normal numbers times powers of two from 2^-spread to 1, up to a largest of `top`, with zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x *= torch.exp2(-spread * torch.rand(shape, generator=generator, dtype=torch.float64))
    x[torch.rand(shape, generator=generator) < 0.05] = 0.0
    return (x / x.abs().max().clamp(min=1e-30) * top).to(dtype)


def exact(shape: tuple[int, int], *, seed: int) -> Tensor:
    """Numbers that lose nothing: normal in e4m3, few binary orders apart."""
    generator = torch.Generator().manual_seed(seed)
    mantissa = 1 + torch.randint(0, 8, shape, generator=generator) / 8
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (sign * torch.ldexp(mantissa, torch.randint(-3, 4, shape, generator=generator))).to(torch.bfloat16)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_arrives_is_cast_to_the_same_numbers(data: st.DataObject):
    squares = data.draw(st.booleans(), "squares")
    shape = data.draw(st.sampled_from(SQUARES if squares else TENSORS), "shape")
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32]), "dtype")
    # From the least subnormal of the format to its largest number; 224 and 448 are where a scale ends.
    least, most = math.log2(torch.finfo(dtype).smallest_normal) - 7, 127
    top = 2.0 ** data.draw(st.integers(int(least), most), "exponent") * data.draw(st.floats(1.0, 1.99), "mantissa")
    spread = data.draw(st.sampled_from([0.0, 4.0, 30.0, 150.0]), "spread")
    w = draw(shape, seed=data.draw(st.integers(0, 10**6), "seed"), spread=spread, top=top, dtype=dtype)
    assert w.isfinite().all()
    step = SCALE_RUN_ELEMENTS if squares else 1
    cuts = [step * at for at in data.draw(st.lists(st.integers(0, w.numel() // step), max_size=4), "cuts")]
    back, cast = (
        gathered(w, squares=squares, cuts=cuts),
        cast_and_gemm.cast_block_128x128 if squares else cast_and_gemm.cast_tensor,
    )
    assert back.isfinite().all()
    assert_same_operands(cast(back, E4M3), cast(w, E4M3))
    assert same(gathered(back, squares=squares, cuts=[]), back)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_largest_of_all(dtype: torch.dtype):
    """Rounded up, it would be infinite."""
    w = torch.full((16, 16), torch.finfo(dtype).max, dtype=dtype)
    w[0, 0] = 1.0
    back = gathered(w, squares=False, cuts=[])
    assert back.isfinite().all()
    assert_same_operands(cast_and_gemm.cast_tensor(back, E4M3), cast_and_gemm.cast_tensor(w, E4M3))


@pytest.mark.parametrize("largest", [224.0, 225.0, 231.0, 232.0, 240.0, 433.0, 448.0])
def test_every_scale_at_its_ends(largest: float):
    """Beside the least numbers that e4m3 has, and half of these."""
    small = torch.arange(48).repeat(16)[: 16 * 16] / 2**10
    for power in (-120, -20, 0, 20, 110):
        w = (small.view(16, 16) * 2.0**power).to(torch.bfloat16)
        w[3, 3] = largest * 2.0**power
        back = gathered(w, squares=False, cuts=[100])
        assert_same_operands(cast_and_gemm.cast_tensor(back, E4M3), cast_and_gemm.cast_tensor(w, E4M3))
        scale, again = (cast_and_gemm.cast_tensor(x, E4M3).rows.scale for x in (w, back))
        assert float(again / scale) == (0.5 if 224 < largest <= 232 else 1.0)


@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize("spoiled", [math.inf, -math.inf, math.nan, -math.nan])
def test_what_is_not_finite_is_not_lost(squares: bool, spoiled: float):
    w = draw((256, 128), seed=1, spread=4.0, top=100.0, dtype=torch.bfloat16)
    w[200, 7] = spoiled
    cast = cast_and_gemm.cast_block_128x128 if squares else cast_and_gemm.cast_tensor
    back = gathered(w, squares=squares, cuts=[64 * 100])
    assert back[200, 7].isnan() and int(back.isnan().sum()) == 1
    assert_same_operands(cast(back, E4M3), cast(w, E4M3))


@pytest.mark.parametrize("squares", [False, True])
def test_zeros(squares: bool):
    w = torch.zeros(128, 256, dtype=torch.bfloat16)
    assert torch.equal(gathered(w, squares=squares, cuts=[64]), w)


def test_products_are_the_same_to_the_bit():
    w = draw((64, 96), seed=5, spread=20.0, top=225.0, dtype=torch.bfloat16)
    back = gathered(w, squares=False, cuts=[1000])
    assert not torch.equal(back, w)
    x = cast_and_gemm.cast_tensor(torch.randn(32, 96).to(torch.bfloat16), E4M3)
    ours, wanted = (
        cast_and_gemm.emulated_gemm(
            x.rows, cast_and_gemm.cast_tensor(each, E4M3).rows, dtype=torch.bfloat16, fast=False
        )
        for each in (back, w)
    )
    assert torch.equal(ours, wanted)


def test_a_scale_per_row_would_not_do():
    """Its numbers are others in the columns of the same weight, of which a row's are too coarse."""
    w = draw((64, 96), seed=6, spread=0.0, top=1.0, dtype=torch.bfloat16)
    w[0] *= 2.0**-18
    w[0, 0] = 1.0
    back = dequantize(cast_and_gemm.cast_rowwise_operand(w, E4M3)).to(w.dtype)
    ours, wanted = cast_and_gemm.cast_rowwise(back, E4M3), cast_and_gemm.cast_rowwise(w, E4M3)
    assert same(dequantize(ours.rows), dequantize(wanted.rows))
    w[1:] *= 2.0**-18
    back = dequantize(cast_and_gemm.cast_rowwise_operand(w, E4M3)).to(w.dtype)
    assert not same(
        dequantize(cast_and_gemm.cast_rowwise(back, E4M3).columns),
        dequantize(cast_and_gemm.cast_rowwise(w, E4M3).columns),
    )


@pytest.mark.parametrize("kernels", ["plain", "triton"])
@pytest.mark.parametrize("squares", [False, True])
def test_parts_that_lie_apart_and_end_in_padding(kernels: str, squares: bool):
    """Four ranks, of which the last has less, and messages with other things between."""
    chosen = WIRE[kernels]()
    shape, ranks = (384, 128) if squares else (48, 32), 5
    rows = -(-shape[0] // ranks)
    length, columns = rows * shape[1], shape[1] if squares else None
    w = exact(shape, seed=2)
    parts = torch.zeros(ranks, length, dtype=torch.bfloat16)
    parts.view(-1)[: w.numel()] = w.flatten()
    amax = torch.zeros(w.numel() // BLOCK**2 if squares else 1)
    for rank, part in enumerate(parts):
        chosen.update_shard_amax(part, amax, begin=rank * length, columns=columns)
    scale = power_of_two_scale(amax, E4M3)
    messages = torch.zeros(ranks, length + 48, dtype=torch.uint8)
    for rank, part in enumerate(parts):
        out = messages[rank, 32 : 32 + length].view(E4M3)
        chosen.quantize_shard(part, scale, out, begin=rank * length, columns=columns)
    out = torch.full((ranks, length + 16), 7.0, dtype=torch.bfloat16)
    chosen.dequantize_shards(messages[:, 32 : 32 + length].view(E4M3), scale, out[:, 16:], columns=columns)
    assert torch.equal(out[:, 16:].reshape(-1)[: w.numel()].view(shape), w)
    assert (out[:, :16] == 7.0).all() and (messages[:, :32] == 0).all() and (messages[:, 32 + length :] == 0).all()


def _triton() -> Fp8ParamGatherKernels:
    pytest.importorskip("triton")
    return pytest.importorskip("petatron.kernels.triton.fp8.param_gather").TRITON


WIRE = {"plain": lambda: REFERENCE, "triton": _triton}


@diagonal(2)
@pytest.mark.parametrize(("shape", "squares"), [((48, 144), False), ((256, 384), True), ((384, 128), True)])
def test_triton_does_the_same(shape: tuple[int, int], squares: bool):
    """With numbers that are not rounded, as its interpreter rounds in a way of its own."""
    kernels, w = _triton(), exact(shape, seed=3)
    cuts = [SCALE_RUN_ELEMENTS * 3, SCALE_RUN_ELEMENTS * 80]
    assert torch.equal(gathered(w, squares=squares, cuts=cuts, kernels=kernels), w)
    columns, flat = shape[1] if squares else None, w.flatten()
    flat[-3] = math.nan
    for begin in (0, SCALE_RUN_ELEMENTS * 80):
        ours, wanted = torch.zeros(2, w.numel() // BLOCK**2 if squares else 1)
        for way, amax in ((kernels, ours), (param_gather.REFERENCE, wanted)):
            way.update_shard_amax(flat[begin:], amax, begin=begin, columns=columns)
        assert same(ours, wanted) and ours.isnan().any()


def test_triton_gives_zeros_the_sign_that_the_reference_does():
    w = torch.tensor([0.0, -0.0, 1.0, -1.0], dtype=torch.bfloat16)
    ours, wanted = (torch.empty(4, dtype=E4M3) for _ in range(2))
    for kernels, sent in ((_triton(), ours), (REFERENCE, wanted)):
        kernels.quantize_shard(w, torch.ones(1), sent, begin=0, columns=None)
    assert torch.equal(ours.view(torch.uint8), wanted.view(torch.uint8))
    values = torch.tensor([0.0, -0.0]).to(E4M3).view(1, -1)
    restored = torch.empty(1, 2, dtype=torch.bfloat16)
    _triton().dequantize_shards(values, torch.ones(1), restored, columns=None)
    assert restored.signbit().tolist() == [[False, True]]


def test_triton_restores_what_is_too_large():
    kernels = _triton()
    values = torch.tensor([256.0, -256.0, 448.0, 0.0, 2.0**-9, 1.0]).to(E4M3).view(1, -1)
    for scale in (2.0**120, 1.0, 2.0**-100):
        ours, wanted = (torch.empty(1, 6, dtype=torch.bfloat16) for _ in range(2))
        kernels.dequantize_shards(values, torch.tensor([scale]), ours, columns=None)
        REFERENCE.dequantize_shards(values, torch.tensor([scale]), wanted, columns=None)
        assert torch.equal(ours, wanted) and ours.isfinite().all()


def test_nothing_of_a_matrix():
    for kernels in (REFERENCE, _triton()):
        empty, amax = torch.empty(0, dtype=torch.bfloat16), torch.zeros(1)
        kernels.update_shard_amax(empty, amax, begin=0, columns=None)
        kernels.quantize_shard(empty, torch.ones(1), empty.to(E4M3), begin=0, columns=None)
        kernels.dequantize_shards(empty.to(E4M3).view(1, 0), torch.ones(1), empty.view(1, 0), columns=None)
        assert amax == 0
