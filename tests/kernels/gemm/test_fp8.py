"""Eight-bit casts and products: scales, what is lost, what must not be."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from petatron.kernels.fp8 import cast_and_gemm
from petatron.kernels.fp8.cast_and_gemm import (
    E4M3,
    E5M2,
    REFERENCE,
    Fp8Matrix,
    Fp8Operand,
    dequantize,
    power_of_two_scale,
)

FORMATS = [E4M3, E5M2]
CASTS = ["cast_tensor", "cast_rowwise", "cast_block_1x128", "cast_block_128x128"]
# Half a step of a number with 3 or 2 bits behind the point, relative to the number.
ROUNDING = {E4M3: 2**-4, E5M2: 2**-3}


def normal(*shape: int, seed: int, spread: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x * torch.exp2(spread * torch.randn(shape[0], 1, generator=generator, dtype=torch.float64))


def cast(name: str, x: Tensor, dtype: torch.dtype) -> Fp8Matrix:
    return getattr(REFERENCE, name)(x, dtype)


@settings(max_examples=300, deadline=None)
@given(st.floats(min_value=2.0**-110, max_value=2.0**120, width=32), st.sampled_from(FORMATS))
def test_scale_is_the_smallest_power_of_two_that_fits(amax: float, dtype: torch.dtype):
    scale = float(power_of_two_scale(torch.tensor(amax), dtype))
    limit = torch.finfo(dtype).max
    assert math.frexp(scale)[0] == 0.5
    assert amax <= limit * scale
    assert amax > limit * scale / 2


@pytest.mark.parametrize("dtype", FORMATS)
def test_scales_at_the_edges(dtype: torch.dtype):
    limit = torch.finfo(dtype).max
    above = torch.nextafter(torch.tensor(limit), torch.tensor(math.inf))
    odd = torch.tensor([0.0, math.inf, math.nan, 1e-45, 3.4e38, limit, float(above)])
    scales = power_of_two_scale(odd, dtype)
    assert scales[:3].tolist() == [1, 1, 1]
    assert (scales > 0).all() and scales.isfinite().all()
    assert scales[5:].tolist() == [1, 2]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32, torch.float64])
def test_both_orientations_hold_the_numbers(name: str, dtype: torch.dtype, source: torch.dtype):
    x = normal(160, 272, seed=1, spread=1.0).to(source)
    made = cast(name, x, dtype)
    for operand, wanted in ((made.rows, x), (made.columns, x.t())):
        assert operand.values.is_contiguous() and operand.values.shape == wanted.shape
        error = (dequantize(operand).double() - wanted.double()).abs()
        smallest = torch.finfo(dtype).smallest_normal * float(operand.scale.max())
        assert (error <= ROUNDING[dtype] * wanted.double().abs() + ROUNDING[dtype] * smallest).all()


@pytest.mark.parametrize("name", CASTS)
def test_finer_scales_keep_small_rows(name: str):
    """One scale for all loses a row that is 2^-20 of the largest; a scale of its own keeps it."""
    x = normal(256, 128, seed=2).float()
    x[:128] *= 2.0**-20
    small = dequantize(cast(name, x, E4M3).rows)[:128]
    if name == "cast_tensor":
        assert (small == 0).any()
    else:
        assert ((small - x[:128]).abs() <= x[:128].abs() * 2**-4 + 2.0**-36).all()


def test_scales_of_blocks_and_squares_lie_as_cublas_wants():
    x = normal(256, 640, seed=3).float()
    blocks, squares = cast_and_gemm.cast_block_1x128(x, E4M3), cast_and_gemm.cast_block_128x128(x, E4M3)
    assert blocks.rows.scale.shape == (256, 5) and blocks.rows.scale.stride() == (1, 256)
    assert blocks.columns.scale.shape == (640, 2) and blocks.columns.scale.stride() == (1, 640)
    assert squares.rows.scale.shape == (2, 8) and squares.rows.scale.is_contiguous()
    assert squares.columns.scale.shape == (5, 4) and squares.columns.scale.is_contiguous()
    assert (squares.rows.scale[:, 5:] == 1).all()


@pytest.mark.parametrize("name", CASTS)
def test_a_part_has_the_numbers_it_has_in_the_whole(name: str):
    """With powers of two, ranks that take the scale of their own part get the same numbers, unless they are tiny."""
    x = normal(256, 256, seed=4).float()
    whole, part = dequantize(cast(name, x, E4M3).rows), dequantize(cast(name, x[128:], E4M3).rows)
    near = x[128:].abs() > 2.0**-6 * x.abs().max()
    assert torch.equal(whole[128:][near], part[near])


@pytest.mark.parametrize("name", CASTS)
def test_zeros_stay_zeros(name: str):
    made = cast(name, torch.zeros(128, 256), E5M2)
    y = cast_and_gemm.emulated_gemm(made.rows, made.rows, dtype=torch.float32, fast=True)
    assert (y == 0).all()


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_goes_on_as_nan(name: str, bad: float):
    x = normal(128, 256, seed=5).float()
    x[3, 7] = bad
    made = cast(name, x, E4M3)
    w = cast(name, normal(128, 256, seed=6).float(), E4M3)
    y = cast_and_gemm.emulated_gemm(made.rows, w.rows, dtype=torch.float32, fast=True)
    assert y[3].isnan().all() and y[4:].isfinite().all()
    assert dequantize(made.columns)[7, 3].isnan()


def test_delayed_scaling_saturates_and_says_how_large_it_got():
    x = torch.tensor([[1.0, -1000.0, 3.0, 0.0]])
    amax = torch.tensor([2.0])
    made = cast_and_gemm.cast_with_scale(x, E4M3, scale=torch.ones(1), amax=amax)
    assert dequantize(made.rows).tolist() == [[1, -448, 3, 0]]
    assert amax == 1000
    cast_and_gemm.cast_with_scale(x / 1000, E4M3, scale=torch.ones(1), amax=amax)
    assert amax == 1000


def test_next_scale_goes_by_the_last_or_by_all():
    history = torch.tensor([448.0, 4480.0, math.inf, 896.0])
    recent, largest = torch.zeros(1), torch.zeros(1)
    cast_and_gemm.update_scale(history.clone(), recent, E4M3, most_recent=True)
    cast_and_gemm.update_scale(history, largest, E4M3, most_recent=False)
    assert recent == 1 and largest == 16
    assert history.tolist() == [0, 0, 896, 448], "the oldest is gone, and the last step's is the last"


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("out", [False, True])
def test_product(name: str, out: bool):
    a, b = normal(144, 384, seed=7), normal(272, 384, seed=8)
    left = cast("cast_block_1x128" if name == "cast_block_128x128" else name, a, E4M3).rows
    right = cast(name, b, E4M3).rows
    buffer = torch.full((144, 272), math.nan) if out else None
    y = cast_and_gemm.emulated_gemm(left, right, dtype=torch.float32, fast=True, out=buffer)
    assert buffer is None or y is buffer
    exact = dequantize(left).double() @ dequantize(right).double().t()
    assert (y - exact).norm() <= 1e-6 * exact.norm()
    true = a @ b.t()
    assert 0.001 < (y - true).norm() / true.norm() < 0.05


@pytest.mark.parametrize("name", ["cast_tensor", "cast_rowwise"])
@pytest.mark.parametrize("start", [0, 3])
def test_what_is_handed_to_the_hardware(name: str, start: int):
    """Torch's operation exists on the CPU too, for these scales; an `out` that is not aligned gets a copy."""
    a, b = (cast(name, normal(rows, 96, seed=rows, spread=2.0), E4M3).rows for rows in (48, 32))
    wanted = cast_and_gemm.emulated_gemm(a, b, dtype=torch.float32, fast=True)
    assert torch.allclose(
        cast_and_gemm.hardware_gemm(a, b, dtype=torch.float32, fast=True), wanted, rtol=1e-4, atol=1e-3
    )
    buffer = torch.full((48 * 32 + 3,), math.nan)
    out = buffer[start : start + 48 * 32].view(48, 32)
    cast_and_gemm.hardware_gemm(a, b, dtype=torch.float32, fast=False, out=out)
    assert torch.allclose(out, wanted, rtol=1e-4, atol=1e-3)
    assert int(buffer.isnan().sum()) == 3


def test_product_in_float64():
    a, b = (cast_and_gemm.cast_rowwise(normal(32, 64, seed=seed), E4M3).rows for seed in (9, 10))
    y = cast_and_gemm.emulated_gemm(a, b, dtype=torch.float64, fast=False)
    assert y.dtype == torch.float64
    assert torch.equal(y, dequantize(a).double() @ dequantize(b).double().t())


def test_grouped_product_leaves_rows_of_no_expert_at_zero():
    x = cast_and_gemm.cast_rowwise_operand(normal(40, 32, seed=11), E4M3)
    flat = cast_and_gemm.cast_rowwise_operand(normal(3 * 16, 32, seed=12), E4M3)
    weight = Fp8Operand(flat.values.view(3, 16, 32), flat.scale.view(3, 16), "rowwise")
    counts = torch.tensor([7, 0, 20])
    y = cast_and_gemm.emulated_grouped_gemm(x.values, x.scale, weight, counts, dtype=torch.float32, fast=True)
    wide = dequantize(flat).view(3, 16, 32)
    assert torch.allclose(y[:7], dequantize(x)[:7] @ wide[0].t(), atol=1e-4)
    assert torch.allclose(y[7:27], dequantize(x)[7:27] @ wide[2].t(), atol=1e-4)
    assert (y[27:] == 0).all()
