"""Times attention, forward and backward, plain and packed, as a layer calls it and against PyTorch's other backends.

FLOPs are those of unmasked scores: n^2 H (E + V) forward for a document of n tokens (a GEMM of n^2 E and one of n^2 V for every head,
half of each masked), and n^2 H (3 E + 2 V) backward, where one GEMM is recomputed. Padding and permuted rows count as time only. Contenders
alternate in one process, in both orders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.bench.measure.format_si_units import format_si
from petatron.bench.measure.timing import ProgressLog, median_ms
from petatron.kernels.attention import attention, cudnn, flash
from petatron.kernels.attention.document_layout import Documents
from petatron.kernels.attention.packed_document_attention import PackingKernels
from petatron.kernels.attention.visibility import Visibility
from petatron.kernels.registry import KernelContext, choose_kernel

AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One batch. document_lengths: of the documents of each row; all rows have the same total."""

    name: str
    document_lengths: tuple[tuple[int, ...], ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    """The width of value heads if they are narrower, as in latent attention."""

    @property
    def flops(self) -> float:
        values = self.value_dim or self.head_dim
        pairs = sum(float(n * n) for row in self.document_lengths for n in row)
        return pairs * self.num_heads * (4 * self.head_dim + 3 * values)


def random_lengths(batch: int, sequence: int, *, typical: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Draws document lengths with a long tail, like text."""
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(batch):
        row: list[int] = []
        while (left := sequence - sum(row)) > 0:
            row.append(min(left, max(1, int(typical * generator.lognormal()))))
        rows.append(tuple(row))
    return tuple(rows)


SHAPES = (
    AttentionShape("plain, 32/8 heads of 64, S4096 B8", ((4096,),) * 8, 32, 8, 64),
    AttentionShape("plain, 32/8 heads of 128, S8192 B2", ((8192,),) * 2, 32, 8, 128),
    AttentionShape("latent, 128 heads of 192/128, S4096 B2", ((4096,),) * 2, 128, 128, 192, 128),
    AttentionShape("packed 8 x 2048, 32/8 heads of 128", ((2048,) * 4,) * 2, 32, 8, 128),
    AttentionShape("packed, typically 3000, 32/8 of 128", random_lengths(2, 8192, typical=3000, seed=1), 32, 8, 128),
    AttentionShape("packed, typically 800, 32/8 of 128", random_lengths(2, 8192, typical=800, seed=1), 32, 8, 128),
    AttentionShape("packed, typically 800, 32/8 of 64", random_lengths(8, 4096, typical=800, seed=1), 32, 8, 64),
)
SMALL_SHAPES = (
    AttentionShape("plain", ((64,),) * 2, 4, 2, 8),
    AttentionShape("latent", ((64,),) * 2, 4, 4, 8, 6),
    AttentionShape("packed", ((40, 24), (64,)), 4, 2, 8),
)


def measure(
    device: torch.device, *, shapes: Sequence[AttentionShape] | None = None, repeat: int = 10, warmup_s: float = 1.0
) -> list[tuple[str, str]]:
    """Returns for every shape the speed of our attention and of the others."""
    context = KernelContext.of(device, torch.bfloat16, allow_compile=False)
    moves: PackingKernels = choose_kernel("packed documents", context).functions
    table, news = [("attention", "; ".join(kernel_choice(device)))], ProgressLog()
    for shape in shapes or (SHAPES if device.type == "cuda" else SMALL_SHAPES):
        news(f"attention, {shape.name}")
        ways = contenders(shape, device, moves)
        inputs, grad = make_inputs(shape, device)
        runs = [partial(forward_backward, way, inputs, grad) for way in ways.values()]
        times = dict(zip(ways, median_ms(runs, device, repeat=repeat, warmup_s=warmup_s), strict=True))
        ours = times.pop("ours")
        text = f"{ours:.3f} ms, {_flops_text(shape, ours)}"
        text += "".join(f"; {name} {_flops_text(shape, ms)}: {ms / ours:.2f}x" for name, ms in times.items())
        table.append((f"attention {shape.name}", text))
        del inputs, grad, runs
    return table


def _flops_text(shape: AttentionShape, ms: float) -> str:
    return format_si(shape.flops / ms * 1e3, "FLOP/s")


def forward_backward(attention: AttentionFn, inputs: Sequence[Tensor], grad: Tensor) -> None:
    torch.autograd.grad(attention(*inputs), inputs, grad)


def make_inputs(shape: AttentionShape, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Returns queries, keys and values in the memory layout of a layer, and an output gradient."""
    rows, sequence = len(shape.document_lengths), sum(shape.document_lengths[0])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def make(heads: int, width: int) -> Tensor:
        return torch.randn(rows, sequence, heads, width, device=device, dtype=dtype).transpose(0, 1)

    keys, values = shape.head_dim, shape.value_dim or shape.head_dim
    kinds = ((shape.num_heads, keys), (shape.num_kv_heads, keys), (shape.num_kv_heads, values))
    return [make(*kind).requires_grad_() for kind in kinds], make(shape.num_heads, values)


def contenders(shape: AttentionShape, device: torch.device, row_kernels: PackingKernels) -> dict[str, AttentionFn]:
    """Ours first; the others are FlashAttention-2, and PyTorch's own choice where documents do not matter."""
    if all(len(row) == 1 for row in shape.document_lengths):
        return {"ours": attention, "scaled_dot_product_attention": _sdpa}
    starts = [np.repeat(np.cumsum((0, *row[:-1])), row) for row in shape.document_lengths]
    packed = Visibility(documents=Documents.build(np.stack(starts)).to(device))

    ways: dict[str, AttentionFn] = {
        "ours": lambda q, k, v: attention(q, k, v, packed, packing_kernels=row_kernels),
        "FlashAttention-2": lambda q, k, v: flash.varlen_attention(q, k, v, packed),
    }
    return ways if device.type == "cuda" else {"ours": ways["ours"]}


def kernel_choice(device: torch.device) -> tuple[str, str]:
    """Returns the kernel of plain and of packed attention in half precision, and why."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    kind = (device.type, capability, torch.bfloat16)
    others = "tiles" if flash.unsupported_reason(*kind) else "FlashAttention-2"
    reason = cudnn.unsupported_reason(*kind)
    if reason is None:
        return f"cuDNN, {others} for short documents and windows", "a Hopper GPU with cuDNN 9.15 or later"
    return f"PyTorch's choice, {others} for documents and windows", f"not cuDNN: {reason}"


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).permute(2, 0, 1, 3)
