"""The operations that `petatron bench kernels` times, each as a training step calls it, at the shapes of two models.

Bytes are the minimum: every input read once, every output written once. FLOPs are those of its GEMMs. Results are first compared
with float64, on as many leading rows as the reference has: every run draws new numbers.

| bytes per element of a row | read | written |
|---|---|---|
| norm | the residual stream, a branch | their sum, the norm of it |
| norm, backward | two gradients, the sum | its gradient, the norm again |
| gated activation (of F, from 2 F) | 2 F | F |
| gated activation, backward | F, 2 F | 2 F, and F again |

R rows, D hidden, F inner, V vocabulary, H and K heads of width E.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from petatron.bench.ops.kernel_case import CHECKED_ROWS, EPSILON, BenchContext, KernelCase, MicroBatchShape, Outputs
from petatron.bench.ops.latent_decode import latent_decode_cases
from petatron.bench.ops.recurrences import channel_delta_cases, delta_cases, scan_cases
from petatron.bench.ops.recurrent_decode import recurrent_decode_cases
from petatron.bench.ops.split_qkv_norm_rope import qkv_split_cases
from petatron.kernels import activation, norm
from petatron.kernels.cpu_matmul import matmul
from petatron.kernels.fp8.cast_and_gemm import E4M3, E5M2, Fp8Kernels, Fp8Matrix, dequantize
from petatron.kernels.fused_linear_cross_entropy import (
    GradRequest,
    VocabColumns,
    WriteWeightGrad,
    linear_cross_entropy,
    losses_and_gradient_,
)
from petatron.kernels.weight_grad_gemm import matmul_into

_LOSS_TOKENS = 16384
_CHUNK_TOKENS = 4096


def norm_cases(context: BenchContext, shape: MicroBatchShape, *, first: bool) -> Iterator[KernelCase]:
    rows, width = shape.num_tokens, shape.hidden_size
    x, branch, grad, grad_residual = (context.randn(rows, width) for _ in range(4))
    weight, bias = context.randn(width), context.randn(width)
    exact = [t.double() for t in (x, weight, branch, grad, grad_residual)]
    options = {"eps": EPSILON, "zero_centered_gamma": False}
    made = norm.rms_norm(exact[0], exact[1], branch=exact[2], **options)
    statistics = made[2].to(context.accumulate_dtype)
    total, moved = made[0].to(context.dtype), x.numel() * x.itemsize
    again = partial(norm.rms_norm_backward, exact[3], made[0], made[2], exact[1], zero_centered_gamma=False)
    ways = context.implementations("rms_norm", *(("rms_norm", "rms_norm_backward") if first else ()))
    yield KernelCase(
        label=f"rms_norm, {shape.name}",
        implementations=ways,
        call=lambda k: k.rms_norm(x, weight, branch=branch, **options),
        reference=lambda: made,
        moved_bytes=4 * moved,
    )
    backward = {"zero_centered_gamma": False, "grad_residual": grad_residual}
    yield KernelCase(
        label=f"rms_norm backward, {shape.name}",
        implementations=ways,
        call=lambda k: k.rms_norm_backward(grad, total, statistics, weight, **backward),
        reference=lambda: again(grad_residual=exact[4]),
        moved_bytes=5 * moved,
    )
    if not first:
        return
    yield KernelCase(
        label=f"layer_norm, {shape.name}",
        implementations=context.implementations("layer_norm"),
        call=lambda k: k.layer_norm(x, weight, bias, branch=branch, **options),
        reference=lambda: norm.layer_norm(exact[0], exact[1], bias.double(), branch=exact[2], **options),
        moved_bytes=4 * moved,
    )


def activation_cases(context: BenchContext, shape: MicroBatchShape, *, first: bool) -> Iterator[KernelCase]:
    rows, inner, few = shape.num_tokens, shape.ffn_hidden_size, CHECKED_ROWS
    gate_up, grad = context.randn(rows, 2 * inner), context.randn(rows, inner)
    exact = grad[:few].double(), gate_up[:few].double()
    compiled = ("gated_activation", "gated_activation_backward") if first else ()
    ways = context.implementations("gated activation", *compiled)
    moved = grad.numel() * grad.itemsize
    yield KernelCase(
        label=f"swiglu, {shape.name}",
        implementations=ways,
        call=lambda k: (k.gated_activation(gate_up, "swiglu"),),
        reference=lambda: (activation.gated_activation(exact[1], "swiglu"),),
        moved_bytes=3 * moved,
    )
    yield KernelCase(
        label=f"swiglu backward, {shape.name}",
        implementations=ways,
        call=lambda k: k.gated_activation_backward(grad, gate_up, "swiglu", recompute_output=True),
        reference=lambda: activation.gated_activation_backward(*exact, "swiglu", recompute_output=True),
        moved_bytes=6 * moved,
    )
    if not first:
        return
    x = gate_up[:, :inner].contiguous()
    exact_x = x[:few].double()
    yield KernelCase(
        label=f"gelu backward, {shape.name}",
        implementations=context.implementations("plain activation"),
        call=lambda k: k.activation_backward(grad, x, "gelu_tanh", recompute_output=True),
        reference=lambda: activation.activation_backward(exact[0], exact_x, "gelu_tanh", recompute_output=True),
        moved_bytes=4 * moved,
    )


def loss_cases(context: BenchContext, shape: MicroBatchShape, *, first: bool) -> Iterator[KernelCase]:
    tokens, few = min(shape.num_tokens, _LOSS_TOKENS), CHECKED_ROWS
    ways, columns = context.implementations("softmax and loss"), VocabColumns(shape.vocab_size)
    targets = torch.randint(shape.vocab_size, (tokens,), device=context.device)
    weights = torch.rand(tokens, device=context.device, dtype=context.accumulate_dtype)
    if first:
        yield _softmax_case(context, ways, shape.vocab_size, targets[:_CHUNK_TOKENS], weights[:_CHUNK_TOKENS])
    x = context.randn(tokens, shape.hidden_size)
    head = context.randn(shape.vocab_size, shape.hidden_size, scale=shape.hidden_size**-0.5)
    head_grad = torch.empty_like(head, dtype=context.accumulate_dtype)

    def head_and_loss(kernels: Any) -> Outputs:
        written: list[bool] = []  # the first chunk overwrites the head's gradient, later ones accumulate

        def deliver(write: WriteWeightGrad) -> None:
            write(head_grad, bool(written))
            written.append(True)

        request = GradRequest(weights, deliver)
        return linear_cross_entropy(x, head, targets, columns, grad_request=request, kernels=kernels)

    def true() -> Outputs:
        wanted = GradRequest(weights[:few].double(), None)
        return linear_cross_entropy(x[:few].double(), head.double(), targets[:few], columns, grad_request=wanted)

    def three_gemms() -> None:
        made = matmul(x, head.t())
        matmul(made, head)
        matmul_into(head_grad, made.t(), x, accumulate=False)

    losses = {f"{name} softmax": partial(head_and_loss, kernels) for name, kernels in ways.items()}
    yield KernelCase(
        label=f"head and loss, {tokens} tokens, {shape.name}",
        implementations={**losses, "the three GEMMs alone": three_gemms},
        call=lambda run: run(),
        reference=true,
        flops=6 * tokens * shape.vocab_size * shape.hidden_size,
    )


def _softmax_case(
    context: BenchContext, implementations: Mapping[str, Any], columns: int, targets: Tensor, weights: Tensor
) -> KernelCase:
    """A chunk of logits, overwritten with their gradient."""
    rows, few = targets.shape[0], slice(CHECKED_ROWS)
    logits = context.randn(rows, columns)
    first = logits[few].clone()

    def once(kernels: Any) -> Outputs:
        made = first.clone()
        return kernels.losses_and_gradient_(made, targets[few], weights[few], columns), made

    def true() -> Outputs:
        made = first.double()
        return losses_and_gradient_(made, targets[few], weights[few].double(), columns), made

    return KernelCase(
        label=f"softmax and loss, {rows} x {columns}",
        implementations=implementations,
        call=lambda k: k.losses_and_gradient_(logits, targets, weights, columns),
        checked_call=once,
        reference=true,
        moved_bytes=2 * logits.numel() * logits.itemsize,
    )


def embedding_cases(context: BenchContext, shape: MicroBatchShape, *, first: bool) -> Iterator[KernelCase]:
    ids = torch.randint(shape.vocab_size, (shape.num_tokens,), device=context.device)
    grad = context.randn(shape.num_tokens, shape.hidden_size)
    out = torch.zeros(shape.vocab_size, shape.hidden_size, device=context.device, dtype=context.accumulate_dtype)
    few = min(CHECKED_ROWS, shape.vocab_size)

    def once(kernels: Any) -> Outputs:
        kernels.embedding_grad(ids, grad, out, accumulate=False)
        return (out,)

    def true() -> Outputs:
        here = ids < few
        sums = torch.zeros(few, shape.hidden_size, device=context.device, dtype=torch.float64)
        return (sums.index_add_(0, ids[here], grad[here].double()),)

    touched = int(ids.unique().numel())
    yield KernelCase(
        label=f"embedding gradient, {shape.name}",
        implementations=context.implementations("embedding gradient"),
        call=lambda k: k.embedding_grad(ids, grad, out, accumulate=True),
        checked_call=once,
        reference=true,
        moved_bytes=grad.numel() * grad.itemsize + 2 * touched * shape.hidden_size * out.itemsize,
    )


def weight_grad_cases(context: BenchContext, shape: MicroBatchShape, *, first: bool) -> Iterator[KernelCase]:
    """The weight-gradient GEMM of the widest linear, accumulated into a float32 buffer."""
    few = min(CHECKED_ROWS, 2 * shape.ffn_hidden_size)
    x, grad = (context.randn(shape.num_tokens, width) for width in (shape.hidden_size, 2 * shape.ffn_hidden_size))
    out = x.new_zeros((grad.shape[1], x.shape[1]), dtype=context.accumulate_dtype)

    def once(_: Any) -> Outputs:
        matmul_into(out, grad.t(), x, accumulate=False)
        return (out,)

    ways: dict[str, Callable[[], object]] = {
        "accumulated into float32": partial(matmul_into, out, grad.t(), x, accumulate=True),
        "half-precision GEMM and addition": lambda: out.add_(matmul(grad.t(), x)),
        "half-precision GEMM alone": lambda: matmul(grad.t(), x),
    }
    yield KernelCase(
        label=f"weight gradient of gate and up, {shape.name}",
        implementations=ways,
        call=lambda run: run(),
        checked_call=once,
        reference=lambda: (grad[:, :few].double().t() @ x.double(),),
        flops=2 * grad.numel() * shape.hidden_size,
    )


def fp8_cases(context: BenchContext, shape: MicroBatchShape, *, first: bool) -> Iterator[KernelCase]:
    """Casts of a layer's input, and the three GEMMs of gate and up; of the larger model only."""
    if first:
        return
    ways, few = context.implementations("FP8 casts and GEMMs"), CHECKED_ROWS
    x = context.randn(shape.num_tokens, shape.hidden_size)
    scale, amax, last = (torch.ones(1, device=context.device) for _ in range(3))
    casts: dict[str, tuple[int, Callable[[Fp8Kernels], Fp8Matrix]]] = {
        "tensorwise": (6, lambda k: k.cast_tensor(x, E4M3)),
        "tensorwise, speculative": (4, lambda k: k.cast_speculative(x, E4M3, previous_scale=last)),
        "tensorwise, given scale": (4, lambda k: k.cast_with_scale(x, E4M3, scale=scale, amax=amax)),
        "rowwise": (6, lambda k: k.cast_rowwise(x, E4M3)),
        "block_1x128": (4, lambda k: k.cast_block_1x128(x, E4M3)),
        "block_128x128": (4, lambda k: k.cast_block_128x128(x, E4M3)),
    }
    for name, (element_bytes, cast) in casts.items():
        yield KernelCase(
            label=f"FP8 cast both ways {name}, {shape.name}",
            implementations=ways,
            call=cast,
            checked_call=lambda k, cast=cast: _dequantized(cast(k)),
            reference=lambda: (x[:few].double(), x[:, :few].double().t()),
            moved_bytes=element_bytes * x.numel(),
            tolerance=0.05,  # three mantissa bits
        )
    yield from _fp8_gemm_cases(context, shape, next(iter(ways.values())), x)


def _dequantized(cast: Fp8Matrix) -> Outputs:
    return dequantize(cast.rows), dequantize(cast.columns)


def _fp8_gemm_cases(
    context: BenchContext, shape: MicroBatchShape, kernels: Fp8Kernels, x: Tensor
) -> Iterator[KernelCase]:
    few = min(CHECKED_ROWS, shape.num_tokens)
    weight = context.randn(2 * shape.ffn_hidden_size, shape.hidden_size)
    grad = context.randn(shape.num_tokens, 2 * shape.ffn_hidden_size)
    out = torch.empty_like(weight, dtype=context.accumulate_dtype)
    plain: tuple[Callable[[], Tensor], ...] = (
        lambda: matmul(x, weight.t()),
        lambda: matmul(grad, weight),
        lambda: matmul(grad.t(), x),
    )
    recipes = {
        "tensorwise": (kernels.cast_tensor, kernels.cast_tensor, E5M2),
        "rowwise": (kernels.cast_rowwise, kernels.cast_rowwise, E5M2),
        "blockwise": (kernels.cast_block_1x128, kernels.cast_block_128x128, E4M3),
    }
    for recipe, (cast, cast_weight, gradients) in recipes.items():
        left, right, up = cast(x, E4M3), cast_weight(weight, E4M3), cast(grad, gradients)
        operands = ((left.rows, right.rows), (up.rows, right.columns), (up.columns, left.columns))
        names = ("", ", input gradient", ", weight gradient")
        for number, (name, (a, b)) in enumerate(zip(names, operands, strict=True)):
            into = {"dtype": context.accumulate_dtype, "out": out} if number == 2 else {"dtype": context.dtype}
            run = partial(kernels.gemm, a, b, fast=number == 0, **into)
            yield KernelCase(
                label=f"FP8 GEMM by {recipe}{name}, {shape.name}",
                implementations={"FP8": run, "half-precision GEMM": plain[number]},
                call=lambda run: (run(),),
                reference=lambda a=a, b=b: (dequantize(a)[:few].double() @ dequantize(b).double().t(),),
                flops=2 * shape.num_tokens * weight.numel(),
                tolerance=2e-2 if number == 0 else None,  # fast accumulation has fewer bits
            )


CASES: Mapping[str, Callable[..., Iterator[KernelCase]]] = {
    "norm": norm_cases,
    "activation": activation_cases,
    "rotary": qkv_split_cases,
    "loss": loss_cases,
    "embedding": embedding_cases,
    "weight-grad-gemm": weight_grad_cases,
    "fp8": fp8_cases,
    "scan": scan_cases,
    "delta": delta_cases,
    "channel-delta": channel_delta_cases,
    "latent-decode": latent_decode_cases,
    "recurrent-decode": recurrent_decode_cases,
}
"""By the name for --only."""
