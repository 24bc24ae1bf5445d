"""Times an MoE layer, forward and backward, against that of Hugging Face transformers, and its parts.

Useful FLOPs are those of the selected experts alone, 6 x T K x 3 D F: two per multiply-add, three GEMMs of D x F each, one forward
and two backward. Sorting, permuting and weighting rows count as time only. Ours also accumulates weight gradients in float32, as
the optimizer needs them; the peer leaves them in bfloat16.

The peer's forward and backward alternate with ours in one process, on the same weights, tokens and routing. Routing is even
(every expert equally likely) or skewed (the r-th expert is 1/r as likely as the first).

T tokens, K experts per token, D hidden size, F inner size, R = T K rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from petatron.bench.measure.format_si_units import format_si
from petatron.bench.measure.timing import ProgressLog, median_ms
from petatron.kernels.compute_dtype import compute_dtype
from petatron.kernels.moe.grouped_gemm import GroupedGemm
from petatron.kernels.moe.permute import MoEKernels, Permutation, build_permutation, choices_to_rows, rows_to_choices
from petatron.kernels.registry import KernelContext, choose_kernel

ROUTINGS = ("even", "skewed")
ACTIVATION = "swiglu"


@dataclass(frozen=True, slots=True)
class MoEShape:
    """`family` names the model family of the layer, and so the peer's to compare with."""

    family: str
    num_experts: int
    top_k: int
    hidden_size: int
    ffn_hidden_size: int
    num_tokens: int

    @property
    def flops(self) -> int:
        return 6 * self.num_tokens * self.top_k * 3 * self.hidden_size * self.ffn_hidden_size


SHAPES = (MoEShape("mixtral", 8, 2, 4096, 14336, 32768), MoEShape("qwen3_moe", 128, 8, 2048, 768, 32768))
SMALL_SHAPES = (MoEShape("mixtral", 4, 2, 64, 96, 128), MoEShape("qwen3_moe", 16, 4, 32, 24, 128))


@dataclass(frozen=True, slots=True)
class BenchMoELayer:
    """The experts' weights, their float32 gradients, and one batch: tokens, routing, probabilities, and the output gradient."""

    shape: MoEShape
    kernels: MoEKernels
    gate_up: Tensor
    down: Tensor
    gate_up_grad: Tensor
    down_grad: Tensor
    x_TD: Tensor
    experts_TK: Tensor
    weights_TK: Tensor
    grad_TD: Tensor


@dataclass(frozen=True, slots=True)
class MoEOutputs:
    y_TD: Tensor
    grad_x_TD: Tensor
    grad_weights_TK: Tensor


@dataclass(frozen=True, slots=True)
class MoEOperation:
    """One pass over the layer's data: what to run, and its minimum FLOPs or bytes."""

    name: str
    run: Callable[[], object]
    flops: int = 0
    moved_bytes: int = 0


def build_layer(
    shape: MoEShape, routing: str, device: torch.device, *, dtype: torch.dtype = torch.bfloat16
) -> BenchMoELayer:
    """Random weights and tokens."""
    e, k, d, f, t = shape.num_experts, shape.top_k, shape.hidden_size, shape.ffn_hidden_size, shape.num_tokens

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(size, device=device, dtype=dtype) * scale).to(dtype)

    # The k largest of log p + Gumbel noise are k draws without replacement.
    likely = torch.arange(1, e + 1, device=device).log().neg() if routing == "skewed" else torch.zeros(e, device=device)
    noise = torch.rand(t, e, device=device).clamp(1e-20, 1 - 1e-7).log().neg().log().neg()
    scores_TK, experts_TK = (likely + noise).topk(k, dim=1)
    wide = compute_dtype(dtype)
    return BenchMoELayer(
        shape=shape,
        kernels=choose_kernel("expert permutation", KernelContext.of(device, dtype, allow_compile=False)).functions,
        gate_up=normal(e, 2 * f, d, scale=d**-0.5),
        down=normal(e, d, f, scale=f**-0.5),
        gate_up_grad=torch.empty((e, 2 * f, d), device=device, dtype=wide),
        down_grad=torch.empty((e, d, f), device=device, dtype=wide),
        x_TD=normal(t, d),
        experts_TK=experts_TK,
        weights_TK=scores_TK.softmax(dim=1).to(wide),
        grad_TD=normal(t, d),
    )


@torch.no_grad()
def ours(layer: BenchMoELayer) -> MoEOutputs:
    """Runs forward and backward with this library's kernels; permuted rows are saved for backward, the activation is not."""
    kernels, permutation = layer.kernels, build_permutation(layer.experts_TK, layer.shape.num_experts)
    multiply = GroupedGemm(permutation.counts)
    weight_R = choices_to_rows(layer.weights_TK, permutation)
    rows = kernels.permute_rows(layer.x_TD, permutation)
    inner, _ = multiply.forward(rows, layer.gate_up)
    out, _ = multiply.forward(kernels.weighted_activation(inner, weight_R, ACTIVATION), layer.down)
    y = kernels.unpermute_rows(out, permutation)
    del out
    grad_active, job = multiply.backward(kernels.permute_rows(layer.grad_TD, permutation), layer.down, ())
    backward = kernels.weighted_activation_backward
    grad_inner, grad_weight_R, active = backward(grad_active, inner, weight_R, ACTIVATION, recompute_output=True)
    job.write(active, layer.down_grad, accumulate=False)
    del active, inner, grad_active
    grad_rows, job = multiply.backward(grad_inner, layer.gate_up, ())
    job.write(rows, layer.gate_up_grad, accumulate=False)
    return MoEOutputs(y, kernels.unpermute_rows(grad_rows, permutation), rows_to_choices(grad_weight_R, permutation))


def peer(layer: BenchMoELayer) -> Callable[[], MoEOutputs] | None:
    """Returns the same with the grouped_mm experts of Hugging Face transformers, which shares the weights; None without it."""
    module = _peer_module(layer.shape)
    if module is None:
        return None
    module.gate_up_proj = torch.nn.Parameter(layer.gate_up)
    module.down_proj = torch.nn.Parameter(layer.down)
    # Each of their routers returns its weights in this precision.
    kind = layer.x_TD.dtype if layer.shape.family == "qwen3_moe" else layer.weights_TK.dtype
    x, weights = (leaf.detach().clone().requires_grad_() for leaf in (layer.x_TD, layer.weights_TK.to(kind)))
    leaves = [x, weights, *module.parameters()]

    def run() -> MoEOutputs:
        y = module(x, layer.experts_TK, weights)
        y.backward(layer.grad_TD)
        assert x.grad is not None and weights.grad is not None
        result = MoEOutputs(y.detach(), x.grad, weights.grad)
        for leaf in leaves:
            leaf.grad = None
        return result

    return run


def _peer_module(shape: MoEShape) -> Any:
    try:
        from transformers import MixtralConfig, Qwen3MoeConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
    except ImportError:
        return None
    config_class, kind, width, experts = MixtralConfig, MixtralExperts, "intermediate_size", "num_local_experts"
    if shape.family == "qwen3_moe":
        config_class, kind, width, experts = Qwen3MoeConfig, Qwen3MoeExperts, "moe_intermediate_size", "num_experts"
    sizes = {"hidden_size": shape.hidden_size, width: shape.ffn_hidden_size, experts: shape.num_experts}
    config: Any = config_class(**sizes, hidden_act="silu")
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        return kind(config)


def layer_operations(layer: BenchMoELayer) -> Iterator[MoEOperation]:
    """Yields the passes of `ours`, one by one."""
    shape, kernels = layer.shape, layer.kernels
    tokens, rows = layer.x_TD.numel() * layer.x_TD.itemsize, shape.top_k * layer.x_TD.numel() * layer.x_TD.itemsize
    hidden = shape.num_tokens * shape.top_k * shape.ffn_hidden_size * layer.x_TD.itemsize
    flops = 2 * shape.num_tokens * shape.top_k * shape.hidden_size * shape.ffn_hidden_size
    permutation = build_permutation(layer.experts_TK, shape.num_experts)
    yield MoEOperation("sort", lambda: build_permutation(layer.experts_TK, shape.num_experts))
    yield MoEOperation("permute", lambda: kernels.permute_rows(layer.x_TD, permutation), moved_bytes=tokens + rows)
    x_RD = kernels.permute_rows(layer.x_TD, permutation)
    yield MoEOperation("unpermute", lambda: kernels.unpermute_rows(x_RD, permutation), moved_bytes=tokens + rows)
    weights = layer.weights_TK
    unpermute_backward = kernels.unpermute_backward
    yield MoEOperation(
        "weighted unpermute, backward",
        lambda: unpermute_backward(layer.grad_TD, x_RD, weights, permutation),
        moved_bytes=tokens + 2 * rows,
    )
    yield from _gemm_operations("gate and up", x_RD, layer.gate_up, layer.gate_up_grad, permutation, flops=2 * flops)
    inner = GroupedGemm(permutation.counts).forward(x_RD, layer.gate_up)[0]
    weight_R = choices_to_rows(weights, permutation)
    yield MoEOperation(
        "activation", lambda: kernels.weighted_activation(inner, weight_R, ACTIVATION), moved_bytes=3 * hidden
    )
    active = kernels.weighted_activation(inner, weight_R, ACTIVATION)
    backward = kernels.weighted_activation_backward
    yield MoEOperation(
        "activation backward",
        lambda: backward(active, inner, weight_R, ACTIVATION, recompute_output=True),
        moved_bytes=6 * hidden,
    )
    yield from _gemm_operations("down", active, layer.down, layer.down_grad, permutation, flops=flops)


def _gemm_operations(
    name: str, x: Tensor, weight: Tensor, weight_grad: Tensor, permutation: Permutation, *, flops: int
) -> Iterator[MoEOperation]:
    multiply = GroupedGemm(permutation.counts)
    grad = torch.randn_like(multiply.forward(x, weight)[0])
    job = multiply.backward(grad, weight, ())[1]
    yield MoEOperation(name, lambda: multiply.forward(x, weight), flops=flops)
    yield MoEOperation(f"{name}, input gradient", lambda: multiply.backward(grad, weight, ()), flops=flops)
    yield MoEOperation(f"{name}, weight gradient", lambda: job.write(x, weight_grad, accumulate=False), flops=flops)
    yield MoEOperation(
        f"{name}, weight gradient, accumulated", lambda: job.write(x, weight_grad, accumulate=True), flops=flops
    )


def measure(
    device: torch.device, *, shapes: Sequence[MoEShape] | None = None, repeat: int = 10, warmup_s: float = 2.0
) -> list[tuple[str, str]]:
    """Returns for every shape and routing ours and the peer's time, and for every shape its parts, with even routing."""
    table: list[tuple[str, str]] = []
    news = ProgressLog()
    for shape in shapes or (SHAPES if device.type == "cuda" else SMALL_SHAPES):
        label = f"MoE {shape.family} E{shape.num_experts} K{shape.top_k} D{shape.hidden_size} F{shape.ffn_hidden_size}"
        for routing in ROUTINGS:
            news(f"{label}, {routing}")
            layer = build_layer(shape, routing, device)
            theirs = peer(layer)
            runs: list[Callable[[], object]] = [lambda layer=layer: ours(layer)]
            ms = median_ms(runs if theirs is None else [*runs, theirs], device, repeat=repeat, warmup_s=warmup_s)
            reached = [format_si(shape.flops / time_ms * 1e3, "FLOP/s") for time_ms in ms]
            text = f"{ms[0]:.2f} ms, {reached[0]} useful"
            if theirs is not None:
                text += f"; transformers {ms[1]:.2f} ms, {reached[1]}: {ms[1] / ms[0]:.3f}x"
            table.append((f"{label}, {routing}", text))
            del layer, theirs, runs
        news(f"{label}, its parts")
        layer = build_layer(shape, ROUTINGS[0], device)
        table += [(f"{label}: {part.name}", _rate_text(part, device, repeat)) for part in layer_operations(layer)]
    return table


def _rate_text(operation: MoEOperation, device: torch.device, repeat: int) -> str:
    (ms,) = median_ms([operation.run], device, repeat=repeat, warmup_s=0.0)
    work, unit = (operation.flops, "FLOP/s") if operation.flops else (operation.moved_bytes, "B/s")
    return f"{ms:.3f} ms, {format_si(work / ms * 1e3, unit)}" if work else f"{ms:.3f} ms"
