"""The Triton casts against the plain ones, bit for bit, in Triton's interpreter.

The interpreter rounds to eight bits in a way of its own (half away from zero, without carrying into the exponent), so the
numbers here are such that nothing is rounded: eight-bit numbers times powers of two. Rounding is a matter for the GPU tests.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from petatron.kernels.fp8 import cast_and_gemm
from petatron.kernels.fp8.cast_and_gemm import E4M3, E5M2, Fp8Matrix, Fp8Operand, Orientation
from tests.longform import diagonal

pytest.importorskip("triton")
twins = pytest.importorskip("petatron.kernels.triton.fp8.cast_and_gemm")

CASTS = ["cast_tensor", "cast_rowwise", "cast_block_1x128", "cast_block_128x128"]
SHAPES = [(16, 16), (128, 128), (144, 272), (272, 96), (320, 16)]


def representable(shape: tuple[int, int], dtype: torch.dtype, *, seed: int, spread: int = 0) -> Tensor:
    """Numbers that lose nothing when cast: normal, and within few binary orders of each other in each tile."""
    generator = torch.Generator().manual_seed(seed)
    mantissas = 8 if dtype == E4M3 else 4
    mantissa = 1 + torch.randint(0, mantissas, shape, generator=generator) / mantissas
    exponent = torch.randint(-2, 3, shape, generator=generator)
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    x = sign * torch.ldexp(mantissa, exponent)
    x[torch.rand(shape, generator=generator) < 0.1] = 0.0
    by_row = torch.randint(-spread, spread + 1, (shape[0], 1), generator=generator)
    return torch.ldexp(x, by_row).to(torch.bfloat16)


def assert_same(ours: Fp8Operand, wanted: Fp8Operand) -> None:
    assert ours.scaling == wanted.scaling
    assert ours.scale.shape == wanted.scale.shape
    if min(ours.scale.shape) > 1:
        assert ours.scale.stride() == wanted.scale.stride()
    assert torch.equal(ours.scale, wanted.scale)
    assert ours.values.is_contiguous() and ours.values.dtype == wanted.values.dtype
    assert torch.equal(ours.values.float(), wanted.values.float())


def assert_casts_same(ours: Fp8Matrix, wanted: Fp8Matrix) -> None:
    assert_same(ours.rows, wanted.rows)
    assert_same(ours.columns, wanted.columns)


@diagonal(4)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CASTS)
def test_cast(name: str, shape: tuple[int, int], dtype: torch.dtype):
    x = representable(shape, dtype, seed=sum(shape), spread=2)
    assert_casts_same(getattr(twins, name)(x, dtype), getattr(cast_and_gemm, name)(x, dtype))


@pytest.mark.parametrize("name", CASTS)
def test_zeros(name: str):
    cast = getattr(twins, name)(torch.zeros(144, 32, dtype=torch.bfloat16), E4M3)
    for operand in (cast.rows, cast.columns):
        assert (operand.values.float() == 0).all() and (operand.scale == 1).all()


def test_one_orientation():
    x = representable((144, 272), E4M3, seed=3, spread=20)
    assert_same(twins.cast_rowwise_operand(x, E4M3), cast_and_gemm.cast_rowwise_operand(x, E4M3))


@diagonal(2)
@pytest.mark.parametrize("name", CASTS)
def test_a_cast_of_one_orientation_equals_that_half_of_both(name: str):
    x = representable((144, 272), E4M3, seed=3, spread=20)
    for kernels in (twins, cast_and_gemm):
        both, rows, columns = (
            getattr(kernels, name)(x, E4M3, orientation=each) for each in ("both", "rows", "columns")
        )
        assert_same(rows.rows, both.rows)
        assert_same(columns.columns, both.columns)
        assert rows.columns_or_none is None and columns.rows_or_none is None
        with pytest.raises(AssertionError, match="only the rows"):
            _ = rows.columns
        with pytest.raises(AssertionError, match="only the columns"):
            _ = columns.rows


def test_the_matrices_of_experts():
    x = torch.stack([representable((48, 144), E4M3, seed=seed, spread=3) for seed in range(3)])
    cast = twins.cast_matrices(x, E4M3)
    assert_casts_same(cast, cast_and_gemm.cast_matrices(x, E4M3))
    assert all(
        tensor.is_contiguous() for operand in (cast.rows, cast.columns) for tensor in (operand.values, operand.scale)
    )


@pytest.mark.parametrize("start", [0.0, 1e6])
def test_delayed_cast_takes_a_scale_and_raises_the_maximum(start: float):
    x = representable((144, 272), E4M3, seed=4)
    scale = torch.tensor([0.25])
    ours, wanted = torch.tensor([start]), torch.tensor([start])
    assert_casts_same(
        twins.cast_with_scale(x, E4M3, scale=scale, amax=ours),
        cast_and_gemm.cast_with_scale(x, E4M3, scale=scale, amax=wanted),
    )
    assert torch.equal(ours, wanted)
    assert wanted == max(start, float(x.abs().max()))


def test_what_is_too_large_becomes_the_largest():
    x = torch.full((16, 16), 3.0, dtype=torch.bfloat16)
    x[1] = -3.0
    amax = torch.zeros(1)
    cast = twins.cast_with_scale(x, E4M3, scale=torch.tensor([2.0**-9]), amax=amax)
    assert (cast.rows.values.float().abs() == 448).all() and amax == 3.0
    assert torch.equal(cast.columns.values.float(), cast.rows.values.float().t())


@diagonal(4)
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("orientation", ["both", "rows", "columns"])
@pytest.mark.parametrize("guess", ["right", 2.0**-9, 2.0**20, 0.0, float("nan")])
def test_a_guessed_scale_changes_no_bit(guess: str | float, orientation: Orientation):
    x = representable((300, 144), E4M3, seed=7)
    wanted = cast_and_gemm.cast_tensor(x, E4M3, orientation=orientation)
    scale = (wanted.columns if orientation == "columns" else wanted.rows).scale
    last = scale.clone() if guess == "right" else torch.tensor([guess])
    found = twins.cast_speculative(x, E4M3, previous_scale=last, orientation=orientation)
    assert (found.rows_or_none is None, found.columns_or_none is None) == (
        orientation == "columns",
        orientation == "rows",
    )
    for ours, true in ((found.rows_or_none, wanted.rows_or_none), (found.columns_or_none, wanted.columns_or_none)):
        if ours is not None and true is not None:
            assert_same(ours, true)
    assert torch.equal(last, scale)


def test_a_right_guess_is_not_cast_again(monkeypatch: pytest.MonkeyPatch):
    """The second kernel finds the scale that was used, and writes nothing: what it would write is spoiled here before."""
    x, launch = representable((300, 144), E4M3, seed=7), twins._launch
    last = cast_and_gemm.cast_tensor(x, E4M3).rows.scale.clone()

    def spoiling(kernel: Any, tensors: Any, *args: Any, **options: Any) -> None:
        if kernel is twins.cast_tiles.redo_cast_if_scale_differs:
            tensors[1].zero_()
        launch(kernel, tensors, *args, **options)

    monkeypatch.setattr(twins, "_launch", spoiling)
    assert not twins.cast_speculative(x, E4M3, previous_scale=last).rows.values.float().any()
    assert twins.cast_speculative(x, E4M3, previous_scale=2 * last).rows.values.float().any()


def test_a_known_maximum_is_used():
    x = representable((32, 48), E4M3, seed=5)
    amax = torch.tensor([100.0])
    assert_casts_same(twins.cast_tensor(x, E4M3, amax=amax), cast_and_gemm.cast_tensor(x, E4M3, amax=amax))


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_found_and_stays_alone(bad: float):
    """In e5m2, which the interpreter can write NaN in."""
    x = representable((144, 32), E5M2, seed=6)
    x[130, 3] = bad
    amax = torch.zeros(1)
    values = twins.cast_with_scale(x, E5M2, scale=torch.ones(1), amax=amax).columns.values.float()
    assert not amax.isfinite()
    assert values[3, 130].isnan() and int(values.isnan().sum()) == 1
    cast = twins.cast_rowwise(x, E5M2)
    assert cast.rows.scale[130] == 1 and (cast.rows.scale[:130] < 1).all()


@pytest.mark.parametrize("name", CASTS)
def test_other_half_precision(name: str):
    x = representable((32, 144), E4M3, seed=7).to(torch.float16)
    assert_casts_same(getattr(twins, name)(x, E4M3), getattr(cast_and_gemm, name)(x, E4M3))


def test_float32_is_refused_where_a_tile_is_transposed():
    """Which compiled kernels garble, though the interpreter does not."""
    x, one = representable((32, 144), E4M3, seed=7).float(), torch.ones(1)
    for cast in (getattr(twins, name) for name in CASTS):
        with pytest.raises(AssertionError, match="float32 is not half precision"):
            cast(x, E4M3)
    with pytest.raises(AssertionError, match="float32 is not half precision"):
        twins.cast_with_scale(x, E4M3, scale=one, amax=one)
    assert_same(twins.cast_rowwise_operand(x, E4M3), cast_and_gemm.cast_rowwise_operand(x, E4M3))


def test_a_transposed_tensor_is_cast_as_it_looks():
    x = representable((48, 144), E4M3, seed=8).t()
    assert_casts_same(twins.cast_block_1x128(x, E4M3), cast_and_gemm.cast_block_1x128(x, E4M3))


@pytest.mark.parametrize("length", [1, 5, 16])
@pytest.mark.parametrize("most_recent", [True, False])
def test_next_scale(length: int, most_recent: bool):
    history = torch.rand(length, generator=torch.Generator().manual_seed(length)) * 1000
    if length > 2:
        history[0], history[1] = float("nan"), float("inf")
    ours, wanted = history.clone(), history.clone()
    scales = torch.zeros(1), torch.zeros(1)
    for _ in range(3):
        twins.update_scale(ours, scales[0], E5M2, most_recent=most_recent)
        cast_and_gemm.update_scale(wanted, scales[1], E5M2, most_recent=most_recent)
        assert torch.equal(ours, wanted) and torch.equal(*scales) and scales[0] > 0
        assert ours[0] == 0


def test_raise_largest():
    x = torch.randn(300, 100, generator=torch.Generator().manual_seed(9))
    low, high = torch.zeros(1), torch.full((1,), 99.0)
    twins.update_amax(x, low)
    twins.update_amax(x, high)
    assert low == x.abs().max() and high == 99
