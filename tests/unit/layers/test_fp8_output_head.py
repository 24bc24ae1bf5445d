"""The output head's backward in FP8: the GEMMs of quantized operands, whatever the chunks, and the same on every layout."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from petatron.base.errors import ConfigError
from petatron.config import RunConfig
from petatron.kernels.fp8.cast_and_gemm import E4M3, E5M2, REFERENCE, Fp8Matrix, power_of_two_scale, quantize
from petatron.kernels.fused_linear_cross_entropy import (
    GradRequest,
    VocabColumns,
    WriteWeightGrad,
    linear_cross_entropy,
)
from petatron.kernels.linear_gemms import PLAIN_GEMM, Gemm
from petatron.layers.ops import fp8_output_head
from petatron.layers.ops.fp8_output_head import Fp8OutputHeadGemm, fp8_output_head_factory
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.models.registry import model_spec
from petatron.validate import load_config
from petatron.verify.compare_traces import Tolerances, compare_traces
from petatron.verify.record_trace import StepTrace
from tests.dist import RankPool
from tests.longform import diagonal
from tests.parity.harness import tiny_run, train

TOKENS, WIDTH, IDS = 48, 32, 64
BOUNDS = Tolerances(loss=1e-6, gradient=1e-5, parameter=1e-5)  # a shard of an FP8 GEMM adds in float32
SIZES = "--hidden-size 64 --ffn-hidden-size 64 --train-iters 2 --lr-warmup-iters 0"


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(5)
    x, weight = torch.randn(TOKENS, WIDTH), torch.randn(IDS, WIDTH)
    loss_weights = torch.rand(TOKENS) / TOKENS
    loss_weights[7:11] = 0
    return x, weight, torch.randint(IDS, (TOKENS,)), loss_weights


def losses_and_grads(gemm: Gemm, *, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, the input's gradient and the weight's, from chunks of tokens."""
    x, weight, targets, loss_weights = inputs()
    weight_grad, written = torch.full_like(weight, float("nan")), []

    def target(write: WriteWeightGrad) -> None:
        write(weight_grad, bool(written))
        written.append(write)

    losses, x_grad = linear_cross_entropy(
        x,
        weight,
        targets,
        VocabColumns(IDS),
        grad_request=GradRequest(loss_weights, target),
        gemm=gemm,
        chunk_size=chunk,
    )
    assert x_grad is not None and len(written) == TOKENS // chunk
    return losses, x_grad, weight_grad


@pytest.mark.parametrize(("chunk", "rows_at_once"), [(TOKENS, 8192), (16, 8192), (16, 16), (16, 48)])
def test_gemms_of_quantized_operands(monkeypatch: pytest.MonkeyPatch, chunk: int, rows_at_once: int):
    """One scale for all chunks, from the largest weight of a token; losses are those without FP8."""
    monkeypatch.setattr(fp8_output_head, "_ACCUMULATE_CHUNK_ROWS", rows_at_once)
    x, weight, targets, loss_weights = inputs()
    losses, x_grad, weight_grad = losses_and_grads(fp8_output_head_factory(REFERENCE)(loss_weights), chunk=chunk)
    plain_losses, plain_x_grad, plain_weight_grad = losses_and_grads(PLAIN_GEMM, chunk=chunk)
    assert torch.equal(losses, plain_losses)
    grad = torch.softmax(x @ weight.t(), dim=1)
    grad[torch.arange(TOKENS), targets] -= 1
    scale = power_of_two_scale(loss_weights.amax(), E5M2)
    grad = quantize(grad * loss_weights.unsqueeze(1), scale, E5M2).double() * scale

    def quantized(tensor: Tensor) -> Tensor:
        own = power_of_two_scale(tensor.abs().amax(), E4M3)
        return quantize(tensor, own, E4M3).double() * own

    inputs_8 = torch.cat([quantized(part) for part in x.split(chunk)])
    # A gradient at the border of two numbers of e5m2 may be rounded to either: logits come from another GEMM here.
    assert torch.allclose(x_grad.double(), grad @ quantized(weight), rtol=1e-5, atol=2e-4)
    assert torch.allclose(weight_grad.double(), grad.t() @ inputs_8, rtol=1e-5, atol=2e-4)
    for ours, other in ((x_grad, plain_x_grad), (weight_grad, plain_weight_grad)):
        apart = float((ours - other).norm() / other.norm())
        assert 1e-3 < apart < 0.08, apart


def test_sizes_that_the_hardware_does_not_support_are_told():
    x, weight, _, loss_weights = inputs()
    told: list[str] = []
    gemm = Fp8OutputHeadGemm(REFERENCE, loss_weights, told.append)
    grad = torch.randn(TOKENS - 1, IDS)
    x_grad, weight_grad = gemm.backward(grad, weight, ())
    out = torch.empty_like(weight)
    weight_grad.write(x[:-1], out, accumulate=False)
    assert torch.equal(x_grad, grad @ weight) and torch.equal(out, grad.t() @ x[:-1])
    assert told == ["a GEMM of 47 rows times a weight of 64 x 32 does not run in FP8, which needs multiples of 16"]


def fp8_run(layout: str, *, world_size: int = 2, output_grad: bool = True) -> RunConfig:
    """FP8 operands, multiplied and added in float64; a config asks for at most float32."""
    made = tiny_run(
        f"{SIZES} --make-vocab-size-divisible-by 32 --fp8-format hybrid --fp8-output-head-backward {layout}",
        world_size=world_size,
    )
    return replace(made, precision=replace(made.precision, fp64=True, fp8_output_head_backward=output_grad))


@cache
def one_process(*, output_grad: bool = True) -> list[StepTrace]:
    return train(fp8_run("", world_size=1, output_grad=output_grad))


@diagonal(3)
@pytest.mark.parametrize("layout", ["--tp 2 --sequence-parallel", "--pp 2", "--dp 2 --use-torch-fsdp2"])
def test_a_layout_trains_the_model_of_one_process(ranks: RankPool, layout: str):
    """A vocabulary shard has the numbers that one rank has; and the flag is part of the model."""
    verdict = compare_traces([one_process()], ranks.run(train, 2, fp8_run(layout)), BOUNDS)
    assert verdict.agrees, verdict.first_departure
    assert not compare_traces([one_process()], [one_process(output_grad=False)], BOUNDS).agrees


def test_a_vocabulary_that_does_not_fit_is_refused():
    flags = f"{SIZES} --fp8-format hybrid --fp8-output-head-backward"
    with pytest.raises(ConfigError, match="multiples of 16 rows of the vocabulary, but a rank has 136"):
        tiny_run(flags)
    with pytest.raises(ConfigError, match=r"but a rank has 72.*--make-vocab-size-divisible-by 16"):
        tiny_run(f"{flags} --vocab-size 144 --tp 2", world_size=2)
    assert tiny_run(f"{flags} --vocab-size 144").precision.fp8_output_head_backward
    unknown = [
        *SIZES.split(),
        *"--fp8-format hybrid --fp8-output-head-backward --make-vocab-size-divisible-by 8".split(),
    ]
    with pytest.raises(ConfigError, match="but it is padded to multiples of 8"):
        load_config(unknown, preset="tiny-llama", require_training=False)


def test_memory_of_the_casts_is_counted(monkeypatch: pytest.MonkeyPatch):
    """The tensors in FP8 that exist at once, in a step whose tokens are one chunk."""
    cast, held = REFERENCE.cast_tensor, dict[tuple[int, ...], int]()

    def counted(x: Tensor, *args: Any, **options: Any) -> Fp8Matrix:
        matrix = cast(x, *args, **options)
        held[tuple(x.shape)] = sum(
            part.values.nbytes for part in (matrix.rows_or_none, matrix.columns_or_none) if part is not None
        )
        return matrix

    _, weight, _, loss_weights = inputs()
    losses_and_grads(fp8_output_head_factory(replace(REFERENCE, cast_tensor=counted))(loss_weights), chunk=TOKENS)
    assert set(held) == {(TOKENS, IDS), (IDS, WIDTH), (TOKENS, WIDTH)}
    del held[TOKENS, WIDTH]  # x, when the gradient's rows are free again
    flags = f"--hidden-size {WIDTH} --seq-length {TOKENS // 2} --vocab-size {IDS} --make-vocab-size-divisible-by 16 --fp8-format hybrid"
    plain, more = (
        model_spec(run).loss_workspace_bytes(ActivationShape.from_config(run, device="cuda"))
        for run in (tiny_run(flags), tiny_run(f"{flags} --fp8-output-head-backward"))
    )
    assert more - plain == sum(held.values()) and weight.shape == (IDS, WIDTH)
