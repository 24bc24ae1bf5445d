"""The Triton split and rotation against its plain twin in float64: heads, widths, memory orders, and the way back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from petatron.kernels import rope as plain

pytest.importorskip("triton")
from petatron.kernels.triton import rope
from tests.longform import diagonal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 3e-3 if DEVICE == "cuda" else 6e-3}
"""Norm of the difference over the norm. The interpreter cuts bfloat16 off where a device rounds to the nearest."""


@dataclass(frozen=True, slots=True)
class Heads:
    heads: int
    groups: int
    width: int
    turned: int
    batch: int = 2
    length: int = 3


CASES = [
    Heads(1, 1, 2, 2),
    Heads(4, 2, 8, 8),
    Heads(6, 3, 10, 6),
    Heads(5, 1, 16, 4, batch=1),
    Heads(32, 8, 64, 64),
    Heads(12, 12, 80, 80, batch=1),
    Heads(40, 8, 128, 32, length=1),
    Heads(4, 4, 8, 8, length=0),
]


def far(ours: Tensor, true: Tensor) -> float:
    assert ours.shape == true.shape
    return float((ours.double() - true.double()).norm() / true.double().norm().clamp(min=1e-30))


def angles(case: Heads, dtype: torch.dtype, *, each: bool) -> tuple[Tensor, Tensor]:
    """cos and sin for all of the batch, or for each its own, in the memory order that the rotary layer makes."""
    half = torch.randn(case.batch if each else 1, case.length, 1, case.turned // 2, device=DEVICE).mul_(3)
    both = torch.cat((half, half), dim=-1).transpose(0, 1)
    return both.cos().to(dtype), both.sin().to(dtype)


def ordered(x: Tensor, *, batch_first: bool) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1) if batch_first else x.contiguous()


def product(case: Heads, dtype: torch.dtype, *, batch_first: bool) -> Tensor:
    columns = (case.heads + 2 * case.groups) * case.width
    return ordered(torch.randn(case.length, case.batch, columns, device=DEVICE).to(dtype), batch_first=batch_first)


@diagonal(4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.heads}-{case.groups}-{case.width}-{case.turned}")
@pytest.mark.parametrize(
    ("dtype", "from_batch_first", "batch_first"),
    [(torch.bfloat16, False, True), (torch.float32, False, False), (torch.float16, True, True)],
    ids=str,
)
def test_there_and_back(case: Heads, dtype: torch.dtype, from_batch_first: bool, batch_first: bool):
    qkv = product(case, dtype, batch_first=from_batch_first)
    cos, sin = angles(case, dtype, each=batch_first)
    options = {"num_heads": case.heads, "num_kv_heads": case.groups, "batch_first": batch_first}
    ours = rope.split_qkv_rope(qkv, cos, sin, **options)
    true = plain.split_qkv_rope(qkv.double(), cos.double(), sin.double(), **options)
    for part, true_part in zip(ours, true, strict=True):
        assert part.dtype == dtype and (part.transpose(0, 1) if batch_first else part).is_contiguous()
        assert far(part, true_part) <= BOUNDS[dtype]
    assert torch.equal(ours[2], true[2].to(dtype))

    grads = [torch.randn_like(part) for part in ours]
    out = torch.full_like(qkv, float("nan"))
    back = rope.split_qkv_rope_backward(*grads, cos, sin, out=out)
    assert back is out and back.stride() == qkv.stride()
    wide = [tensor.double() for tensor in (*grads, cos, sin)]
    assert (
        far(back, plain.split_qkv_rope_backward(*wide, out=torch.empty_like(qkv, dtype=torch.float64))) <= BOUNDS[dtype]
    )


@diagonal(2)
@pytest.mark.parametrize("kernels", [rope, plain], ids=["triton", "reference"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_rows_are_tokens_in_memory_order(kernels: Any, batch_first: bool):
    """Rows of a wider product, too; gradients need not be in the order of the rows."""
    case = Heads(4, 2, 8, 6)
    cos, sin = angles(case, torch.float32, each=True)
    qkv = product(case, torch.float32, batch_first=batch_first)
    flat = (qkv.transpose(0, 1) if batch_first else qkv).flatten(0, 1)
    options = {"num_heads": case.heads, "num_kv_heads": case.groups, "batch_first": batch_first}
    want = kernels.split_qkv_rope(qkv, cos, sin, **options)
    grads = [ordered(torch.randn_like(part), batch_first=not batch_first) for part in want]
    want += (kernels.split_qkv_rope_backward(*grads, cos, sin, out=torch.empty_like(qkv)),)
    for rows in (flat, torch.cat((flat, flat), dim=-1)[:, : flat.shape[1]]):
        found = kernels.split_qkv_rope(rows, cos, sin, **options, batch=case.batch)
        out = torch.full_like(rows, float("nan"))
        back = kernels.split_qkv_rope_backward(*grads, cos, sin, out=out, batch_first=batch_first)
        assert back is out
        back = back.unflatten(0, (case.batch, -1) if batch_first else (-1, case.batch))
        for ours, theirs in zip((*found, back.transpose(0, 1) if batch_first else back), want, strict=True):
            assert torch.equal(ours, theirs)


def test_gradient_is_that_of_the_forward():
    case = Heads(6, 2, 16, 12)
    cos, sin = angles(case, torch.float32, each=True)
    qkv = product(case, torch.float32, batch_first=False)
    wide = qkv.double().requires_grad_()
    out = plain.split_qkv_rope(wide, cos.double(), sin.double(), num_heads=6, num_kv_heads=2, batch_first=True)
    grads = [torch.randn_like(part, dtype=torch.float32) for part in out]
    (true,) = torch.autograd.grad(out, wide, [grad.double() for grad in grads])
    assert far(rope.split_qkv_rope_backward(*grads, cos, sin, out=torch.empty_like(qkv)), true) <= 1e-6


def test_gradients_in_any_order():
    """Attention kernels hand back [B, H, S, E], a slice of something wider, or columns apart."""
    case = Heads(4, 2, 8, 8)
    cos, sin = angles(case, torch.float32, each=False)
    shapes = [(case.length, case.batch, heads, case.width) for heads in (4, 2, 2)]
    dq, dk, dv = (torch.randn(shape, device=DEVICE) for shape in shapes)
    out = torch.empty(case.length, case.batch, 64, device=DEVICE)
    want = rope.split_qkv_rope_backward(dq, dk, dv, cos, sin, out=out)
    headed = dq.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
    sliced = torch.cat((dk, dk + 1), dim=-1)[..., : case.width]
    apart = dv.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(rope.split_qkv_rope_backward(headed, sliced, apart, cos, sin, out=torch.empty_like(out)), want)


def test_heads_far_apart():
    """Two billion elements from the first head to the last; memory that nobody touches costs nothing."""
    case, apart = Heads(3, 1, 8, 4), 1 << 30
    cos, sin = angles(case, torch.float16, each=True)
    dq, dk, dv = (torch.randn(case.length, case.batch, heads, case.width, device=DEVICE).half() for heads in (3, 1, 1))
    memory = torch.empty(2 * apart + case.length * case.batch * case.width, dtype=torch.float16, device=DEVICE)
    far_dq = memory.as_strided(dq.shape, (case.batch * case.width, case.width, apart, 1)).copy_(dq)
    out = torch.empty(case.length, case.batch, 5 * case.width, dtype=torch.float16, device=DEVICE)
    want = rope.split_qkv_rope_backward(dq, dk, dv, cos, sin, out=out)
    assert torch.equal(rope.split_qkv_rope_backward(far_dq, dk, dv, cos, sin, out=torch.empty_like(out)), want)


def test_slices_and_unlike_angles():
    """A product that is part of a wider tensor, and cosines that lie in memory otherwise than the sines."""
    case = Heads(4, 2, 8, 8)
    cos, sin = angles(case, torch.float32, each=True)
    qkv = product(case, torch.float32, batch_first=False)
    options = {"num_heads": 4, "num_kv_heads": 2, "batch_first": True}
    want = rope.split_qkv_rope(qkv, cos, sin, **options)
    wider = torch.cat((qkv, qkv + 1), dim=-1)[..., : qkv.shape[-1]]
    apart = qkv.transpose(1, 2).contiguous().transpose(1, 2)
    for same in (wider, apart):
        for one, other in zip(rope.split_qkv_rope(same, cos, sin.contiguous(), **options), want, strict=True):
            assert torch.equal(one, other)


def test_refuses_a_gradient_with_columns_apart():
    case = Heads(2, 1, 4, 4)
    cos, sin = angles(case, torch.float32, each=False)
    out = torch.empty(16, case.length, case.batch, device=DEVICE).permute(1, 2, 0)
    q, k, v = rope.split_qkv_rope(out, cos, sin, num_heads=2, num_kv_heads=1, batch_first=False)
    with pytest.raises(AssertionError, match="must be adjacent"):
        rope.split_qkv_rope_backward(q, k, v, cos, sin, out=out)


@diagonal(4)
@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 2, 8), (5, 1, 10), (0, 3, 16), (16, 16, 64)], ids=str)
@pytest.mark.parametrize("from_batch_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_gradients_without_rotation_are_joined(
    heads: int, groups: int, width: int, from_batch_first: bool, batch_first: bool
):
    """Also of keys and values alone, into rows, and from the memory order that attention kernels leave."""
    shapes = [(3, 2, count, width) for count in (heads, groups, groups)]
    grads = [ordered(torch.randn(shape, device=DEVICE), batch_first=from_batch_first) for shape in shapes]
    columns = (heads + 2 * groups) * width
    whole = ordered(torch.randn(3, 2, columns, device=DEVICE), batch_first=batch_first)
    wanted = torch.cat(grads, dim=2).flatten(2)
    assert torch.equal(rope.join_qkv_grads(*grads, out=whole), wanted)
    assert torch.equal(plain.join_qkv_grads(*grads, out=torch.empty_like(whole)), wanted)
    rows = torch.empty(6, columns, device=DEVICE)
    ours = rope.join_qkv_grads(*grads, out=rows, batch_first=batch_first)
    assert torch.equal(ours, (wanted.transpose(0, 1) if batch_first else wanted).flatten(0, 1))
