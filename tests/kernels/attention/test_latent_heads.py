"""The heads of latent attention: gradients of the reference by autograd, and the Triton kernels against the reference in float64."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from petatron.kernels.attention import latent_heads as reference
from petatron.layers.mla import interleaved_rope, join_rope_key
from tests.longform import diagonal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 3e-3 if DEVICE == "cuda" else 8e-3}
"""Norm of the difference over the norm. The interpreter cuts bfloat16 off where a device rounds to the nearest."""

SHAPES = [  # length, batch, heads, width without position, rotary width, of a value
    (3, 2, 4, 8, 4, 8),
    (5, 1, 3, 6, 2, 10),
    (2, 3, 33, 20, 6, 4),
    (2, 2, 16, 128, 64, 128),
    (4, 1, 1, 0, 8, 2),
    (0, 2, 4, 8, 4, 8),
]


def random(*shape: int, batch_first: bool = False) -> Tensor:
    if batch_first:
        return torch.randn(shape[1], shape[0], *shape[2:], dtype=torch.float64, device=DEVICE).transpose(0, 1)
    return torch.randn(*shape, dtype=torch.float64, device=DEVICE)


def angles(length: int, batch: int, rotary: int) -> tuple[Tensor, Tensor]:
    half = torch.randn(length, batch, 1, rotary // 2, dtype=torch.float64, device=DEVICE).mul_(3)
    both = torch.cat((half, half), dim=-1)
    return both.cos(), both.sin()


@pytest.mark.parametrize("scale", [1.0, 1.7])
def test_gradients_of_the_reference(scale: float):
    length, batch, heads, nope, rotary, value = 3, 2, 3, 4, 6, 5
    cos_sin = angles(length, 1, rotary)

    def both(q: Tensor, kv: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        keys_values = join_rope_key(kv, key, cos_sin, nope_dim=nope, kernels=reference)
        return interleaved_rope(q, cos_sin, scale=scale, kernels=reference), *keys_values

    inputs = (random(length, batch, heads, nope + rotary), random(length, batch, heads, nope + value))
    inputs = tuple(each.requires_grad_() for each in (*inputs, random(length, batch, rotary)))
    assert torch.autograd.gradcheck(both, inputs)


def test_scores_are_those_of_rotated_neighbors():
    """Query and key of two tokens: their product is that of complex numbers turned by the angle of the difference of positions."""
    q, k, turn = random(1, 1, 1, 4), random(1, 1, 4), torch.tensor([0.3, 1.1], dtype=torch.float64, device=DEVICE)
    cos_sin = [torch.cat((turn * at, turn * at)).view(1, 1, 1, 4) for at in (5, 2)]
    query = reference.interleaved_rope(q, cos_sin[0].cos(), cos_sin[0].sin())
    nothing = q.new_zeros(1, 1, 1, 1)
    key, _ = reference.join_rope_key(nothing, k, cos_sin[1].cos(), cos_sin[1].sin(), nope_dim=0)
    turned = torch.view_as_complex(q.view(2, 2)) * torch.polar(torch.ones_like(turn), turn * 3)
    wanted = (turned * torch.view_as_complex(k.view(2, 2)).conj()).real.sum()
    torch.testing.assert_close((query * key).sum(), wanted)


def assert_near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert found.shape == wanted.shape and found.dtype == dtype
    if wanted.numel():
        assert float((found.double() - wanted).norm() / wanted.norm()) < BOUNDS[dtype]


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    pytest.importorskip("triton")
    from petatron.kernels.triton.attention import latent_heads

    return latent_heads


@diagonal(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_equal_the_reference(
    kernels: ModuleType, shape: tuple[int, ...], batch_first: bool, dtype: torch.dtype
):
    length, batch, heads, nope, rotary, value = shape
    cos, sin = (each.to(dtype) for each in angles(length, batch if batch_first else 1, rotary))
    exact = cos.double(), sin.double()
    q = random(length, batch, heads, nope + rotary, batch_first=batch_first).to(dtype)
    kv = random(length, batch, heads, nope + value, batch_first=batch_first).to(dtype)
    wide = random(length, batch, rotary + 3, batch_first=batch_first).to(dtype)
    key = wide[..., 3:]
    for scale in (1.0, 1.3):
        for name in ("interleaved_rope", "interleaved_rope_backward"):
            found = getattr(kernels, name)(q, cos, sin, scale=scale)
            assert_near(found, getattr(reference, name)(q.double(), *exact, scale=scale), dtype)
    found = kernels.join_rope_key(kv, key, cos, sin, nope_dim=nope)
    for each, wanted in zip(found, reference.join_rope_key(kv.double(), key.double(), *exact, nope_dim=nope)):
        assert_near(each, wanted, dtype)
        assert batch == 1 or not each.numel() or each.transpose(0, 1).is_contiguous() is batch_first
    grad_v = random(length, batch, heads, value).to(dtype)
    found = kernels.join_rope_key_backward(q, grad_v, cos, sin)
    for each, wanted in zip(found, reference.join_rope_key_backward(q.double(), grad_v.double(), *exact)):
        assert_near(each, wanted, dtype)
