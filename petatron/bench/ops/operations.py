"""The operations that `petatron bench kernels` times, each as a training step calls it, at the shapes of two models.

Bytes are what an operation cannot do without: every input read once, every output written once. FLOPs are those of its products.
What is found is held against float64 first, on as many leading rows as the truth has: every run draws new numbers.

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

from petatron.bench.ops.cases import CHECKED_ROWS, EPSILON, Case, Outputs, Place, Shape
from petatron.bench.ops.qkv_split import heads
from petatron.kernels import activation, norm
from petatron.kernels.fp8.cast_and_gemm import E4M3, E5M2, Cast, Fp8Kernels, widen
from petatron.kernels.linear_cross_entropy import Columns, Wanted, Write, linear_cross_entropy, losses_and_gradient_
from petatron.kernels.weight_grad_gemm import matmul_into

_LOSS_TOKENS = 16384
_CHUNK_TOKENS = 4096


def norms(place: Place, shape: Shape, *, first: bool) -> Iterator[Case]:
    rows, width = shape.rows, shape.hidden
    x, branch, grad, grad_total = (place.random(rows, width) for _ in range(4))
    weight, bias = place.random(width), place.random(width)
    exact = [t.double() for t in (x, weight, branch, grad, grad_total)]
    made = norm.rms_norm(exact[0], exact[1], eps=EPSILON, from_one=False, branch=exact[2])
    statistics = made[2].to(place.wide)
    total, moved = made[0].to(place.dtype), x.numel() * x.itemsize
    again = partial(norm.rms_norm_backward, exact[3], made[0], made[2], exact[1], from_one=False)
    ways = place.ways("rms_norm", *(("rms_norm", "rms_norm_backward") if first else ()))
    yield Case(
        label=f"rms_norm, {shape.name}",
        ways=ways,
        call=lambda k: k.rms_norm(x, weight, eps=EPSILON, from_one=False, branch=branch),
        true=lambda: made,
        bytes=4 * moved,
    )
    yield Case(
        label=f"rms_norm backward, {shape.name}",
        ways=ways,
        call=lambda k: k.rms_norm_backward(grad, total, statistics, weight, from_one=False, grad_total=grad_total),
        true=lambda: again(grad_total=exact[4]),
        bytes=5 * moved,
    )
    if not first:
        return
    ways = place.ways("layer_norm")
    yield Case(
        label=f"layer_norm, {shape.name}",
        ways=ways,
        call=lambda k: k.layer_norm(x, weight, bias, eps=EPSILON, from_one=False, branch=branch),
        true=lambda: norm.layer_norm(exact[0], exact[1], bias.double(), eps=EPSILON, from_one=False, branch=exact[2]),
        bytes=4 * moved,
    )


def activations(place: Place, shape: Shape, *, first: bool) -> Iterator[Case]:
    rows, inner, few = shape.rows, shape.inner, CHECKED_ROWS
    gate_up, grad = place.random(rows, 2 * inner), place.random(rows, inner)
    ways = place.ways("gated activation", *(("gated", "gated_backward") if first else ()))
    moved = grad.numel() * grad.itemsize
    yield Case(
        label=f"swiglu, {shape.name}",
        ways=ways,
        call=lambda k: (k.gated(gate_up, "swiglu"),),
        true=lambda: (activation.gated(gate_up[:few].double(), "swiglu"),),
        bytes=3 * moved,
    )
    yield Case(
        label=f"swiglu backward, {shape.name}",
        ways=ways,
        call=lambda k: k.gated_backward(grad, gate_up, "swiglu", again=True),
        true=lambda: activation.gated_backward(grad[:few].double(), gate_up[:few].double(), "swiglu", again=True),
        bytes=6 * moved,
    )
    if not first:
        return
    x = gate_up[:, :inner].contiguous()
    yield Case(
        label=f"gelu backward, {shape.name}",
        ways=place.ways("plain activation"),
        call=lambda k: k.plain_backward(grad, x, "gelu_tanh", again=True),
        true=lambda: activation.plain_backward(grad[:few].double(), x[:few].double(), "gelu_tanh", again=True),
        bytes=4 * moved,
    )


def losses(place: Place, shape: Shape, *, first: bool) -> Iterator[Case]:
    tokens, few = min(shape.rows, _LOSS_TOKENS), CHECKED_ROWS
    ways, columns = place.ways("softmax and loss"), Columns(shape.vocabulary)
    targets = torch.randint(shape.vocabulary, (tokens,), device=place.device)
    weights = torch.rand(tokens, device=place.device, dtype=place.wide)
    if first:
        yield _softmax(place, ways, shape.vocabulary, targets[:_CHUNK_TOKENS], weights[:_CHUNK_TOKENS])
    x, head = place.random(tokens, shape.hidden), place.random(shape.vocabulary, shape.hidden, scale=shape.hidden**-0.5)
    head_grad = torch.empty(shape.vocabulary, shape.hidden, device=place.device, dtype=place.wide)

    def whole(kernels: Any) -> Outputs:
        written: list[bool] = []  # the first chunk's part of the head's gradient takes the place of what was there

        def deliver(write: Write) -> None:
            write(head_grad, bool(written))
            written.append(True)

        return linear_cross_entropy(x, head, targets, columns, wanted=Wanted(weights, deliver), kernels=kernels)

    def true() -> Outputs:
        wanted = Wanted(weights[:few].double(), None)
        return linear_cross_entropy(x[:few].double(), head.double(), targets[:few], columns, wanted=wanted)

    def three_products() -> None:
        made = x @ head.t()
        torch.mm(made, head)
        matmul_into(head_grad, made.t(), x, accumulate=False)

    yield Case(
        label=f"head and loss, {tokens} tokens, {shape.name}",
        ways={f"{name} softmax": partial(whole, kernels) for name, kernels in ways.items()}
        | {"the three products alone": three_products},
        call=lambda run: run(),
        true=true,
        flops=6 * tokens * shape.vocabulary * shape.hidden,
    )


def _softmax(place: Place, ways: Mapping[str, Any], columns: int, targets: Tensor, weights: Tensor) -> Case:
    """A chunk of logits, which become their gradient."""
    rows, few = targets.shape[0], slice(CHECKED_ROWS)
    logits = place.random(rows, columns)
    first = logits[few].clone()

    def once(kernels: Any) -> Outputs:
        made = first.clone()
        return kernels.losses_and_gradient_(made, targets[few], weights[few], columns), made

    def true() -> Outputs:
        made = first.double()
        return losses_and_gradient_(made, targets[few], weights[few].double(), columns), made

    return Case(
        label=f"softmax and loss, {rows} x {columns}",
        ways=ways,
        call=lambda k: k.losses_and_gradient_(logits, targets, weights, columns),
        once=once,
        true=true,
        bytes=2 * logits.numel() * logits.itemsize,
    )


def embeddings(place: Place, shape: Shape, *, first: bool) -> Iterator[Case]:
    ids = torch.randint(shape.vocabulary, (shape.rows,), device=place.device)
    grad = place.random(shape.rows, shape.hidden)
    out = torch.zeros(shape.vocabulary, shape.hidden, device=place.device, dtype=place.wide)
    few = min(CHECKED_ROWS, shape.vocabulary)

    def once(kernels: Any) -> Outputs:
        kernels.embedding_grad(ids, grad, out, accumulate=False)
        return (out,)

    def true() -> Outputs:
        here = ids < few
        sums = torch.zeros(few, shape.hidden, device=place.device, dtype=torch.float64)
        return (sums.index_add_(0, ids[here], grad[here].double()),)

    touched = int(ids.unique().numel())
    yield Case(
        label=f"embedding gradient, {shape.name}",
        ways=place.ways("embedding gradient"),
        call=lambda k: k.embedding_grad(ids, grad, out, accumulate=True),
        once=once,
        true=true,
        bytes=grad.numel() * grad.itemsize + 2 * touched * shape.hidden * out.itemsize,
    )


def products(place: Place, shape: Shape, *, first: bool) -> Iterator[Case]:
    """The weight's gradient of the widest product, added to a wide buffer."""
    few = min(CHECKED_ROWS, 2 * shape.inner)
    x, grad = place.random(shape.rows, shape.hidden), place.random(shape.rows, 2 * shape.inner)
    out = torch.zeros(2 * shape.inner, shape.hidden, device=place.device, dtype=place.wide)

    def once(_: Any) -> Outputs:
        matmul_into(out, grad.t(), x, accumulate=False)
        return (out,)

    ways: dict[str, Callable[[], object]] = {
        "into the wide buffer": partial(matmul_into, out, grad.t(), x, accumulate=True),
        "narrow product and addition": lambda: out.add_(grad.t() @ x),
        "narrow product alone": lambda: grad.t() @ x,
    }
    yield Case(
        label=f"weight gradient of gate and up, {shape.name}",
        ways=ways,
        call=lambda run: run(),
        once=once,
        true=lambda: (grad[:, :few].double().t() @ x.double(),),
        flops=2 * grad.numel() * shape.hidden,
    )


def eight_bits(place: Place, shape: Shape, *, first: bool) -> Iterator[Case]:
    """Casts of a layer's input, and the three products of gate and up; of the larger model only."""
    if first:
        return
    ways, few = place.ways("fp8"), CHECKED_ROWS
    x, one, amax = place.random(shape.rows, shape.hidden), *(torch.ones(1, device=place.device) for _ in range(2))
    casts: dict[str, tuple[int, Callable[[Fp8Kernels], Cast]]] = {
        "by tensor": (6, lambda k: k.cast_tensor(x, E4M3)),
        "by tensor, delayed": (4, lambda k: k.cast_delayed(x, E4M3, scale=one, amax=amax)),
        "by rows": (6, lambda k: k.cast_rows(x, E4M3)),
        "by blocks": (4, lambda k: k.cast_blocks(x, E4M3)),
        "by squares": (4, lambda k: k.cast_squares(x, E4M3)),
    }
    for name, (each, cast) in casts.items():
        yield Case(
            label=f"FP8 cast both ways {name}, {shape.name}",
            ways=ways,
            call=cast,
            once=lambda k, cast=cast: _widened(cast(k)),
            true=lambda: (x[:few].double(), x[:, :few].double().t()),
            bytes=each * x.numel(),
            bound=0.05,  # three bits after the point
        )
    yield from _eight_bit_products(place, shape, next(iter(ways.values())), x)


def _widened(cast: Cast) -> Outputs:
    return widen(cast.rows), widen(cast.columns)


def _eight_bit_products(place: Place, shape: Shape, kernels: Fp8Kernels, x: Tensor) -> Iterator[Case]:
    few = min(CHECKED_ROWS, shape.rows)
    weight, grad = place.random(2 * shape.inner, shape.hidden), place.random(shape.rows, 2 * shape.inner)
    out = torch.empty(2 * shape.inner, shape.hidden, device=place.device, dtype=place.wide)
    plain: tuple[Callable[[], Tensor], ...] = (lambda: x @ weight.t(), lambda: grad @ weight, lambda: grad.t() @ x)
    recipes = {
        "tensor": (kernels.cast_tensor, kernels.cast_tensor, E5M2),
        "rows": (kernels.cast_rows, kernels.cast_rows, E5M2),
        "blocks": (kernels.cast_blocks, kernels.cast_squares, E4M3),
    }
    for recipe, (cast, cast_weight, gradients) in recipes.items():
        left, right, up = cast(x, E4M3), cast_weight(weight, E4M3), cast(grad, gradients)
        operands = ((left.rows, right.rows), (up.rows, right.columns), (up.columns, left.columns))
        names = ("", ", input gradient", ", weight gradient")
        for number, (name, (a, b)) in enumerate(zip(names, operands, strict=True)):
            into = {"dtype": place.wide, "out": out} if number == 2 else {"dtype": place.dtype}
            run = partial(kernels.product, a, b, fast=number == 0, **into)
            yield Case(
                label=f"FP8 product by {recipe}{name}, {shape.name}",
                ways={"FP8": run, "the narrow product": plain[number]},
                call=lambda run: (run(),),
                true=lambda a=a, b=b: (widen(a)[:few].double() @ widen(b).double().t(),),
                flops=2 * shape.rows * weight.numel(),
                bound=2e-2 if number == 0 else None,  # fast sums have fewer bits
            )


CASES: Mapping[str, Callable[..., Iterator[Case]]] = {
    "norm": norms,
    "activation": activations,
    "rotary": heads,
    "loss": losses,
    "embedding": embeddings,
    "product": products,
    "fp8": eight_bits,
}
"""By the name that --only takes."""
