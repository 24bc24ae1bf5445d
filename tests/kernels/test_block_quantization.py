"""Weights in NF4 and FP8 by blocks: the published codes, the layout of bytes, and what is exact."""

from __future__ import annotations

import pytest
import torch

from petatron.kernels.block_quantization import BLOCK, nf4_codes, quantize

PUBLISHED = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The sixteen values of bitsandbytes."""


def test_codes_are_the_published_ones():
    assert nf4_codes() == pytest.approx(PUBLISHED, abs=1e-6)


def test_two_codes_are_in_a_byte_the_first_in_its_upper_half():
    block = torch.zeros(BLOCK)
    block[0], block[1], block[2] = -2.0, 2.0, 2.0 * PUBLISHED[9]
    quantized = quantize(block, "nf4")
    assert quantized.codes[:2].tolist() == [0x0F, 0x97] and quantized.codes.shape == (BLOCK // 2,)
    assert quantized.absmax.tolist() == [2.0]
    torch.testing.assert_close(quantized.dequantize(), block)


@pytest.mark.parametrize("form", ["nf4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(8, 96), (3, 5, 7)])
def test_a_dequantized_weight_is_quantized_to_itself(form, dtype: torch.dtype, shape: tuple[int, ...]):
    torch.manual_seed(1)
    weight = torch.randn(shape, dtype=dtype)
    quantized = quantize(weight, form)
    once = quantized.dequantize()
    assert once.dtype == dtype and torch.equal(quantize(once, form).dequantize(), once)
    bound = {"nf4": 0.152, "fp8": 0.07}[form]  # half of the widest gap between codes, of a block's largest element
    assert (once - weight).abs().max() <= bound * weight.abs().max()
    blocks = -(-weight.numel() // BLOCK)
    assert quantized.num_bytes == blocks * (BLOCK // (2 if form == "nf4" else 1) + dtype.itemsize)


def test_zeros_stay_zeros():
    assert torch.equal(quantize(torch.zeros(130), "nf4").dequantize(), torch.zeros(130))
