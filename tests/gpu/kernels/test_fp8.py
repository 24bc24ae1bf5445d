"""FP8 on a CUDA device: casts bit for bit as the reference makes them, products as its emulation does, no waiting."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from petatron.config.schema.precision import PrecisionConfig
from petatron.kernels.fp8 import cast_and_gemm
from petatron.kernels.fp8.cast_and_gemm import E4M3, E5M2, Fp8Matrix, Fp8Operand
from petatron.layers.ops.fp8_gemm import Fp8ExpertGemms, fp8_gemm_factory

CAPABLE = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CAPABLE, reason="needs a CUDA device of capability 9.0")]

RECIPES = ["tensorwise", "delayed", "rowwise", "blockwise"]
CASTS = ["cast_tensor", "cast_rowwise", "cast_block_1x128", "cast_block_128x128"]
SHAPES = [(128, 128), (272, 400), (2048, 1024), (1040, 4096)]


@pytest.fixture
def kernels() -> Any:
    return pytest.importorskip("petatron.kernels.triton.fp8.cast_and_gemm").TRITON


def draw(*shape: int, spread: float = 0.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    x = torch.randn(shape, device="cuda")
    return (x * torch.exp2(spread * torch.randn(shape[0], *[1] * (len(shape) - 1), device="cuda"))).to(dtype)


def assert_same(ours: Fp8Operand, wanted: Fp8Operand) -> None:
    assert torch.equal(ours.scale, wanted.scale)
    assert torch.equal(ours.values.view(torch.uint8), wanted.values.view(torch.uint8))


def assert_casts_same(ours: Fp8Matrix, wanted: Fp8Matrix) -> None:
    assert_same(ours.rows, wanted.rows)
    assert_same(ours.columns, wanted.columns)


def distance(ours: Tensor, true: Tensor) -> float:
    return float((ours.double() - true.double()).norm() / true.double().norm())


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CASTS)
def test_cast(kernels: Any, name: str, shape: tuple[int, int], dtype: torch.dtype):
    x = draw(*shape, spread=4.0)
    assert_casts_same(getattr(kernels, name)(x, dtype), getattr(cast_and_gemm, name)(x, dtype))


def test_delayed_cast(kernels: Any):
    x = draw(1040, 4096)
    for scale in (2.0**-10, 2.0**-3):
        ours, wanted = torch.zeros(2, 1, device="cuda")
        given = torch.tensor([scale], device="cuda")
        assert_casts_same(
            kernels.cast_with_scale(x, E4M3, scale=given, amax=ours),
            cast_and_gemm.cast_with_scale(x, E4M3, scale=given, amax=wanted),
        )
        assert torch.equal(ours, wanted) and ours == x.abs().max()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("guess", ["right", 2.0**-20, 2.0**20, 0.0, math.nan])
def test_a_guessed_scale_changes_no_bit(kernels: Any, guess: str | float, dtype: torch.dtype):
    x = draw(1040, 4096, spread=4.0)
    wanted = cast_and_gemm.cast_tensor(x, dtype)
    last = wanted.rows.scale.clone() if guess == "right" else torch.tensor([guess], device="cuda")
    assert_casts_same(kernels.cast_speculative(x, dtype, previous_scale=last), wanted)
    assert torch.equal(last, wanted.rows.scale)
    assert_same(kernels.cast_speculative(x, dtype, previous_scale=last, orientation="columns").columns, wanted.columns)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_guess_is_right_again_after_what_is_not_finite(kernels: Any, bad: float):
    good, last = draw(256, 384), torch.ones(1, device="cuda")
    wrong = good.clone()
    wrong[5, 300] = bad
    for x in (good, wrong, good, good.zero_()):
        assert_casts_same(kernels.cast_speculative(x, E4M3, previous_scale=last), kernels.cast_tensor(x, E4M3))


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_becomes_nan(kernels: Any, name: str, bad: float):
    x = draw(256, 384)
    x[5, 300] = bad
    for dtype in (E4M3, E5M2):
        cast = getattr(kernels, name)(x, dtype)
        assert cast.rows.values.float().isnan().nonzero().tolist() == [[5, 300]]
        assert cast.columns.values.float().isnan().nonzero().tolist() == [[300, 5]]


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    ("name", "left"), [*((name, E4M3) for name in CASTS), ("cast_tensor", E5M2), ("cast_rowwise", E5M2)]
)
@pytest.mark.parametrize("sizes", [(512, 256, 640), (256, 128, 1280), (1024, 4096, 512)])
def test_product(
    kernels: Any, name: str, fast: bool, out_dtype: torch.dtype, left: torch.dtype, sizes: tuple[int, int, int]
):
    rows, width, length = sizes
    a_cast = "cast_block_1x128" if name == "cast_block_128x128" else name
    a = getattr(cast_and_gemm, a_cast)(draw(rows, length, spread=2.0), left).rows
    b = getattr(cast_and_gemm, name)(draw(width, length, spread=2.0), E4M3).rows
    wanted = cast_and_gemm.emulated_gemm(a, b, dtype=torch.float64, fast=False)
    bound = 1e-2 if fast else 3e-3  # short sums keep 14 bits, long ones more; bfloat16 has 8
    assert distance(kernels.gemm(a, b, dtype=out_dtype, fast=fast), wanted) < bound
    buffer = torch.full((rows * width + 3,), math.nan, dtype=out_dtype, device="cuda")
    for start in (0, 3):  # the second is not aligned
        out = buffer[start : start + rows * width].view(rows, width)
        kernels.gemm(a, b, dtype=out_dtype, fast=fast, out=out)
        assert distance(out, wanted) < bound


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("fp8_format", ["e4m3", "hybrid"])
def test_a_weight_in_training_without_waiting_for_the_device(kernels: Any, recipe: str, fp8_format: str):
    config = PrecisionConfig(bf16=True, fp8_format=fp8_format, fp8_recipe=recipe)  # pyright: ignore[reportArgumentType]
    ways = [fp8_gemm_factory(config, kernels=which)() for which in (kernels, cast_and_gemm.REFERENCE)]
    x, w, g = draw(2048, 512), draw(1536, 512), draw(2048, 1536) * 1e-4
    found = []
    for way in ways:
        w_grad = torch.full(w.shape, math.nan, device="cuda")
        for step in range(3):
            torch.cuda.set_sync_debug_mode("error" if way is ways[0] and step > 0 else "default")
            try:
                y, kept = way.forward(x, w)
                x_grad, job = way.backward(g, w, kept)
                job.write(None, w_grad, accumulate=False)
                job.write(None, w_grad, accumulate=True)
                way.new_step(1)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        found.append((y, x_grad, w_grad))
    exact = (x.double() @ w.double().t(), g.double() @ w.double(), 2 * g.double().t() @ x.double())
    for ours, emulated, true in zip(*found, exact, strict=True):
        assert distance(ours, emulated) < 1e-2
        assert distance(ours, true) < 0.08


@pytest.mark.parametrize("counts", [[300, 0, 17, 707], [256, 256, 256, 256], [300, 0, 17, 600]])
def test_experts(kernels: Any, counts: list[int]):
    """Rows of no expert reach nothing."""
    layers = [Fp8ExpertGemms(which) for which in (kernels, cast_and_gemm.REFERENCE)]
    x, w, g = draw(1024, 256), draw(4, 384, 256), draw(1024, 384)
    sizes, rows = torch.tensor(counts, device="cuda"), sum(counts)
    x[rows:], g[rows:] = math.nan, math.nan
    found = []
    for layer in layers:
        way = layer(sizes)
        y, kept = way.forward(x, w)
        x_grad, job = way.backward(g, w, kept)
        w_grad = torch.full(w.shape, math.nan, device="cuda")
        job.write(x, w_grad, accumulate=False)
        found.append((y[:rows], x_grad[:rows], w_grad))
    for ours, emulated in zip(*found, strict=True):
        assert distance(ours, emulated) < 1e-2
