"""Attention of chunks of prompts by bounds on the device, against the plain one in float64, and that against chunks of the host."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from petatron.kernels.attention import paged_attention as plain
from petatron.kernels.attention.paged_attention import ChunkBounds, KeyValue, PagedBatch, PromptChunk
from petatron.kernels.attention.visibility import Visibility

pytest.importorskip("triton")
from petatron.kernels.triton.attention import paged_attention
from tests.longform import diagonal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUNDS = {torch.float32: 2e-6, torch.float16: 1e-3} | ({torch.bfloat16: 4e-3} if DEVICE == "cuda" else {})
"""Norm of the difference over the norm. The interpreter multiplies the bits of bfloat16, not its numbers."""


@dataclass(frozen=True, slots=True)
class Case:
    """decodes: lengths of the sequences that decode. chunks: the rows of each, and its tokens before; padding: rows after all."""

    chunks: tuple[tuple[int, int], ...]
    decodes: tuple[int, ...] = ()
    heads: int = 4
    kv_heads: int = 2
    width: int = 16
    page: int = 16
    window: int | None = None
    padding: int = 3


CASES = [
    Case(((1, 0),)),
    Case(((5, 0), (0, 0), (70, 0), (3, 64), (0, 0))),
    Case(((33, 90), (40, 1)), decodes=(7, 65), heads=8, kv_heads=1, width=64),
    Case(((20, 0), (17, 33), (1, 5)), decodes=(70,), heads=3, kv_heads=3, width=24, page=8, padding=0),
    Case(((50, 80), (9, 0)), window=20),
    Case(((50, 80), (9, 0)), window=1),
    Case(((10, 129),), heads=40, kv_heads=2, width=24, page=1),
]


def batch_of(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, PagedBatch]:
    torch.manual_seed(0)
    lengths = [*case.decodes, *(rows + context for rows, context in case.chunks)]
    counts = [-(-length // case.page) for length in lengths]
    order = torch.randperm(sum(counts)) + 1  # page 0 is nobody's
    table = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32)
    for row, pages in zip(table, order.split(counts)):
        row[: len(pages)] = pages
    shape = (sum(counts) + 1, case.page, case.kv_heads, case.width)
    k, v = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(2))
    rows = torch.tensor([count for count, _ in case.chunks])
    total = len(case.decodes) + int(rows.sum()) + case.padding
    q = torch.randn(total, case.heads, case.width, device=DEVICE).to(dtype)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), rows.cumsum(0))).to(torch.int32)
    contexts = torch.tensor([context for _, context in case.chunks], dtype=torch.int32)
    batch = PagedBatch(
        torch.zeros(0),
        table.to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        max_length=max(case.decodes, default=0),
        num_decodes=len(case.decodes),
        chunk_bounds=ChunkBounds(starts.to(DEVICE), contexts.to(DEVICE)),
    )
    return q, k, v, batch


@diagonal(4)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_plain_one(case: Case, dtype: torch.dtype):
    q, k, v, batch = batch_of(case, dtype)
    true, found = torch.zeros_like(q, dtype=torch.float64), torch.full_like(q, 7.0)
    decodes = batch.num_decodes
    plain.chunk_attention(
        q[decodes:].double(), KeyValue(k.double(), v.double()), batch, true[decodes:], window=case.window
    )
    paged_attention.chunk_attention(q[decodes:], KeyValue(k, v), batch, found[decodes:], window=case.window)
    end = decodes + sum(rows for rows, _ in case.chunks)
    assert bool((found[:decodes] == 7.0).all() and (found[end:] == 7.0).all()), "rows of no chunk stay"
    error = (found[decodes:end].double() - true[decodes:end]).norm() / true.norm()
    assert float(error) < BOUNDS[dtype]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bounds_on_the_device_are_chunks_of_the_host(case: Case):
    """All of attention: keys and values stored, decodes beside chunks."""
    q, k, v, batch = batch_of(case, torch.float64)
    torch.manual_seed(1)
    new = [torch.randn(q.shape[0], case.kv_heads, case.width, device=DEVICE, dtype=torch.float64) for _ in range(2)]
    slots, chunks, row = [], [], batch.num_decodes
    places = [(number, length - 1) for number, length in enumerate(case.decodes)]
    for number, (rows, context) in enumerate(case.chunks, start=len(case.decodes)):
        places += [(number, context + each) for each in range(rows)]
        if rows:
            chunks.append(PromptChunk(row, row + rows, number, context))
        row += rows
    for number, position in places:
        page = int(batch.page_table_NP[number, position // case.page])
        slots.append(page * case.page + position % case.page)
    slots += [0] * case.padding
    batch = replace(batch, page_rows_T=torch.tensor(slots, device=DEVICE))
    found = plain.paged_attention(
        q, KeyValue(*new), KeyValue(k, v), batch, visibility=Visibility(window=case.window), kernels=plain
    )
    for chunk in chunks:
        host = replace(batch, chunk_bounds=None, chunks=(chunk,), computed={})
        wanted = plain.paged_attention(
            q, KeyValue(*new), KeyValue(k, v), host, visibility=Visibility(window=case.window), kernels=plain
        )
        for rows in (slice(0, batch.num_decodes), slice(chunk.start, chunk.stop)):
            torch.testing.assert_close(found[rows], wanted[rows], rtol=1e-12, atol=1e-12)
