"""Experts on a CUDA device: one kernel for all products, Triton for the rows, and no waiting for the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from petatron.bench.ops.moe import ROUTINGS, MoEShape, build_layer, ours
from petatron.kernels.activation import GATE_ACTIVATIONS
from petatron.kernels.moe import permute
from petatron.kernels.moe.grouped_gemm import GroupedGemm, looped_linear
from petatron.kernels.moe.permute import MoEKernels, Permutation, build_permutation
from petatron.kernels.registry import KernelContext, choose_kernel
from tests.kernels.gemm.experts_by_loop import experts_by_loop

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda")


def fastest(dtype: torch.dtype = torch.bfloat16) -> MoEKernels:
    return choose_kernel("expert permutation", KernelContext.of(CUDA, dtype, allow_compile=False)).functions


def apart(mine: Tensor, true: Tensor) -> float:
    assert mine.isfinite().all()
    return float((mine.double() - true.double()).norm() / true.double().norm())


@pytest.mark.parametrize("rest", [0, 100])
@pytest.mark.parametrize("counts", [[300, 0, 4, 208], [0, 0, 0, 512], [1, 2, 3, 506], [512, 0, 0, 0], [128] * 4])
def test_grouped_products(counts: list[int], rest: int):
    """All three products against the loop in float64; experts without rows get zeros, rows of no expert reach nothing."""
    x, grad = (torch.randn(512 + rest, width, device=CUDA).bfloat16() for width in (64, 96))
    x[512:], grad[512:] = torch.nan, torch.nan
    weight, sizes = torch.randn(4, 96, 64, device=CUDA).bfloat16(), torch.tensor(counts, device=CUDA)
    multiply = GroupedGemm(sizes)
    assert apart(multiply.forward(x, weight)[0][:512], looped_linear(x[:512].double(), weight.double(), sizes)) < 4e-3
    x_grad, job = multiply.backward(grad, weight, ())
    transposed = weight.double().transpose(1, 2)
    assert apart(x_grad[:512], looped_linear(grad[:512].double(), transposed, sizes)) < 4e-3
    true = torch.stack([g.t() @ h for g, h in zip(*(t[:512].double().split(counts) for t in (grad, x)), strict=True)])
    out = torch.full((4, 96, 64), torch.nan, device=CUDA)
    job.write(x, out, accumulate=False)
    assert apart(out, true) < 4e-3
    assert not out[[expert for expert, count in enumerate(counts) if count == 0]].any()
    job.write(x, out, accumulate=True)
    assert apart(out, 2 * true) < 4e-3


def test_a_weight_that_begins_anywhere():
    """A weight in the middle of a larger buffer need not begin where the kernel wants it to."""
    buffer, sizes = torch.randn(1 + 2 * 64 * 64, device=CUDA).bfloat16(), torch.tensor([40, 24], device=CUDA)
    weight, x = buffer[1:].view(2, 64, 64), torch.randn(64, 64, device=CUDA).bfloat16()
    made = GroupedGemm(sizes).forward(x, weight)[0]
    assert apart(made, looped_linear(x.double(), weight.double(), sizes)) < 4e-3


def arrangements(tokens: int, k: int, experts: int) -> dict[str, Permutation]:
    chosen = torch.rand(tokens, experts, device=CUDA).topk(k, dim=1).indices
    some = chosen.masked_fill(torch.rand(tokens, k, device=CUDA) < 0.3, experts)
    return {
        "all": build_permutation(chosen, experts),
        "padded": build_permutation(chosen, experts, capacity=tokens),
        "dropped": build_permutation(some, experts, may_drop=True),
        "dropped, padded": build_permutation(some, experts, may_drop=True, capacity=tokens),
        "room for all": build_permutation(some, experts, may_drop=True, max_rows=tokens * k),
        "room to spare": build_permutation(some, experts, may_drop=True, max_rows=int((some < experts).sum()) + 1),
    }


@pytest.mark.parametrize("kind", ["all", "padded", "dropped", "dropped, padded", "room for all", "room to spare"])
@pytest.mark.parametrize(("width", "k", "experts"), [(2048, 8, 128), (4096, 2, 8), (2880, 4, 32), (20, 3, 300)])
def test_rows(kind: str, width: int, k: int, experts: int):
    found = arrangements(200, k, experts)[kind]
    x, weights = torch.randn(200, width, device=CUDA).bfloat16(), torch.rand(200, k, device=CUDA)
    rows = torch.randn(found.choice_R.shape[0], width, device=CUDA).bfloat16()
    if isinstance(found.counts, Tensor):
        rows[int(found.counts.sum()) :] = torch.nan
    kernels = fastest()
    assert kernels is not permute.REFERENCE and fastest(torch.float64) is permute.REFERENCE
    assert torch.equal(kernels.permute_rows(x, found), permute.permute_rows(x, found))
    for given in (None, weights):
        true = permute.unpermute_rows(rows.double(), found, weights_TK=None if given is None else given.double())
        assert apart(kernels.unpermute_rows(rows, found, weights_TK=given), true) < 4e-3
    grad_rows, grad_weights = kernels.unpermute_backward(x, rows, weights, found)
    true_rows, true_weights = permute.unpermute_backward(x.double(), rows.double(), weights.double(), found)
    assert apart(grad_rows, true_rows) < 4e-3
    assert apart(grad_weights, true_weights) < 1e-5


@pytest.mark.parametrize("name", GATE_ACTIVATIONS)
@pytest.mark.parametrize(("rows", "width"), [(1000, 768), (333, 14336), (77, 300), (1, 8)])
def test_weighted_activation(rows: int, width: int, name: str):
    inner, grad = (torch.randn(rows, n, device=CUDA).bfloat16() for n in (2 * width, width))
    weight, kernels = torch.rand(rows, device=CUDA), fastest()
    made = kernels.weighted_activation(inner, weight, name)
    assert apart(made, permute.weighted_activation(inner.double(), weight.double(), name)) < 4e-3
    found = kernels.weighted_activation_backward(grad, inner, weight, name, recompute_output=True)
    true = permute.weighted_activation_backward(
        grad.double(), inner.double(), weight.double(), name, recompute_output=False
    )
    assert apart(found[0], true[0]) < 4e-3 and apart(found[1], true[1]) < 1e-5
    assert found[2] is not None and torch.equal(found[2], made)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    "shape", [MoEShape("mixtral", 8, 2, 256, 512, 1000), MoEShape("qwen3_moe", 64, 4, 128, 96, 333)]
)
def test_layer(shape: MoEShape, routing: str):
    layer = build_layer(shape, routing, CUDA)
    first, second = ours(layer), ours(layer)
    assert torch.equal(first.y_TD, second.y_TD) and torch.equal(first.grad_x_TD, second.grad_x_TD)
    found = [first.y_TD, first.grad_x_TD, first.grad_weights_TK, layer.gate_up_grad, layer.down_grad]
    for mine, true in zip(found, experts_by_loop(layer), strict=True):
        assert apart(mine, true) < 1e-2


def test_the_host_never_waits():
    layer = build_layer(MoEShape("qwen3_moe", 64, 4, 128, 96, 333), "skewed", CUDA)
    some = layer.experts_TK.masked_fill(layer.experts_TK == 3, 64)

    def run() -> None:
        ours(layer)
        build_permutation(some, 64, may_drop=True, max_rows=1200)
        build_permutation(some, 64, may_drop=True, capacity=333)

    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
