"""The Triton decode attention over pages against its plain twin in float64: groups, widths, windows, page sizes, splits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from petatron.kernels.attention import paged_attention as plain
from petatron.kernels.attention.paged_attention import KeyValue, PagedBatch
from petatron.kernels.attention.visibility import CAUSAL

pytest.importorskip("triton")
from petatron.kernels.triton.attention import paged_attention, split_kv
from tests.longform import diagonal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUNDS = {torch.float32: 2e-6, torch.float16: 1e-3} | ({torch.bfloat16: 4e-3} if DEVICE == "cuda" else {})
"""Norm of the difference over the norm. The interpreter multiplies the bits of bfloat16, not its numbers."""


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch):
    """The interpreter runs them one by one: three splits or fewer instead of 64."""
    if DEVICE == "cpu":
        monkeypatch.setattr(split_kv, "_MAX_SPLITS", 3)


@dataclass(frozen=True, slots=True)
class Case:
    lengths: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    width: int = 16
    page: int = 16
    window: int | None = None


CASES = [
    Case((1,)),
    Case((1, 5, 64, 65, 130)),
    Case((200, 3), heads=8, kv_heads=1, width=64),
    Case((70, 33), heads=3, kv_heads=3, width=80, page=8),
    Case((150, 20), window=40),
    Case((150, 64, 65), window=1),
    Case((129,), heads=40, kv_heads=2, width=24, page=1),
]


def batch_of(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, PagedBatch]:
    torch.manual_seed(0)
    counts = [-(-length // case.page) for length in case.lengths]
    order = torch.randperm(sum(counts)) + 1  # page 0 is nobody's
    table = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32)
    for row, pages in zip(table, order.split(counts)):
        row[: len(pages)] = pages
    shape = (sum(counts) + 1, case.page, case.kv_heads, case.width)
    k, v = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(2))
    q = torch.randn(len(counts), case.heads, case.width, device=DEVICE).to(dtype)
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    batch = PagedBatch(
        torch.zeros(0), table.to(DEVICE), lengths.to(DEVICE), max_length=max(case.lengths), num_decodes=len(counts)
    )
    return q, k, v, batch


@diagonal(4)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_plain_one(case: Case, dtype: torch.dtype):
    q, k, v, batch = batch_of(case, dtype)
    true = plain.decode_attention(q.double(), KeyValue(k.double(), v.double()), batch, window=case.window)
    found = paged_attention.decode_attention(q, KeyValue(k, v), batch, window=case.window)
    assert found.dtype == dtype and found.shape == q.shape
    assert float((found.double() - true).norm() / true.norm()) < BOUNDS[dtype]


@diagonal(3)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_new_token_is_stored_and_seen(case: Case):
    """Its row in the pages holds no number before."""
    q, k, v, batch = batch_of(case, torch.float32)
    last = [(int(row[(n - 1) // case.page]), (n - 1) % case.page) for row, n in zip(batch.page_table_NP, case.lengths)]
    new = [torch.stack([pages[at] for at in last]) for pages in (k, v)]
    true = plain.decode_attention(q.double(), KeyValue(k.double(), v.double()), batch, window=case.window)
    wanted = [pages.clone() for pages in (k, v)]
    for pages in (k, v):
        for at in last:
            pages[at] = float("nan")
    strided = [x.repeat(1, 2, 1)[:, : case.kv_heads] for x in new]
    found = paged_attention.store_and_decode(q, KeyValue(*strided), KeyValue(k, v), batch, window=case.window)
    assert float((found.double() - true).norm() / true.norm()) < BOUNDS[torch.float32]
    assert torch.equal(k, wanted[0]) and torch.equal(v, wanted[1])
    again = paged_attention.decode_attention(q, KeyValue(k, v), batch, window=case.window)
    assert torch.equal(again, found)


def test_pages_of_others_are_not_read():
    case = Case((20, 7))
    q, k, v, batch = batch_of(case, torch.float32)
    used = set(batch.page_table_NP[0, :2].tolist()) | set(batch.page_table_NP[1, :1].tolist())
    before = paged_attention.decode_attention(q, KeyValue(k, v), batch, window=None)
    for page in set(range(k.shape[0])) - used:
        k[page], v[page] = float("nan"), float("nan")
    last = int(batch.page_table_NP[1, 0])
    k[last, 7:], v[last, 7:] = float("nan"), float("nan")
    assert torch.equal(paged_attention.decode_attention(q, KeyValue(k, v), batch, window=None), before)


def test_what_shares_the_batch_changes_no_bit():
    """With as many splits: they follow from the number of sequences."""
    q, k, v, batch = batch_of(Case((90, 5, 40)), torch.float32)
    other = replace(batch, lengths_N=batch.lengths_N.clone())
    other.lengths_N[1:] = 1
    whole, changed = (
        paged_attention.decode_attention(q, KeyValue(k, v), each, window=None)[0] for each in (batch, other)
    )
    assert torch.equal(whole, changed)


@pytest.mark.parametrize("strided", [False, True])
def test_rows_are_stored(strided: bool):
    torch.manual_seed(1)
    found = [torch.zeros(4, 4, 3, 5, device=DEVICE) for _ in range(2)]
    true = [pages.clone() for pages in found]
    k, v = (torch.randn(3, 5, 3, device=DEVICE).transpose(1, 2) for _ in range(2))
    if not strided:
        k, v = k.contiguous(), v.contiguous()
    slots = torch.tensor([5, 15, 4], device=DEVICE)
    paged_attention.store_key_value(KeyValue(*found), KeyValue(k, v), slots)
    plain.store_key_value(KeyValue(*true), KeyValue(k, v), slots)
    assert all(torch.equal(a, b) for a, b in zip(found, true)) and bool(true[0].any())


def test_rows_of_one_sequence_see_each_other():
    """Drafts: three tokens of one sequence, the last first, so that none is stored before a later one attends unless all are."""
    q, k, v, batch = batch_of(Case((40,)), torch.float32)
    table, lengths = batch.page_table_NP.repeat(3, 1), torch.tensor([40, 39, 38], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([int(table[0, (n - 1) // 16]) * 16 + (n - 1) % 16 for n in lengths.tolist()], device=DEVICE)
    queries = torch.cat((q, 2 * q, -q))
    new = [pages.flatten(0, 1)[slots] for pages in (k, v)]
    rows = replace(batch, page_rows_T=slots, page_table_NP=table, lengths_N=lengths, num_decodes=3, computed={})
    true = plain.decode_attention(queries, KeyValue(k, v), rows, window=None)
    for pages in (k, v):
        pages.flatten(0, 1)[slots] = float("nan")
    rows = replace(rows, shares_pages=True, computed={})
    found = plain.paged_attention(
        queries, KeyValue(*new), KeyValue(k, v), rows, visibility=CAUSAL, kernels=paged_attention
    )
    assert float((found - true).norm() / true.norm()) < BOUNDS[torch.float32]
