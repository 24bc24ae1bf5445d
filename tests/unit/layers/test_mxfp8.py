"""MXFP8: quantization bit for bit by a reference in exact arithmetic, GEMMs by their errors, and what a model makes of it."""

from __future__ import annotations

import bisect
import dataclasses
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from petatron.config.schema.precision import PrecisionConfig
from petatron.kernels.fp8 import mxfp8
from petatron.kernels.fp8.cast_and_gemm import E4M3, E5M2, Fp8Operand
from petatron.kernels.fp8.mxfp8 import REFERENCE, MxKernels
from petatron.kernels.linear_gemms import PLAIN_GEMM
from petatron.kernels.moe.grouped_gemm import ExpertCounts, looped_linear
from petatron.layers.ops.fp8_gemm import Fp8ExpertGemms, Fp8Recipe, fp8_gemm_factory
from petatron.layers.ops.linear_op import GemmOp
from petatron.layers.ops.recompute_output import RecomputableOutput
from tests.unit.layers.test_fp8 import distance, draw

MX = PrecisionConfig(bf16=True, fp8_format="e4m3", fp8_recipe="mxfp8")
LAYOUT = {E4M3: (3, 7, 8), E5M2: (2, 15, 15)}
"""Bits of the mantissa, the bias of the exponent, and the largest exponent, by the OCP specification."""


def magnitudes(dtype: torch.dtype) -> list[Fraction]:
    """The finite numbers of a format from 0 up, by their bits: the index is the byte."""
    digits, bias, top = LAYOUT[dtype]
    found: list[Fraction] = []
    for byte in range(128):
        exponent, mantissa = byte >> digits, byte & ((1 << digits) - 1)
        if exponent == 0:
            found.append(Fraction(mantissa) * Fraction(2) ** (1 - bias - digits))
        else:
            found.append((Fraction(1) + Fraction(mantissa, 1 << digits)) * Fraction(2) ** (exponent - bias))
        if found[-1] == Fraction(7, 4) * Fraction(2) ** top:
            return found
    raise AssertionError("the largest number is 1.75 x 2^top")


def nearest_byte(value: Fraction, table: list[Fraction]) -> int:
    """The byte of the nearest number, of two the one with the even mantissa."""
    above = bisect.bisect_left(table, abs(value))
    if above == len(table):
        byte = above - 1
    elif above == 0:
        byte = 0
    else:
        low, high = abs(value) - table[above - 1], table[above] - abs(value)
        byte = above if high < low or (high == low and above % 2 == 0) else above - 1
    return byte


def quantized_by_definition(block: list[float], dtype: torch.dtype) -> tuple[int, list[tuple[bool, int]]]:
    """The scale's byte and, of each element, whether it is negative and the byte of its magnitude."""
    numbers, table = [Fraction(number) for number in block], magnitudes(dtype)
    amax = max(map(abs, numbers))
    power = next(p for p in range(-127, 128) if amax <= table[-1] * Fraction(2) ** p) if amax else 0
    scaled = [number / Fraction(2) ** power for number in numbers]
    return power + 127, [(number < 0, nearest_byte(number, table)) for number in scaled]


def blocks(dtype: torch.dtype) -> Tensor:
    """Ordinary ones, of all sizes that there are, and those at the edges of a scale."""
    edge = float(torch.finfo(dtype).max)
    x = draw(40, 32, seed=1)
    x[8:24] *= 2.0 ** torch.arange(-148, 124, 17).unsqueeze(1).double()
    x[24] = 0
    for row, largest in enumerate((edge, edge * (1 + 2**-7), edge / 2, edge * 2.0**20, edge * 1.0625, 256.0), start=25):
        x[row] *= 1e-3
        x[row, 5] = -largest
    x[31] = torch.arange(32) * 2.0**-12  # ties, and numbers below the normal range of the format
    x[31, 0] = edge
    x[32:] = torch.randint(1, 1 << 16, (8, 32), generator=torch.Generator().manual_seed(2)) * 2.0**-149
    return x


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_bit_is_that_of_the_definition(dtype: torch.dtype):
    x = blocks(dtype)
    found = REFERENCE.cast_block_1x32(x, dtype, orientation="rows").rows
    assert found.scale.dtype == torch.float8_e8m0fnu and found.scale.shape == (40, 1)
    scales, values = found.scale.view(torch.uint8).flatten().tolist(), found.values.view(torch.uint8)
    for row, numbers in enumerate(x.tolist()):
        byte, elements = quantized_by_definition(numbers, dtype)
        assert scales[row] == byte, row
        assert (values[row] & 127).tolist() == [element for _, element in elements], row
        negative = [(bits >= 128) for bits in values[row].tolist()]
        assert all(sign == wanted or not element for sign, (wanted, element) in zip(negative, elements, strict=True))


def test_nothing_saturates_where_the_specifications_formula_would():
    """Its scale is 2^(floor(log2 amax) - 8), with which magnitudes above 448 / 256 of a power of two are cut."""
    x = torch.full((1, 32), 500.0)
    cast = REFERENCE.cast_block_1x32(x, E4M3, orientation="rows").rows
    assert cast.scale.view(torch.uint8).item() == 128
    assert mxfp8.dequantize(cast.values, cast.scale).unique().item() == 512.0
    assert torch.full((1,), 500.0).clamp(max=448).item() == 448.0


def test_not_finite_numbers_are_nan_and_leave_their_neighbors_alone():
    x = torch.ones(3, 32)
    x[0, 3], x[1, 4] = float("inf"), float("nan")
    cast = REFERENCE.cast_block_1x32(x, E4M3, orientation="rows").rows
    back = mxfp8.dequantize(cast.values, cast.scale)
    assert back.isnan().nonzero().tolist() == [[0, 3], [1, 4]] and back.nansum() == 94


def test_both_orientations_are_cast_from_the_tensor():
    x = draw(64, 96, seed=3) * torch.logspace(-12, 3, 96)
    cast = REFERENCE.cast_block_1x32(x, E4M3)
    assert cast.rows.scale.shape == (64, 3) and cast.columns.scale.shape == (96, 2)
    other = REFERENCE.cast_block_1x32(x.t().contiguous(), E4M3).rows
    for ours, theirs in ((cast.columns.values, other.values), (cast.columns.scale, other.scale)):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    rows, columns = (mxfp8.dequantize(each.values, each.scale) for each in (cast.rows, cast.columns))
    assert not torch.equal(rows, columns.t())
    assert distance(rows, x) < 0.04 and distance(columns.t(), x) < 0.04


def test_dequantized_numbers_are_bfloat16_numbers():
    """So that GPUs without such GEMMs multiply the same numbers."""
    for dtype in (E4M3, E5M2):
        every = torch.arange(256, dtype=torch.uint8).view(dtype).repeat(1, 1)
        for byte in (16, 127, 230):
            scale = torch.full((1, 8), byte, dtype=torch.uint8).view(torch.float8_e8m0fnu)
            exact = mxfp8.dequantize(every, scale)
            finite = exact.isfinite()
            assert torch.equal(mxfp8.dequantize(every, scale, torch.bfloat16).float()[finite], exact[finite])


@pytest.mark.parametrize("kernels", [REFERENCE, mxfp8.BFLOAT16])
def test_a_gemm_is_that_of_the_dequantized_operands(kernels: MxKernels):
    a, b = (kernels.cast_block_1x32(draw(64, 96, seed=seed), E4M3).rows for seed in (0, 1))
    exact = (mxfp8.dequantize(a.values, a.scale).double() @ mxfp8.dequantize(b.values, b.scale).double().t()).float()
    found = kernels.gemm(a, b, dtype=torch.bfloat16, fast=True)
    assert found.dtype == torch.bfloat16 and distance(found, exact) < 2**-8
    if kernels is REFERENCE:
        out = torch.empty(64, 64)
        assert kernels.gemm(a, b, dtype=torch.float32, fast=False, out=out) is out and distance(out, exact) < 1e-6


@pytest.mark.parametrize(("rows", "columns"), [(128, 4), (32, 1), (300, 9)])
def test_scales_are_where_tensor_cores_read_them(rows: int, columns: int):
    scale = torch.randint(0, 255, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    flat = mxfp8.swizzled(scale.view(torch.float8_e8m0fnu)).view(torch.uint8)
    tiles_wide, tiles_high = -(-columns // 4), -(-rows // 128)
    assert flat.numel() == tiles_wide * tiles_high * 512
    wanted = torch.zeros_like(flat)
    for row in range(rows):
        for column in range(columns):
            tile = (row // 128) * tiles_wide + column // 4
            inside = row % 128
            wanted[tile * 512 + inside % 32 * 16 + inside // 32 * 4 + column % 4] = scale[row, column]
    assert torch.equal(flat, wanted)


def test_the_hardware_gets_operands_and_scales_as_it_reads_them(monkeypatch: pytest.MonkeyPatch):
    """Instead of Blackwell a function that undoes the order of the scales."""
    seen: dict[str, Any] = {}

    def scaled_mm(a: Tensor, b: Tensor, left: Tensor, right: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        seen.update(left=left, right=right)
        operands = zip((a, b.t()), (x.scale for x in operands_given), strict=True)
        first, second = (mxfp8.dequantize(values, scale) for values, scale in operands)
        return (first @ second.t()).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    operands_given = [REFERENCE.cast_block_1x32(draw(64, 96, seed=seed), E4M3).rows for seed in (0, 1)]
    options: dict[str, Any] = {"dtype": torch.bfloat16, "fast": True}
    assert torch.equal(mxfp8.hardware_gemm(*operands_given, **options), REFERENCE.gemm(*operands_given, **options))
    for name, operand in zip(("left", "right"), operands_given, strict=True):
        assert torch.equal(seen[name].view(torch.uint8), mxfp8.swizzled(operand.scale).view(torch.uint8))


@pytest.mark.parametrize(("fp8_format", "rough"), [("e4m3", 0.045), ("hybrid", 0.08)])
def test_three_gemms_are_close(fp8_format: str, rough: float):
    gemm = fp8_gemm_factory(dataclasses.replace(MX, fp8_format=fp8_format), kernels=REFERENCE)()
    x, w, g = (draw(*shape, seed=seed) for seed, shape in enumerate([(64, 96), (160, 96), (64, 160)]))
    y, kept = gemm.forward(x, w)
    assert [tensor.nbytes for tensor in kept] == [64 * 96, 2 * 96], "a byte an element, and one for 32 of them"
    x_grad, job = gemm.backward(g, w, kept)
    w_grad = torch.empty(w.shape)
    job.write(None, w_grad, accumulate=False)
    assert 0.01 < distance(y, x.double() @ w.double().t()) < 0.045
    assert 0.01 < distance(x_grad, g.double() @ w.double()) < rough
    assert 0.01 < distance(w_grad, g.double().t() @ x.double()) < rough


@pytest.mark.parametrize(("fp8_format", "gradient"), [("e4m3", E4M3), ("hybrid", E5M2)])
def test_gradients_are_in_the_format_that_was_asked_for(fp8_format: str, gradient: torch.dtype):
    assert Fp8Recipe.from_config(dataclasses.replace(MX, fp8_format=fp8_format)).grad_dtype == gradient


def test_an_input_that_is_cast_again_gives_the_same_bits():
    x, w, g = (draw(*shape, seed=seed) for seed, shape in enumerate([(64, 96), (160, 96), (64, 160)]))
    found: list[tuple[Tensor, ...]] = []
    for again in (False, True):
        gemm = fp8_gemm_factory(MX, kernels=REFERENCE)()
        way = gemm.requantizing() if again else gemm
        y, kept = way.forward(x, w)
        assert (kept == ()) is again
        x_grad, job = way.backward(g, w, kept)
        w_grad = torch.empty(w.shape)
        job.write(x if again else None, w_grad, accumulate=False)
        found.append((y, x_grad, w_grad))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize(("rows", "shape"), [(48, (32, 64)), (64, (48, 64)), (64, (64, 80))])
def test_sizes_that_are_no_multiples_of_32_stay_as_they_are(rows: int, shape: tuple[int, int]):
    told: list[str] = []
    gemm = fp8_gemm_factory(MX, kernels=REFERENCE)()
    gemm._report = told.append
    x, w = draw(rows, shape[1], seed=0), draw(*shape, seed=1)
    assert torch.equal(gemm.forward(x, w)[0], x @ w.t())
    assert told == [
        f"a GEMM of {rows} rows times a weight of {shape[0]} x {shape[1]} does not run in FP8, which needs multiples of 32"
    ]


@pytest.mark.parametrize("counts", [torch.tensor([5, 0, 27]), torch.tensor([5, 0, 20]), 16])
@pytest.mark.parametrize("kernels", [REFERENCE, mxfp8.BFLOAT16])
def test_experts(counts: ExpertCounts, kernels: MxKernels):
    experts = 3 if isinstance(counts, Tensor) else 2
    x, w, g = draw(32, 64, seed=0), draw(experts, 96, 64, seed=1), draw(32, 96, seed=2)
    gemm = Fp8ExpertGemms(kernels)(counts)
    y, kept = gemm.forward(x, w)
    x_grad, job = gemm.backward(g, w, kept)
    assert 0.01 < distance(y, looped_linear(x, w, counts)) < 0.05
    assert 0.01 < distance(x_grad, looped_linear(g, w.transpose(1, 2), counts)) < 0.05
    exact = torch.autograd.functional.vjp(lambda weight: looped_linear(x, weight, counts), w, g)[1]
    w_grad = torch.zeros(w.shape)
    job.write(x, w_grad, accumulate=True)
    assert torch.allclose(w_grad, exact, atol=1e-4)
    narrow = draw(experts, 48, 64, seed=1)
    assert torch.equal(Fp8ExpertGemms(kernels)(counts).forward(x, narrow)[0], looped_linear(x, narrow, counts))


def test_experts_have_a_scale_for_32_elements_of_a_row():
    matrices = REFERENCE.cast_matrices(draw(3, 96, 64, seed=1), E4M3)
    assert matrices.rows.scale.shape == (3, 96, 2) and matrices.columns.scale.shape == (3, 64, 3)
    alone = REFERENCE.cast_block_1x32(draw(3, 96, 64, seed=1)[1], E4M3)
    for ours, theirs in ((matrices.rows, alone.rows), (matrices.columns, alone.columns)):
        assert torch.equal(ours.values[1].view(torch.uint8), theirs.values.view(torch.uint8))


def shard(operand: Fp8Operand, part: slice) -> Tensor:
    return mxfp8.dequantize(operand.values, operand.scale)[:, part]


def test_shards_of_whole_blocks_have_the_bits_of_the_whole():
    x = draw(64, 128, seed=0) * torch.logspace(-20, 20, 128)
    whole = REFERENCE.cast_block_1x32(x, E4M3).rows
    for rank in range(2):
        part = slice(64 * rank, 64 * (rank + 1))
        own = REFERENCE.cast_block_1x32(x[:, part].contiguous(), E4M3).rows
        assert torch.equal(mxfp8.dequantize(own.values, own.scale), shard(whole, part))


def test_a_small_network_learns_as_well_as_in_full_precision():
    """Two layers that imitate two others, 120 steps; within the bound of the other recipes."""

    def losses(make: Any) -> list[float]:
        torch.manual_seed(1)
        gemms = [make(), make()]
        weights = [(torch.randn(128, 128) / 128**0.5).requires_grad_() for _ in range(2)]
        goals = [torch.randn(128, 128) / 128**0.5 for _ in range(2)]
        optimizer, found = torch.optim.Adam(weights, lr=1e-3), []
        for _ in range(120):
            y = goal = torch.randn(128, 128)
            for gemm, weight, wanted in zip(gemms, weights, goals, strict=True):
                y = GemmOp(gemm)(RecomputableOutput(torch.tanh(y), None), weight)
                goal = torch.tanh(goal) @ wanted.t()
            loss = (y - goal).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for gemm in gemms:
                if gemm is not PLAIN_GEMM:
                    gemm.new_step(2)
            found.append(loss.item())
        return found

    plain, ours = losses(lambda: PLAIN_GEMM), losses(fp8_gemm_factory(MX, kernels=REFERENCE))
    assert plain[-1] < 0.5 * plain[0] and ours != plain
    assert sum(ours[-20:]) == pytest.approx(sum(plain[-20:]), rel=0.03)
