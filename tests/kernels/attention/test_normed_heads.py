"""Heads that are normalized, then turned: the reference against autograd in float64, and the Triton kernels against it."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from petatron.kernels import qk_norm_rope as plain
from petatron.kernels.qk_norm_rope import QKNormSpec
from tests.longform import diagonal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDE = torch.float64
BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 3e-3 if DEVICE == "cuda" else 6e-3}
"""Norm of the difference over the norm. The interpreter cuts bfloat16 off where a device rounds to the nearest."""
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@dataclass(frozen=True, slots=True)
class Heads:
    heads: int
    groups: int
    width: int
    turned: int
    batch: int = 2
    length: int = 3
    eps: float = 1e-6
    zero_centered_gamma: bool = False

    @property
    def norm(self) -> QKNormSpec:
        return QKNormSpec(self.heads, self.groups, self.eps, self.zero_centered_gamma)

    def __str__(self) -> str:
        return f"{self.heads}-{self.groups}-{self.width}-{self.turned}{'-from-one' if self.zero_centered_gamma else ''}"


@dataclass(frozen=True, slots=True)
class Drawn:
    """Fresh numbers of a case."""

    qkv: Tensor
    weights: tuple[Tensor, Tensor]
    rotation: tuple[Tensor, Tensor]
    grads: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def of(cls, case: Heads, dtype: torch.dtype, *, batch_first: bool, each: bool) -> Drawn:
        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, device=DEVICE, dtype=WIDE)

        qkv = ordered(draw(case.length, case.batch, (case.heads + 2 * case.groups) * case.width), batch_first)
        qkv = qkv * draw(case.length, case.batch, 1).exp()  # tokens of unlike size
        half = draw(case.batch if each else 1, case.length, 1, case.turned // 2).mul_(3)
        angles = torch.cat((half, half), dim=-1).transpose(0, 1)
        weights = tuple(draw(case.width).add_(0.0 if case.zero_centered_gamma else 1.0).to(dtype) for _ in range(2))
        grads = (draw(case.length, case.batch, heads, case.width) for heads in (case.heads, case.groups, case.groups))
        rotation = angles.cos().to(dtype), angles.sin().to(dtype)
        return cls(ordered(qkv, batch_first).to(dtype), weights, rotation, tuple(grad.to(dtype) for grad in grads))

    def wide(self) -> Drawn:
        parts = (self.weights, self.rotation, self.grads)
        return Drawn(self.qkv.to(WIDE), *(tuple(part.to(WIDE) for part in group) for group in parts))

    def forward(self, kernels: ModuleType, norm: QKNormSpec, *, batch_first: bool) -> tuple[Tensor, Tensor, Tensor]:
        return kernels.split_qkv_norm_rope(self.qkv, self.weights, self.rotation, norm, batch_first=batch_first)

    def backward(self, kernels: ModuleType, norm: QKNormSpec) -> tuple[Tensor, Tensor, Tensor]:
        out = torch.full_like(self.qkv, float("nan"))
        found = kernels.split_qkv_norm_rope_backward(self.grads, self.qkv, self.weights, self.rotation, norm, out=out)
        return out, *found


def ordered(x: Tensor, batch_first: bool) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1) if batch_first else x.contiguous()


def far(ours: Tensor, true: Tensor) -> float:
    assert ours.shape == true.shape
    return float((ours.to(WIDE) - true.to(WIDE)).norm() / true.to(WIDE).norm().clamp(min=1e-30))


def from_scratch(drawn: Drawn, case: Heads) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The heads, turned as numbers in the complex plane, and gradients of qkv and both weights by autograd."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (drawn.qkv, *drawn.weights)]
    half = case.turned // 2
    turns = torch.complex(*(part[..., :half] for part in drawn.rotation))

    def made(x: Tensor, weight: Tensor) -> Tensor:
        x = F.rms_norm(x, (case.width,), 1 + weight if case.zero_centered_gamma else weight, eps=case.eps)
        pairs = torch.complex(x[..., :half].contiguous(), x[..., half : case.turned].contiguous()) * turns
        return torch.cat((pairs.real, pairs.imag, x[..., case.turned :]), -1)

    q, k, v = leaves[0].unflatten(-1, (-1, case.width)).split((case.heads, case.groups, case.groups), dim=2)
    outputs = made(q, leaves[1]), made(k, leaves[2]), v
    gradients = torch.autograd.grad(outputs, leaves, drawn.grads)
    return tuple(output.detach() for output in outputs), gradients


@settings(max_examples=25, deadline=None)
@given(
    case=st.builds(
        lambda groups, each, half, rest, **others: Heads(groups * each, groups, 2 * half + rest, 2 * half, **others),
        groups=st.integers(1, 3),
        each=st.integers(1, 3),
        half=st.integers(1, 4),
        rest=st.integers(0, 3),
        batch=st.integers(1, 3),
        length=st.integers(1, 5),
        eps=st.sampled_from([1e-6, 1e-2]),
        zero_centered_gamma=st.booleans(),
    ),
    batch_first=st.booleans(),
    each=st.booleans(),
)
def test_reference(case: Heads, batch_first: bool, each: bool):
    drawn = Drawn.of(case, WIDE, batch_first=batch_first, each=each)
    outputs, gradients = from_scratch(drawn, case)
    found = drawn.forward(plain, case.norm, batch_first=batch_first)
    for ours, true in zip((*found, *drawn.backward(plain, case.norm)), (*outputs, *gradients), strict=True):
        assert far(ours, true) < 1e-12
    for part in found[:2]:
        assert (part.transpose(0, 1) if batch_first else part).is_contiguous()
    assert found[2].untyped_storage().data_ptr() == drawn.qkv.untyped_storage().data_ptr(), "values stay where they are"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reference_in_half_precision(dtype: torch.dtype):
    """Gradients are rounded once, and those of the weights not at all; heads after the norm, the weight and the turn."""
    case = Heads(6, 2, 32, 24, length=20)
    drawn = Drawn.of(case, dtype, batch_first=False, each=True)
    outputs, (row_grads, *weight_grads) = from_scratch(drawn.wide(), case)
    for ours, true in zip(drawn.forward(plain, case.norm, batch_first=False), outputs, strict=True):
        assert ours.dtype == dtype and far(ours, true) < 2 * torch.finfo(dtype).eps
    found, *weights_found = drawn.backward(plain, case.norm)
    assert found.dtype == dtype and far(found, row_grads) < torch.finfo(dtype).eps / 2
    for ours, true in zip(weights_found, weight_grads, strict=True):
        assert ours.dtype == torch.float32 and far(ours, true) < 1e-5


CASES = [
    Heads(1, 1, 2, 2),
    Heads(4, 2, 8, 8, zero_centered_gamma=True),
    Heads(6, 3, 10, 6),
    Heads(3, 1, 9, 6, zero_centered_gamma=True, batch=1),
    Heads(32, 8, 64, 64, eps=1e-2),
    Heads(12, 4, 80, 80, batch=1),
    Heads(5, 5, 96, 96),
    Heads(32, 8, 128, 128, length=2),
    Heads(10, 2, 128, 32, length=1),
    Heads(2, 1, 256, 128, zero_centered_gamma=True),
    Heads(4, 4, 8, 8, length=0),
]
EVERY_CASE = [(case, torch.bfloat16, False, True) for case in CASES]
EVERY_CASE += [(case, torch.float32, False, False) for case in CASES[1:5]]
EVERY_CASE += [(case, torch.float16, True, True) for case in (*CASES[:2], CASES[5])]


@diagonal(4)
@needs_triton
@pytest.mark.parametrize(("case", "dtype", "from_batch_major", "batch_first"), EVERY_CASE, ids=str)
def test_twin(case: Heads, dtype: torch.dtype, from_batch_major: bool, batch_first: bool):
    from petatron.kernels.triton import qk_norm_rope as twin

    drawn = Drawn.of(case, dtype, batch_first=from_batch_major, each=batch_first)
    true = drawn.wide()
    ours = drawn.forward(twin, case.norm, batch_first=batch_first)
    for part, true_part in zip(ours[:2], true.forward(plain, case.norm, batch_first=batch_first), strict=False):
        assert part.dtype == dtype and (part.transpose(0, 1) if batch_first else part).is_contiguous()
        assert far(part, true_part) <= BOUNDS[dtype]
    assert ours[2].untyped_storage().data_ptr() == drawn.qkv.untyped_storage().data_ptr()
    assert torch.equal(ours[2], case.norm.split(drawn.qkv)[2])
    found, *weights_found = drawn.backward(twin, case.norm)
    row_grads, *weight_grads = true.backward(plain, case.norm)
    assert found.stride() == drawn.qkv.stride() and far(found, row_grads) <= BOUNDS[dtype]
    for mine, wanted in zip(weights_found, weight_grads, strict=True):
        assert mine.dtype == torch.float32 and mine.isfinite().all() and far(mine, wanted) <= 2e-6


@diagonal(2)
@needs_triton
@pytest.mark.parametrize("programs", [1, 2, 5])
def test_programs_take_several_tiles_each(programs: int, monkeypatch: pytest.MonkeyPatch):
    """However the rows are shared out, every one is counted once; with eps 0 rows that are not there add nothing either."""
    from petatron.kernels.triton import qk_norm_rope as twin

    monkeypatch.setattr(twin, "_PROGRAMS", programs)
    case = Heads(6, 2, 128, 128, length=7, eps=0.0)
    drawn = Drawn.of(case, torch.float32, batch_first=True, each=True)
    ours, true = drawn.backward(twin, case.norm), drawn.wide().backward(plain, case.norm)
    assert all(far(mine, wanted) <= 2e-6 for mine, wanted in zip(ours, true, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(ours, drawn.backward(twin, case.norm), strict=True))


@needs_triton
def test_tensors_in_any_order():
    """Gradients [B, H, S, E], a slice of something wider or columns apart; sines that lie otherwise than the cosines."""
    from petatron.kernels.triton import qk_norm_rope as twin

    case = Heads(4, 2, 8, 8)
    drawn = Drawn.of(case, torch.float32, batch_first=False, each=True)
    dq, dk, dv = drawn.grads
    headed = dq.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
    sliced = torch.cat((dk, dk + 1), dim=-1)[..., : case.width]
    apart = dv.transpose(2, 3).contiguous().transpose(2, 3)
    cos, sin = drawn.rotation
    other = replace(drawn, grads=(headed, sliced, apart), rotation=(cos, sin.contiguous()))
    (one, *weights_found), (same, *weights_same) = (each.backward(twin, case.norm) for each in (drawn, other))
    assert torch.equal(one, same), "and the sums but for their order"
    assert all(far(*pair) <= 1e-6 for pair in zip(weights_found, weights_same, strict=True))
    wider = torch.cat((drawn.qkv, drawn.qkv + 1), dim=-1)[..., : drawn.qkv.shape[-1]]
    columns_apart = drawn.qkv.transpose(1, 2).contiguous().transpose(1, 2)
    want = drawn.forward(twin, case.norm, batch_first=True)
    for qkv in (wider, columns_apart):
        found = replace(other, qkv=qkv).forward(twin, case.norm, batch_first=True)
        assert all(torch.equal(one, same) for one, same in zip(found, want, strict=True))


@needs_triton
def test_refuses_a_gradient_that_lies_otherwise():
    from petatron.kernels.triton import qk_norm_rope as twin

    case = Heads(2, 1, 4, 4)
    drawn = Drawn.of(case, torch.float32, batch_first=False, each=False)
    out = ordered(torch.empty_like(drawn.qkv), True)
    with pytest.raises(AssertionError, match="must be adjacent"):
        twin.split_qkv_norm_rope_backward(drawn.grads, drawn.qkv, drawn.weights, drawn.rotation, case.norm, out=out)
