"""Decode of latent attention on a CUDA device against float64, at DeepSeek's widths: shards of heads, lengths, windows, graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from petatron.kernels.attention import paged_latent_attention as plain
from petatron.kernels.attention.paged_attention import PagedBatch
from petatron.kernels.attention.paged_latent_attention import LatentPages
from petatron.kernels.registry import KernelContext, choose_kernel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BOUNDS = {torch.float32: 4e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}
"""Norm of the difference over the norm; softmax weights are rounded to half precision once, as is the output."""
LATENT, ROTARY, SCALE = 512, 64, 192**-0.5
RAGGED = (1, 64, 65, 4097, 1000, 31)


def kernels(dtype: torch.dtype) -> Any:
    context = KernelContext.of(torch.device("cuda"), dtype, allow_compile=False)
    choice = choose_kernel("paged latent attention", context)
    assert choice.name == "triton", str(choice)
    return choice.functions


def batch_of(lengths: tuple[int, ...], page: int, *, first_page: int = 1) -> PagedBatch:
    counts = [-(-length // page) for length in lengths]
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, pages in zip(table, (torch.randperm(sum(counts)) + first_page).split(counts)):
        row[: len(pages)] = pages
    tensor = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    return PagedBatch(torch.zeros(0), table.cuda(), tensor, max_length=max(lengths), num_decodes=len(lengths))


def draw(batch: PagedBatch, page: int, heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, LatentPages]:
    count, num_pages = batch.num_decodes, int(batch.page_table_NP.max()) + 1
    q = torch.randn(heads, count, LATENT, device="cuda").to(dtype).transpose(0, 1)  # as a batched GEMM leaves it
    q_rope = torch.randn(count, heads, 128 + ROTARY, device="cuda").to(dtype)[..., 128:]
    latent, rope_key = (torch.randn(num_pages, page, width, device="cuda").to(dtype) for width in (LATENT, ROTARY))
    return q, q_rope, LatentPages(latent, rope_key)


def truth(q: Tensor, q_rope: Tensor, pages: LatentPages, batch: PagedBatch, window: int | None) -> Tensor:
    rows = []
    for number, length in enumerate(batch.lengths_N.tolist()):
        table = batch.page_table_NP[number, : -(-length // pages.latent.shape[1])]
        first = 0 if window is None else max(length - window, 0)
        c, r = (each[table].flatten(0, 1)[first:length].double() for each in (pages.latent, pages.rope_key))
        scores = (q[number].double() @ c.T + q_rope[number].double() @ r.T) * SCALE
        rows.append(scores.softmax(-1) @ c)
    return torch.stack(rows)


def far(ours: Tensor, true: Tensor) -> float:
    assert ours.shape == true.shape and ours.isfinite().all()
    return float((ours.double() - true).norm() / true.norm())


@pytest.mark.parametrize("heads", [1, 16, 24, 32, 64, 100, 128])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_every_shard_of_heads(dtype: torch.dtype, heads: int):
    batch = batch_of(RAGGED, 16)
    q, q_rope, pages = draw(batch, 16, heads, dtype)
    found = kernels(dtype).decode_latents(q, q_rope, pages, batch, scale=SCALE, window=None)
    assert far(found, truth(q, q_rope, pages, batch, None)) <= BOUNDS[dtype]


@pytest.mark.parametrize("lengths", [(1,), (9000,), (77,) * 300], ids=["one token", "one sequence", "many"])
@pytest.mark.parametrize(("page", "window"), [(64, None), (16, 700), (24, 1)])
def test_splits_pages_and_windows(lengths: tuple[int, ...], page: int, window: int | None):
    batch = batch_of(lengths, page)
    q, q_rope, pages = draw(batch, page, 128, torch.bfloat16)
    found = kernels(torch.bfloat16).decode_latents(q, q_rope, pages, batch, scale=SCALE, window=window)
    assert far(found, truth(q, q_rope, pages, batch, window)) <= BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("heads", [16, 128])
def test_pages_beyond_two_to_the_31_elements(heads: int):
    page, first_page = 64, 2**31 // (64 * LATENT) + 5
    batch = batch_of((130, 64), page, first_page=first_page)
    shape = (first_page + 5, page)
    pages = LatentPages(
        *(torch.empty(*shape, width, device="cuda", dtype=torch.bfloat16) for width in (LATENT, ROTARY))
    )
    for rows in (pages.latent, pages.rope_key):
        rows[first_page:].normal_()
    q, q_rope, _ = draw(batch_of((1, 1), page), page, heads, torch.bfloat16)
    found = kernels(torch.bfloat16)
    slot = int(batch.page_table_NP[0, 2]) * page + 1  # of the first sequence's last token
    new = torch.randn(1, LATENT + ROTARY, device="cuda", dtype=torch.bfloat16)
    found.store_latents(pages, new[:, :LATENT], new[:, LATENT:], torch.tensor([slot], device="cuda"))
    assert torch.equal(pages.latent.flatten(0, 1)[slot], new[0, :LATENT])
    assert torch.equal(pages.rope_key.flatten(0, 1)[slot], new[0, LATENT:])
    ours = found.decode_latents(q, q_rope, pages, batch, scale=SCALE, window=None)
    assert far(ours, truth(q, q_rope, pages, batch, None)) <= BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("heads", [16, 128])
def test_a_graph_replays_for_other_lengths(heads: int):
    """Lengths and page tables are read on the device; what depends on them is not the grid."""
    found, batch = kernels(torch.bfloat16), batch_of((700, 700, 700), 16)
    q, q_rope, pages = draw(batch, 16, heads, torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found.decode_latents(q, q_rope, pages, batch, scale=SCALE, window=None)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = found.decode_latents(q, q_rope, pages, batch, scale=SCALE, window=None)
    for lengths in ((700, 1, 333), (2, 699, 64)):
        batch.lengths_N.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        assert far(out, truth(q, q_rope, pages, batch, None)) <= BOUNDS[torch.bfloat16]


def test_the_fallback_is_the_gathered_one():
    batch = batch_of((40, 3), 16)
    q, q_rope = torch.randn(2, 4, 600, device="cuda"), torch.randn(2, 4, 16, device="cuda")
    num_pages = int(batch.page_table_NP.max()) + 1
    pages = LatentPages(torch.randn(num_pages, 16, 600, device="cuda"), torch.randn(num_pages, 16, 16, device="cuda"))
    found = kernels(torch.float32).decode_latents(q, q_rope, pages, batch, scale=SCALE, window=None)
    batch.computed.clear()
    assert torch.equal(found, plain.decode_latents(q, q_rope, pages, batch, scale=SCALE, window=None))
