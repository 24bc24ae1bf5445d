"""The vocabulary's two ends on a CUDA device: error, memory, time over that of the three products, no wait for the device."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from petatron.kernels.embedding_grad import embedding_grad as plain_embedding_grad
from petatron.kernels.fused_linear_cross_entropy import (
    REFERENCE,
    CrossEntropyKernels,
    GradRequest,
    VocabColumns,
    linear_cross_entropy,
)
from tests.kernels.loss_cases import Case, MainGrad, distance

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VOCABULARY = 128256
BOUNDS = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 1e-2}


def triton_kernels() -> CrossEntropyKernels:
    pytest.importorskip("triton")
    from petatron.kernels.triton.fused_linear_cross_entropy import TRITON

    return TRITON


KERNELS = {"plain": lambda: REFERENCE, "triton": triton_kernels}


def on_device(tokens: int, size: int, *, hidden: int, dtype: torch.dtype) -> Case:
    """Logits with a standard deviation of 2, a mask in every fifth token, and a loss scale as fp16 needs it."""
    x, weight = torch.randn(tokens, hidden, device="cuda"), torch.randn(size, hidden, device="cuda")
    weights = torch.rand(tokens, device="cuda").mul_(torch.arange(tokens, device="cuda") % 5 != 0) * 256
    targets = torch.randint(size, (tokens,), device="cuda")
    return Case((x * 2 * hidden**-0.5).to(dtype), weight.to(dtype), targets, weights)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("size", [VOCABULARY, 50257])
def test_against_float64(size: int, dtype: torch.dtype, kernels: str):
    case = on_device(900, size, hidden=256, dtype=dtype)
    true_losses, true_grad_x, true_grad = case.expected()
    case.weight = torch.cat((case.weight, case.weight.new_ones(-size % 128, 256)))
    grad = MainGrad.poisoned(case.weight)
    losses, grad_x = linear_cross_entropy(
        case.x,
        case.weight,
        case.targets,
        VocabColumns(size),
        grad_request=GradRequest(case.token_weights, grad.deliver),
        kernels=KERNELS[kernels](),
        chunk_size=400,
    )
    assert distance(losses, true_losses) <= BOUNDS[dtype]
    assert distance(grad_x, true_grad_x) <= BOUNDS[dtype]
    assert distance(grad.out[:size], true_grad) <= BOUNDS[dtype]
    assert not grad.out[size:].any()


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("rows", "padded"), [(VOCABULARY, VOCABULARY), (50257, 50304), (16032, 16032), (1000, 1001)])
def test_softmax_alone(rows: int, padded: int, dtype: torch.dtype):
    """As one kernel, and as the two between which ranks exchange their statistics."""
    kernels = triton_kernels()
    logits = (torch.randn(300, padded, device="cuda") * 4).to(dtype)
    logits[:, rows:] = 100
    targets, weights = torch.randint(rows, (300,), device="cuda"), torch.rand(300, device="cuda")
    true, apart = logits.double(), logits.clone()
    true_losses = REFERENCE.losses_and_gradient_(true, targets, weights.double(), rows)
    losses = kernels.losses_and_gradient_(logits, targets, weights, rows)
    peak, total, picked = kernels.statistics(apart, targets, rows)
    kernels.gradient_(apart, targets, weights, peak + total.log(), rows)
    rounding = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}[dtype]
    for found, gradient in ((losses, logits), (total.log() - picked, apart)):
        assert distance(found, true_losses) <= 1e-6
        assert distance(gradient, true) <= rounding
        assert not gradient[:, rows:].any()


def median_ms(work: Callable[[], object], other: Callable[[], object], repeats: int = 7) -> tuple[float, float]:
    """Of two pieces of work, in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(2 * repeats + 4):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        (work, other)[index % 2]()
        events[1].record()
        torch.cuda.synchronize()
        if index >= 4:
            times[index % 2].append(events[0].elapsed_time(events[1]))
    return statistics.median(times[0]), statistics.median(times[1])


@pytest.mark.parametrize("hidden", [2048, 4096])
def test_time_and_memory_at_full_size(hidden: int):
    """At most 1.25 of the three products, and 2 GB."""
    kernels, tokens = triton_kernels(), 16384
    case = on_device(tokens, VOCABULARY, hidden=hidden, dtype=torch.bfloat16)
    grad = MainGrad.poisoned(case.weight)
    wanted = GradRequest(case.token_weights, grad.deliver)

    def ours() -> None:
        columns = VocabColumns(VOCABULARY)
        linear_cross_entropy(case.x, case.weight, case.targets, columns, grad_request=wanted, kernels=kernels)

    ours()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ours()
    extra = torch.cuda.max_memory_allocated() - before
    logits = torch.randn(tokens, VOCABULARY, device="cuda", dtype=torch.bfloat16)

    def products() -> None:
        torch.mm(case.x, case.weight.t(), out=logits)
        torch.mm(logits, case.weight)
        torch.mm(logits.t(), case.x)

    mine, floor = median_ms(ours, products)
    print(
        f"hidden {hidden}: {mine:.2f} ms, three products {floor:.2f} ms, {mine / floor:.3f}; {extra / 1e9:.2f} GB extra"
    )
    assert extra <= 2e9
    assert mine <= 1.25 * floor


def ids_as_in_text(tokens: int) -> Tensor:
    """Frequencies fall with the rank, a tenth is padding, and some ids are another rank's."""
    ids = (VOCABULARY ** torch.rand(tokens, device="cuda")).long() - 1
    ids[torch.rand(tokens, device="cuda") < 0.1] = 0
    ids[torch.rand(tokens, device="cuda") < 0.1] += VOCABULARY
    return ids


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("tokens", "hidden"), [(32768, 2048), (1001, 1500)])
def test_embedding_gradient(tokens: int, hidden: int, accumulate: bool, dtype: torch.dtype):
    pytest.importorskip("triton")
    from petatron.kernels.triton.embedding_grad import embedding_grad

    ids, grad = ids_as_in_text(tokens), torch.randn(tokens, hidden, device="cuda").to(dtype)
    start = torch.randn(VOCABULARY, hidden, device="cuda")
    true = start.double() if accumulate else torch.zeros_like(start, dtype=torch.float64)
    plain_embedding_grad(ids, grad, true, accumulate=True)
    results = []
    for _ in range(2):
        results.append(start.clone())
        torch.cuda.set_sync_debug_mode("error")
        try:
            embedding_grad(ids, grad, results[-1], accumulate=accumulate)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(*results), "the same bits every time"
    assert distance(results[0], true) < 1e-6
    assert torch.equal(results[0] == 0, true == 0) or accumulate


def test_embedding_time():
    pytest.importorskip("triton")
    from petatron.kernels.triton.embedding_grad import embedding_grad

    ids, out = ids_as_in_text(32768), torch.empty(VOCABULARY, 2048, device="cuda")
    grad = torch.randn(32768, 2048, device="cuda", dtype=torch.bfloat16)
    first, later = median_ms(
        lambda: embedding_grad(ids, grad, out, accumulate=False),
        lambda: embedding_grad(ids, grad, out, accumulate=True),
    )
    print(f"embedding gradient, 32,768 tokens: first {first:.3f} ms, later {later:.3f} ms")
    assert first < 1.0 and later < 0.6
