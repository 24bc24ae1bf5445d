"""Decode steps of latent attention that `petatron bench kernels` times: one token of each sequence, at DeepSeek-V3's widths.

Bytes are the minimum: the latent and the rotary key of every token read once, queries read and outputs written. With 128 heads on a rank
the GEMMs of a token are 242 FLOPs for each of its bytes, about as many as a Hopper GPU computes while it reads one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from petatron.bench.ops.kernel_case import BenchContext, KernelCase, MicroBatchShape
from petatron.kernels.attention import paged_latent_attention
from petatron.kernels.attention.paged_attention import PagedBatch
from petatron.kernels.attention.paged_latent_attention import LatentPages

_CHECKED_SEQUENCES = 4


@dataclass(frozen=True, slots=True)
class LatentDecodeShape:
    """A decode step of one rank: sequences of about one length, and the heads of the rank."""

    name: str
    num_sequences: int
    length: int
    num_heads: int
    latent: int
    rotary: int
    page_size: int
    head_dim: int

    def lengths(self) -> list[int]:
        """Returns the lengths of all sequences, some shorter than others.

        >>> SMALL_SHAPES[0].lengths()
        [40, 37, 34]
        """
        return [self.length - number * self.length // (4 * self.num_sequences) for number in range(self.num_sequences)]


SHAPES = (
    LatentDecodeShape("DeepSeek-V3, 128 heads, 64 x 4096 tokens", 64, 4096, 128, 512, 64, 64, 192),
    LatentDecodeShape("DeepSeek-V3, 16 heads, 64 x 4096 tokens", 64, 4096, 16, 512, 64, 64, 192),
    LatentDecodeShape("DeepSeek-V3, 128 heads, 1 x 32768 tokens", 1, 32768, 128, 512, 64, 64, 192),
    LatentDecodeShape("DeepSeek-V3, 16 heads, 1 x 32768 tokens", 1, 32768, 16, 512, 64, 64, 192),
)
SMALL_SHAPES = (LatentDecodeShape("small", 3, 40, 4, 32, 8, 4, 24),)


def latent_decode_cases(context: BenchContext, decoder_shape: MicroBatchShape, *, first: bool) -> Iterator[KernelCase]:
    """At shapes of its own, whatever those of the other operations are."""
    if not first:
        return
    for shape in SHAPES if context.device.type == "cuda" else SMALL_SHAPES:
        yield _case(context, shape)


def _case(context: BenchContext, shape: LatentDecodeShape) -> KernelCase:
    batch, count = _batch(context, shape), shape.num_sequences * -(-shape.length // shape.page_size) + 1
    pages = LatentPages(*(context.randn(count, shape.page_size, width) for width in (shape.latent, shape.rotary)))
    q = context.randn(shape.num_heads, shape.num_sequences, shape.latent).transpose(0, 1)
    q_rope = context.randn(shape.num_sequences, shape.num_heads, shape.rotary)
    options = {"scale": shape.head_dim**-0.5, "window": None}

    def exact() -> list[Tensor]:
        few = min(_CHECKED_SEQUENCES, shape.num_sequences)
        table = batch.page_table_NP[:few]
        first = replace(batch, page_table_NP=table, lengths_N=batch.lengths_N[:few], num_decodes=few, computed={})
        wide = LatentPages(pages.latent.double(), pages.rope_key.double())
        return [paged_latent_attention.decode_latents(q[:few].double(), q_rope[:few].double(), wide, first, **options)]

    read = sum(shape.lengths()) * (shape.latent + shape.rotary) + 2 * q.numel() + q_rope.numel()
    return KernelCase(
        label=f"latent decode, {shape.name}",
        implementations=context.implementations("paged latent attention"),
        call=lambda k: [k.decode_latents(q, q_rope, pages, batch, **options)],
        reference=exact,
        moved_bytes=read * q.itemsize,
    )


def _batch(context: BenchContext, shape: LatentDecodeShape) -> PagedBatch:
    """Pages of a sequence are in no order; page 0 is nobody's."""
    per_sequence = -(-shape.length // shape.page_size)
    order = torch.randperm(shape.num_sequences * per_sequence).to(torch.int32) + 1
    return PagedBatch(
        torch.zeros(0, device=context.device),
        order.view(shape.num_sequences, per_sequence).to(context.device),
        torch.tensor(shape.lengths(), dtype=torch.int32, device=context.device),
        max_length=shape.length,
        num_decodes=shape.num_sequences,
    )
