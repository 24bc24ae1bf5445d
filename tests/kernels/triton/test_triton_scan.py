"""The Triton selective scan and its gradients against the plain one in float64: every shape, documents, states, strided inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.ssm import chunk_scan as plain
from tests.longform import diagonal, later

pytest.importorskip("triton")
from petatron.kernels.triton.ssm import chunk_scan as ours
from petatron.kernels.triton.ssm.scan_tiles import num_head_parts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
"""The interpreter multiplies the bits of half-precision numbers, not the numbers."""
BOUNDS = {torch.float32: 3e-5, torch.bfloat16: 2e-2}
"""Norm of the difference over the norm."""
CASES = [
    # length, batch, heads, head dim, groups, state dim, chunk size
    (18, 2, 2, 16, 2, 16, 16),
    (33, 1, 3, 12, 1, 20, 32),
    later((50, 2, 4, 16, 2, 16, 16)),
    later((16, 3, 2, 16, 2, 32, 256)),
    later((7, 1, 2, 64, 1, 128, 64)),
    later((200, 2, 6, 64, 3, 128, 256)),
    later((130, 1, 4, 32, 1, 256, 64)),
]


def far(ours: Tensor, true: Tensor) -> float:
    assert ours.shape == true.shape
    return float((ours.double() - true.double()).norm() / true.double().norm().clamp(min=1e-30))


def scan_inputs(case: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x, B and C are parts of wider rows, as the convolution leaves them."""
    length, batch, heads, head_dim, groups, state_dim, _ = case
    torch.manual_seed(length)
    inner, states = heads * head_dim, groups * state_dim
    channels = torch.randn(length, batch, inner + 2 * states, device=DEVICE).to(dtype)
    x, B, C = channels.split((inner, states, states), dim=-1)
    return (
        x.unflatten(-1, (heads, head_dim)),
        F.softplus(torch.randn(length, batch, heads, device=DEVICE) - 2.0),
        -torch.rand(heads, device=DEVICE) - 0.1,
        B.unflatten(-1, (groups, state_dim)) / state_dim**0.5,
        C.unflatten(-1, (groups, state_dim)),
        torch.randn(heads, device=DEVICE),
    )


def wide(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return [tensor.double() for tensor in tensors]


@diagonal(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("packed", "with_state"), [(False, False), (True, True), later(False, True), later(True, False)]
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_scan_and_gradients(case: tuple[int, ...], packed: bool, with_state: bool, dtype: torch.dtype):
    assert_equals_the_plain_one(scan_inputs(case, dtype), case, packed=packed, with_state=with_state)


def assert_equals_the_plain_one(
    inputs: tuple[Tensor, ...], case: tuple[int, ...], *, packed: bool, with_state: bool
) -> None:
    dtype = inputs[0].dtype
    length, batch, heads, head_dim, _, state_dim, chunk_size = case
    starts = torch.rand(length, batch, device=DEVICE) < 0.1 if packed else None
    state, grad_state = torch.randn(2, batch, heads, head_dim, state_dim, device=DEVICE) if with_state else (None, None)
    options = {"chunk_size": chunk_size, "starts_SB": starts}
    y, final = ours.chunk_scan(*inputs, **options, initial_state=state)
    wide_state = None if state is None else state.double()
    true_y, true_final = plain.chunk_scan(*wide(inputs), **options, initial_state=wide_state)
    assert y.dtype == dtype and final.dtype == torch.float32
    assert far(y, true_y) <= BOUNDS[dtype] and far(final, true_final) <= BOUNDS[dtype]

    grad_y = torch.randn(y.shape, device=DEVICE).to(dtype)
    grads = ours.chunk_scan_backward(grad_y, grad_state, *inputs, **options, initial_state=state)
    true_grads = plain.chunk_scan_backward(
        grad_y.double(),
        None if grad_state is None else grad_state.double(),
        *wide(inputs),
        **options,
        initial_state=wide_state,
    )
    for name, grad, true, tensor in zip(("x", "dt", "A", "B", "C", "D"), grads, true_grads, inputs, strict=False):
        assert grad is not None and true is not None and grad.dtype == tensor.dtype
        assert far(grad, true) <= BOUNDS[dtype], name
    if state is None:
        assert grads[-1] is None
    else:
        assert grads[-1] is not None and true_grads[-1] is not None
        assert far(grads[-1], true_grads[-1]) <= BOUNDS[dtype]


@pytest.mark.parametrize("sequential", [False, later(True)])
def test_lightning_attention_is_a_scan_with_one_step_size(sequential: bool, monkeypatch: pytest.MonkeyPatch):
    """The step size is one number of memory for all tokens, and nothing is skipped; two heads share a group."""
    monkeypatch.setattr(ours, "_is_sequential", lambda *tensors: sequential)
    case = (37, 2, 4, 16, 2, 32, 16)
    x, _, _, B, C, _ = scan_inputs(case, DTYPES[-1])
    step, slopes = torch.ones(1, device=DEVICE), torch.tensor([0.9, 0.9, 1e-6, 1e-6], device=DEVICE)
    inputs = (x, step.expand(x.shape[:-1]), -slopes, B, C, torch.zeros(4, device=DEVICE))
    assert_equals_the_plain_one(inputs, case, packed=True, with_state=True)


@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize(
    ("case", "packed", "with_state"),
    [
        ((18, 2, 2, 16, 2, 16, 16), True, True),
        later((50, 2, 4, 16, 2, 16, 16), False, False),
        later((200, 2, 6, 64, 3, 128, 256), True, True),
        later((70, 1, 1, 32, 1, 64, 64), False, True),
    ],
    ids=str,
)
def test_sequential_scan_for_many_heads(
    case: tuple[int, ...], packed: bool, with_state: bool, strong: bool, monkeypatch: pytest.MonkeyPatch
):
    """strong: decays of all heads but the first are such that a float32 does not hold them, nor their inverses."""
    monkeypatch.setattr(ours, "_is_sequential", lambda *tensors: True)
    x, dt, A, B, C, D = scan_inputs(case, DTYPES[-1])
    if strong:
        A[1:] -= 300.0
    assert_equals_the_plain_one((x, dt, A, B, C, D), case, packed=packed, with_state=with_state)


def test_what_fits_a_sequential_scan():
    def fits(batch: int = 8, heads: int = 80, head_dim: int = 64, state_dim: int = 128, **changed: Any) -> bool:
        channels = torch.empty(
            (4096, batch, heads * head_dim + 2 * state_dim), device="meta", dtype=changed.get("dtype", torch.bfloat16)
        )
        x, B, C = channels.split((heads * head_dim, state_dim, state_dim), dim=-1)
        return ours._fits_sequential_scan(x.unflatten(-1, (heads, head_dim)), B.unsqueeze(2), C.unsqueeze(2))  # pyright: ignore[reportPrivateUsage]

    assert fits() and fits(batch=2, heads=128) and fits(head_dim=32, state_dim=64)
    assert not fits(batch=2), "too few programs: the other form has more programs"
    assert not fits(dtype=torch.float32) and not fits(state_dim=256) and not fits(head_dim=128)
    assert not fits(head_dim=48), "a tile would reach into the next head"
    x = torch.empty((4096, 8, 80, 68), device="meta", dtype=torch.bfloat16)[..., :64]
    B = torch.empty((4096, 8, 1, 128), device="meta", dtype=torch.bfloat16)
    assert not ours._fits_sequential_scan(x, B), "rows 136 bytes apart"  # pyright: ignore[reportPrivateUsage]
    assert not ours._is_sequential(torch.empty((1, 8, 80, 64), dtype=torch.bfloat16), B), "no GPU"  # pyright: ignore[reportPrivateUsage]


def test_the_same_result_every_time():
    inputs = scan_inputs((18, 1, 2, 16, 1, 16, 16), torch.float32)
    grad_y = torch.randn(inputs[0].shape, device=DEVICE)
    once, again = (ours.chunk_scan_backward(grad_y, None, *inputs, chunk_size=16) for _ in range(2))
    for one, other in zip(once, again):
        assert one is other is None or (one is not None and other is not None and torch.equal(one, other))


def test_heads_are_cut_into_parts_until_there_are_programs_enough():
    assert [num_head_parts(80, programs=count, wanted=1024) for count in (1, 100, 256, 2000)] == [80, 16, 4, 1]
    assert num_head_parts(5, programs=1, wanted=4) == 5, "of equal size"
