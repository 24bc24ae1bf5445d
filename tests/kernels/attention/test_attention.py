"""The fast attention against its specification: outputs and gradients, every ratio of heads, window and precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from petatron.kernels.attention import attention
from petatron.kernels.attention.visibility import Visibility
from tests import reference_attention as reference
from tests.longform import diagonal

BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6}


def inputs(length: int, heads: int, groups: int, width: int, dtype: torch.dtype, *, batch: int = 2) -> list[Tensor]:
    torch.manual_seed(length * 100 + heads * 10 + groups)
    shapes = [(length, batch, heads, width), (length, batch, groups, width), (length, batch, groups, width)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def both(tensors: list[Tensor], window: int | None) -> tuple[list[Tensor], list[Tensor]]:
    """Output and the three input gradients of the fast and of the plain version."""
    results = []
    for out in (attention(*tensors, Visibility(window=window)), reference.attention(*tensors, window=window)):
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        results.append([out, *torch.autograd.grad((out * weights).sum(), tensors)])
    return results[0], results[1]


@diagonal(3)
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize("window", [None, 1, 3, 12, 13, 100])
def test_equals_reference(dtype: torch.dtype, heads: int, groups: int, window: int | None):
    ours, wanted = both(inputs(12, heads, groups, 8, dtype), window)
    for mine, true in zip(ours, wanted):
        assert mine.shape == true.shape and mine.dtype == dtype
        torch.testing.assert_close(mine, true, rtol=0, atol=BOUNDS[dtype] * max(1.0, true.abs().max().item()))


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("value_width", [1, 5, 8, 11])
@pytest.mark.parametrize("window", [None, 3])
def test_values_may_have_another_width_than_keys(dtype: torch.dtype, value_width: int, window: int | None):
    """As those of latent attention do: narrower ones are padded for the fused kernels."""
    q, k, _ = inputs(12, 4, 2, 8, dtype)
    v = torch.randn(12, 2, 2, value_width, dtype=dtype, requires_grad=True)
    ours, wanted = both([q, k, v], window)
    for mine, true in zip(ours, wanted):
        assert mine.shape == true.shape and mine.dtype == dtype
        torch.testing.assert_close(mine, true, rtol=0, atol=BOUNDS[dtype] * max(1.0, true.abs().max().item()))


def test_padding_of_values_is_not_saved():
    q, k, _ = inputs(12, 2, 2, 8, torch.float64)
    v = torch.randn(12, 2, 2, 5, dtype=torch.float64, requires_grad=True)
    widths: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: widths.append(x.shape[-1]) or x, lambda x: x):
        attention(q, k, v)
    assert sorted(widths) == [5, 5, 8, 8, 12], "values, output, queries, keys and log-sum-exp"


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(1, 20),
    groups=st.integers(1, 3),
    ratio=st.integers(1, 3),
    window=st.none() | st.integers(1, 24),
    batch=st.integers(1, 2),
)
def test_any_shape(length: int, groups: int, ratio: int, window: int | None, batch: int):
    ours, wanted = both(inputs(length, groups * ratio, groups, 4, torch.float64, batch=batch), window)
    for mine, true in zip(ours, wanted):
        torch.testing.assert_close(mine, true, rtol=0, atol=1e-11)


@pytest.mark.parametrize("window", [None, 3])
def test_a_token_sees_only_what_it_may(window: int | None):
    """Changing one token's key and value changes the outputs of exactly the tokens that may see it."""
    q, k, v = (x.detach() for x in inputs(10, 2, 2, 4, torch.float64))
    before = attention(q, k, v, Visibility(window=window))
    k, v = k.clone(), v.clone()
    k[4] += 1.0
    v[4] += 1.0
    moved = (attention(q, k, v, Visibility(window=window)) - before).abs().amax(dim=(1, 2, 3)) > 1e-9
    last = 10 if window is None else 4 + window
    assert moved.tolist() == [4 <= position < last for position in range(10)]


def test_dropout_drops_weights_and_keeps_the_mean():
    q, k, v = (x.detach() for x in inputs(6, 2, 2, 4, torch.float64, batch=2000))
    ones = torch.ones_like(v)
    torch.manual_seed(0)
    sums = attention(q, k, ones, dropout=0.3)
    assert not torch.allclose(sums, ones)
    torch.testing.assert_close(sums.mean(), torch.tensor(1.0, dtype=torch.float64), rtol=0, atol=0.02)
