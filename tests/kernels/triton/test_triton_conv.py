"""The Triton causal convolution against the plain one in float64: widths, documents, a window, strided inputs."""

from __future__ import annotations

import pytest
import torch

from petatron.kernels.ssm import causal_conv as plain
from tests.kernels.triton.test_triton_scan import far
from tests.longform import later

pytest.importorskip("triton")
from petatron.kernels.triton.ssm import causal_conv as ours

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 5e-3 if DEVICE == "cuda" else 1e-2}
"""Norm of the difference over the norm. The interpreter cuts bfloat16 off where a device rounds to the nearest."""
CASES = [((13, 2, 20, 4), torch.float32), later(((9, 1, 130, 2), torch.bfloat16)), later(((3, 1, 4, 4), torch.float32))]
CASES += [
    later(((9, 1, 20, 1), torch.float32)),
    later(((9, 1, 20, 6), torch.float32)),
    later(((2, 1, 4, 4), torch.float32)),
    later(((300, 2, 130, 3), torch.bfloat16)),
]


@pytest.mark.parametrize(
    ("packed", "with_window", "with_bias"), [(False, False, True), (True, True, True), (True, False, False)]
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_convolution_and_gradients(case: tuple, packed: bool, with_window: bool, with_bias: bool):
    (length, batch, channels, taps), dtype = case
    torch.manual_seed(length)
    kind = {"device": DEVICE, "dtype": dtype}
    x = torch.randn(length, batch, channels + 5, **kind)[..., 3 : channels + 3]
    weight, bias = (
        torch.randn(channels, taps, device=DEVICE),
        torch.randn(channels, device=DEVICE) if with_bias else None,
    )
    starts = torch.rand(length, batch, device=DEVICE) < 0.2 if packed else None
    window = torch.randn(taps - 1, batch, channels, **kind) if with_window else None
    wide = [None if tensor is None else tensor.double() for tensor in (x, weight, bias)]
    wide_window = None if window is None else window.double()
    y = ours.causal_conv(x, weight, bias, starts_SB=starts, window=window)
    assert y.dtype == dtype and far(y, plain.causal_conv(*wide, starts_SB=starts, window=wide_window)) <= BOUNDS[dtype]

    grad = torch.randn(y.shape, **kind)
    grads = ours.causal_conv_backward(grad, x, weight, bias, starts_SB=starts, window=window)
    true = plain.causal_conv_backward(grad.double(), *wide, starts_SB=starts, window=wide_window)
    assert [one is None for one in grads] == [other is None for other in true]
    assert grads[0].dtype == dtype and grads[1].dtype == torch.float32
    for one, other in zip(grads, true):
        assert one is None or other is None or far(one, other) <= BOUNDS[dtype]
