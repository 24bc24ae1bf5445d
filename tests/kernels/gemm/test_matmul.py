"""Half-precision GEMMs on CPUs with and without instructions for them: who widens, the rounding, and that no GEMM is left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from petatron.base.device import parse_instructions
from petatron.cli import doctor
from petatron.kernels import cpu_matmul, linear_gemms, weight_grad_gemm
from petatron.kernels.attention import attention
from petatron.kernels.attention.visibility import Visibility
from petatron.kernels.moe.grouped_gemm import GroupedGemm
from petatron.kernels.optimizer.newton_schulz import newton_schulz, step_coefficients
from tests.longform import diagonal
from tests.parity.harness import tiny_run, train

HALF = torch.bfloat16
CASCADE_LAKE, SAPPHIRE_RAPIDS = (
    f"processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512bw {more}\nbugs\t\t: spectre\n" for more in ("", "avx512_bf16")
)
GRAVITON2, GRAVITON3 = (f"processor\t: 0\nFeatures\t: fp asimd fphp asimdhp {more}\n" for more in ("", "bf16"))


@pytest.fixture(params=[True, False], ids=["without", "with"])
def widened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A CPU without, then with bfloat16 instructions."""
    force(monkeypatch, instructions=frozenset() if request.param else frozenset({"avx512_bf16"}))
    return request.param


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, instructions=frozenset())


def force(monkeypatch: pytest.MonkeyPatch, *, instructions: frozenset[str]) -> None:
    monkeypatch.setattr(cpu_matmul, "cpu_instructions", lambda: instructions)


def half(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(HALF)


@pytest.mark.parametrize(
    ("description", "bf16", "fp16"),
    [
        (CASCADE_LAKE, False, False),
        (SAPPHIRE_RAPIDS, True, False),
        (SAPPHIRE_RAPIDS.replace("avx512_bf16", "amx_bf16 avx512_fp16"), True, True),
        (GRAVITON2, False, False),
        (GRAVITON3, True, False),
        ("", False, False),
    ],
    ids=["avx512", "avx512_bf16", "amx", "arm", "arm with bf16", "unknown"],
)
def test_cpus_that_widen(description: str, bf16: bool, fp16: bool, monkeypatch: pytest.MonkeyPatch):
    force(monkeypatch, instructions=parse_instructions(description))
    for dtype, native in ((torch.bfloat16, bf16), (torch.float16, fp16)):
        reason = cpu_matmul.unsupported_reason("cpu", dtype)
        assert reason is None if native else reason is not None and str(dtype)[6:] in reason
        assert cpu_matmul.is_widened(torch.ones(1, 1, dtype=dtype), torch.ones(1, 1, dtype=dtype)) is not native
        assert cpu_matmul.unsupported_reason("cuda", dtype) is None
    assert (
        cpu_matmul.unsupported_reason("cpu", torch.float32)
        is cpu_matmul.unsupported_reason("cpu", torch.float64)
        is None
    )


def test_doctor_says_which_way(widened: bool):
    [line] = [line for line in doctor._kernels(torch.device("cpu")) if line.startswith("GEMMs and attention")]
    if widened:
        assert line == (
            "GEMMs and attention: bfloat16 widened to float32, results rounded once; not bfloat16: this CPU has no bfloat16 "
            "instructions (avx512_bf16, amx_bf16, avx_ne_convert, bf16)"
        )
    else:
        assert line == "GEMMs and attention: bfloat16"


def test_linear_gemms(widened: bool):
    """Bit for bit: the widened product rounded once, or PyTorch's own."""
    x, weight, grad = half(24, 40), half(56, 40, seed=1), half(24, 56, seed=2)

    def reference(a: Tensor, b: Tensor) -> Tensor:
        return (a.float() @ b.float()).to(HALF) if widened else a @ b

    plain = linear_gemms.PLAIN_GEMM
    assert plain.forward(x, weight)[0].equal(reference(x, weight.t()))
    x_grad, weight_grad = plain.backward(grad, weight, ())
    assert x_grad.equal(reference(grad, weight))
    out = torch.empty_like(weight)
    weight_grad.write(x, out, accumulate=False)
    assert out.equal(reference(grad.t(), x))
    for blocks in (1, 2):
        chunked = torch.empty(2, 30, 56, dtype=HALF)[:blocks, 3:15]
        plain.forward_into(x.view(2, 12, 40)[:blocks], weight, chunked)
        if widened:
            assert chunked.equal(reference(x, weight.t()).view(2, 12, 56)[:blocks])


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("accumulate", [False, True])
def test_weight_gradient_is_rounded_once(accumulate: bool):
    a, b, out = half(16, 24), half(24, 8, seed=1), half(16, 8, seed=2)
    wanted = (a.float() @ b.float() + (out.float() if accumulate else 0)).to(HALF)
    if not accumulate:
        out.fill_(float("nan"))
    weight_grad_gemm.matmul_into(out, a, b, accumulate=accumulate)
    torch.testing.assert_close(out, wanted, rtol=2**-8, atol=0)
    assert (out == wanted).float().mean() > 0.98, "one rounding of a float32 sum, whose own order may differ"


@pytest.mark.usefixtures("without")
def test_autograd_saves_operands_as_they_are():
    """What is saved for backward is half precision; gradients are rounded once."""
    a, b, grad = half(6, 5).requires_grad_(), half(5, 4, seed=1).requires_grad_(), half(6, 4, seed=2)
    saved: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        out = cpu_matmul.matmul(a, b)
    assert [tensor.dtype for tensor in saved] == [HALF, HALF]
    a_grad, b_grad = torch.autograd.grad(out, (a, b), grad)
    assert a_grad.equal((grad.float() @ b.float().t()).to(HALF)) and b_grad.equal(
        (a.float().t() @ grad.float()).to(HALF)
    )


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("counts", [torch.tensor([3, 0, 5]), 4], ids=["counts", "capacity"])
def test_experts(counts: Tensor | int):
    rows = 12 if isinstance(counts, int) else 8
    x, weight, grad = half(rows, 16), half(3, 24, 16, seed=1), half(rows, 24, seed=2)
    sizes = [counts] * 3 if isinstance(counts, int) else counts.tolist()
    wanted = torch.cat([part.float() @ w.float().t() for part, w in zip(x.split(sizes), weight)]).to(HALF)
    experts = GroupedGemm(counts)
    assert experts.forward(x, weight)[0].equal(wanted)
    x_grad, job = experts.backward(grad, weight, ())
    assert x_grad.equal(torch.cat([part.float() @ w.float() for part, w in zip(grad.split(sizes), weight)]).to(HALF))
    out = torch.empty_like(weight)
    job.write(x, out, accumulate=False)
    parts = zip(grad.split(sizes), x.split(sizes))
    assert out.equal(torch.stack([g.float().t() @ part.float() for g, part in parts]).to(HALF))


@pytest.mark.usefixtures("without")
def test_newton_schulz_rounds_every_product():
    x = half(2, 6, 10)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    [(a, b, c)] = coefficients = step_coefficients("simple", 1)
    y = (x / norm).to(HALF)
    gram = (y.float() @ y.mT.float()).to(HALF)
    square = (gram.float() @ gram.float()).to(HALF)
    wanted = a * y + ((b * gram + c * square).float() @ y.float()).to(HALF)
    assert newton_schulz(x, coefficients).equal(wanted)


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("visibility", [Visibility(), Visibility.full()])
def test_attention_is_that_of_widened_operands(visibility: Visibility, kv_heads: int):
    """The output to the bit; gradients up to the output's rounding, which backward reads."""
    q, k, v = half(9, 2, 4, 8), half(9, 2, kv_heads, 8, seed=1), half(9, 2, kv_heads, 8, seed=2)
    grad = half(9, 2, 4, 8, seed=3)
    results = []
    for dtype in (HALF, torch.float32):
        operands = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = attention(*operands, visibility)
        results.append((out, *torch.autograd.grad(out, operands, grad.to(dtype))))
    assert all(x.dtype == HALF for x in results[0])
    assert results[0][0].equal(results[1][0].to(HALF))
    for ours, wide in zip(*results):
        torch.testing.assert_close(ours.float(), wide, rtol=0, atol=2**-8 * wide.abs().max().item())


class HalfGemms(TorchDispatchMode):
    """Records GEMMs and attention kernels that are given half-precision operands."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if any(word in name for word in ("mm", "dot", "attention", "linear", "einsum", "matmul", "::mv")) and any(
            isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16) for x in args
        ):
            self.seen.add(name)
        return func(*args, **(kwargs or {}))


STEPS = {
    "dense": "--bf16",
    "fp16": "--fp16",
    "bf16 gradients": "--bf16 --main-grads-dtype bf16",
    "recompute": "--bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "window": "--bf16 --window-size 3",
    "documents": "--bf16 --reset-attention-mask --reset-position-ids",
    "experts": "--bf16 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 16",
    "muon": "--bf16 --optimizer muon",
    "fp8": "--bf16 --fp8-format hybrid",
}


def half_gemms_of_a_step(flags: str) -> set[str]:
    run = tiny_run(f"--num-layers 1 --seq-length 8 --vocab-size 37 --train-iters 1 --lr-warmup-iters 0 {flags}")
    with HalfGemms() as gemms:
        train(run)
    return gemms.seen


@diagonal(2)
@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("flags", STEPS.values(), ids=STEPS)
def test_no_gemm_of_a_training_step_is_in_half_precision(flags: str, capfd: pytest.CaptureFixture[str]):
    """And so no library prints the C++ stack of its fallback."""
    assert half_gemms_of_a_step(flags) == set()
    assert capfd.readouterr() == ("", "")


def test_all_gemms_are_in_half_precision_where_the_cpu_has_them(monkeypatch: pytest.MonkeyPatch):
    force(monkeypatch, instructions=frozenset({"avx512_bf16"}))
    found = half_gemms_of_a_step("--bf16")
    assert {"aten::mm", "aten::_scaled_dot_product_flash_attention_for_cpu"} <= found
