"""One step of recurrent layers in Triton against the plain one in float64: widths, groups, taps, slots, strided inputs, many steps."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from petatron.kernels.ssm.decode import conv_step as plain_conv
from petatron.kernels.ssm.decode import delta_step as plain_delta
from petatron.kernels.ssm.decode import scan_step as plain_scan
from petatron.kernels.ssm.decode.delta_step import DeltaGateInputs
from petatron.kernels.ssm.decode.scan_step import ScanParams
from tests.longform import diagonal, later

pytest.importorskip("triton")
import triton
import triton.language as tl

from petatron.kernels.triton.ssm.decode import conv_step, delta_step, scan_step
from petatron.kernels.triton.ssm.decode.step_tiles import softplus

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 5e-3 if DEVICE == "cuda" else 1e-2}
"""Norm of the difference over the norm. The interpreter cuts bfloat16 off where a device rounds to the nearest."""
STATE_BOUND = 2e-6
NUM_SLOTS = 7


class Sizes(NamedTuple):
    """Sequences, heads, groups or key heads, channels of a head, the other side of a state."""

    sequences: int
    heads: int
    groups: int
    width: int
    depth: int


SIZES = [Sizes(3, 4, 2, 8, 16), Sizes(1, 3, 3, 5, 6), Sizes(1, 2, 1, 64, 128)]
CASES = [
    (SIZES[0], torch.float32),
    (SIZES[1], torch.bfloat16),
    (SIZES[2], torch.float32),
    later(SIZES[0], torch.bfloat16),
    later(SIZES[1], torch.float32),
    later(SIZES[2], torch.bfloat16),
]
INDEX_DTYPES = (torch.int32, torch.int64)
"""Of slots, those of one step and those of the next."""


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def columns_of(rows: Tensor, *widths: int) -> list[Tensor]:
    """Columns of one GEMM's output, which do not begin at its first."""
    return list(rows[:, 3:].split(widths, dim=1))


def slots_of(count: int) -> Tensor:
    return torch.randperm(NUM_SLOTS)[:count].to(DEVICE)


def far(found: Tensor, true: Tensor) -> float:
    assert found.shape == true.shape and bool(found.isfinite().all())
    return float((found.double() - true.double()).norm() / true.double().norm())


def check_states(found: Tensor, true: Tensor, before: Tensor, slots: Tensor, bound: float = STATE_BOUND) -> None:
    """Those of the step's sequences are new, others as they were."""
    others = sorted(set(range(NUM_SLOTS)) - set(slots.tolist()))
    assert torch.equal(found[others], before[others])
    assert far(found[slots], true[slots]) <= bound and not torch.equal(found[slots], before[slots])


@triton.jit
def _softplus_kernel(x, y, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y + at, softplus(tl.load(x + at)))


def test_softplus_is_exact_where_step_sizes_are_small():
    x = torch.linspace(-30.0, 30.0, 512, device=DEVICE)
    found = torch.empty_like(x)
    _softplus_kernel[(1,)](x, found, SIZE=512)  # pyright: ignore[reportIndexIssue]
    torch.testing.assert_close(
        found.double(), torch.nn.functional.softplus(x.double(), threshold=60), rtol=3e-6, atol=0
    )


@pytest.mark.parametrize(("sizes", "dtype"), CASES, ids=str)
def test_steps_of_the_scan(sizes: Sizes, dtype: torch.dtype):
    count, heads, groups, width, depth = sizes
    widths = (heads * width, groups * depth, groups * depth, heads)
    states, slots = draw(NUM_SLOTS, heads, width, depth, dtype=torch.float32), slots_of(count)
    exact, before = states.double(), states.clone()
    params = ScanParams(
        *(draw(heads, dtype=dtype).mul_(scale).add_(shift) for scale, shift in ((1, 1), (1, -4), (1, 0)))
    )
    for index in INDEX_DTYPES:
        parts = columns_of(draw(count, 3 + sum(widths), dtype=dtype), *widths)
        x, B, C = (part.unflatten(1, (number, -1)) for part, number in zip(parts, (heads, groups, groups)))
        found = scan_step.scan_step(x, parts[3], B, C, params, states=states, slots_B=slots.to(index))
        exact_params = ScanParams(*(each.double() for each in params))
        true = plain_scan.scan_step(
            x.double(), parts[3].double(), B.double(), C.double(), exact_params, states=exact, slots_B=slots
        )
        assert found.dtype == dtype and far(found, true) <= BOUNDS[dtype]
    check_states(states, exact, before, slots)


@diagonal(3)
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize(("sizes", "dtype"), CASES, ids=str)
def test_steps_of_the_delta_rule(sizes: Sizes, dtype: torch.dtype, by_channel: bool):
    count, heads, key_heads, width, depth = sizes
    decays = (heads, depth) if by_channel else (heads,)
    widths = (key_heads * depth, key_heads * depth, heads * width, heads, math.prod(decays))
    states, slots = draw(NUM_SLOTS, heads, depth, width, dtype=torch.float32), slots_of(count)
    exact, before = states.double(), states.clone()
    A_log, dt_bias = draw(heads, dtype=dtype), draw(*decays, dtype=dtype)
    for index in INDEX_DTYPES:
        parts = columns_of(draw(count, 3 + sum(widths), dtype=dtype), *widths)
        q, k, v = (part.unflatten(1, (number, -1)) for part, number in zip(parts, (key_heads, key_heads, heads)))
        gates = DeltaGateInputs(parts[3], parts[4].unflatten(1, decays), A_log, dt_bias)
        found = delta_step.delta_step(q, k, v, gates, states=states, slots_B=slots.to(index))
        exact_gates = DeltaGateInputs(*(each.double() for each in gates))
        true = plain_delta.delta_step(q.double(), k.double(), v.double(), exact_gates, states=exact, slots_B=slots)
        assert found.dtype == dtype and far(found, true) <= BOUNDS[dtype]
    check_states(states, exact, before, slots)


@diagonal(3)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("count", "channels", "taps"), [(3, 20, 4), (1, 300, 2), (2, 5, 1)])
def test_steps_of_the_convolution(count: int, channels: int, taps: int, dtype: torch.dtype, with_bias: bool):
    windows, slots = draw(NUM_SLOTS, taps - 1, channels, dtype=dtype), slots_of(count)
    exact = windows.double()
    weight, bias = draw(channels, taps, dtype=dtype), draw(channels, dtype=dtype) if with_bias else None
    wide = weight.double(), None if bias is None else bias.double()
    for index in INDEX_DTYPES:
        [x] = columns_of(draw(count, 3 + channels, dtype=dtype), channels)
        found = conv_step.conv_step(x, weight, bias, windows=windows, slots_B=slots.to(index))
        true = plain_conv.conv_step(x.double(), *wide, windows=exact, slots_B=slots)
        assert found.dtype == dtype and far(found, true) <= BOUNDS[dtype]
    assert torch.equal(windows.double(), exact), "inputs are kept as they are"


def test_sequences_that_pad_the_step_may_share_a_slot():
    """All have slot 0; what they leave there is of no concern, and no other slot changes."""
    slots = torch.tensor([0, 4, 0], device=DEVICE)
    windows, x, weight = (draw(*shape, dtype=torch.float32) for shape in ((NUM_SLOTS, 3, 8), (3, 8), (8, 4)))
    expected, before = windows.clone(), windows.clone()
    alone = plain_conv.conv_step(x[1:2], weight, None, windows=expected, slots_B=slots[1:2])
    found = conv_step.conv_step(x, weight, None, windows=windows, slots_B=slots)
    assert far(found[1:2], alone) <= BOUNDS[torch.float32]
    assert torch.equal(windows[1:], expected[1:]) and not torch.equal(windows[4], before[4])
