"""The Triton decode of latent attention over pages against its plain twin in float64: lengths, pages, heads, widths, windows, splits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from petatron.kernels.attention import paged_latent_attention as plain
from petatron.kernels.attention.paged_attention import PagedBatch
from petatron.kernels.attention.paged_latent_attention import LatentPages, LatentUpProjection, PagedLatentKernels
from petatron.kernels.attention.visibility import CAUSAL
from tests.longform import diagonal, later, one_in

pytest.importorskip("triton")
from petatron.kernels.triton.attention import paged_latent_attention, split_kv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUNDS = {torch.float32: 2e-6, torch.float16: 1e-3} | ({torch.bfloat16: 5e-3} if DEVICE == "cuda" else {})
"""Norm of the difference over the norm. The interpreter multiplies the bits of bfloat16, not its numbers."""


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch):
    """The interpreter runs them one by one: three splits or fewer instead of 64, of 32 tokens or more."""
    if DEVICE == "cpu":
        monkeypatch.setattr(split_kv, "_MAX_SPLITS", 3)
        monkeypatch.setattr(paged_latent_attention, "_MIN_SPLIT_TOKENS", 32)


@dataclass(frozen=True, slots=True)
class Case:
    lengths: tuple[int, ...]
    heads: int = 4
    latent: int = 32
    rotary: int = 16
    page: int = 16
    window: int | None = None


CASES = [
    Case((1,)),
    Case((1, 5, 32, 33, 130)),
    Case((16, 17, 15), page=16, latent=64),
    Case((70, 3), heads=20, latent=12, rotary=4, page=8),
    Case((100, 20), window=40),
    Case((100, 64, 65), window=1),
    Case((40,), heads=33, latent=80, rotary=8, page=1),
]


def inputs_of(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, LatentPages, PagedBatch]:
    """Absorbed queries are views, as those of a layer are; pages of a sequence are in any order, and page 0 is nobody's."""
    torch.manual_seed(0)
    counts = [-(-length // case.page) for length in case.lengths]
    order = torch.randperm(sum(counts)) + 1
    table = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32)
    for row, pages in zip(table, order.split(counts)):
        row[: len(pages)] = pages
    latent, rope_key = (
        torch.randn(sum(counts) + 1, case.page, width, device=DEVICE).to(dtype) for width in (case.latent, case.rotary)
    )
    q = torch.randn(case.heads, len(counts), case.latent, device=DEVICE).to(dtype).transpose(0, 1)
    q_rope = torch.randn(len(counts), case.heads, 3 + case.rotary, device=DEVICE).to(dtype)[..., 3:]
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    batch = PagedBatch(
        torch.zeros(0), table.to(DEVICE), lengths.to(DEVICE), max_length=max(case.lengths), num_decodes=len(counts)
    )
    return q, q_rope, LatentPages(latent, rope_key), batch


def truth(q: Tensor, q_rope: Tensor, pages: LatentPages, batch: PagedBatch, window: int | None) -> Tensor:
    exact = LatentPages(pages.latent.double(), pages.rope_key.double())
    fresh = replace(batch, computed={})
    return plain.decode_latents(q.double(), q_rope.double(), exact, fresh, scale=0.3, window=window)


def far(found: Tensor, true: Tensor) -> float:
    return float((found.double() - true).norm() / true.norm())


KINDS = [(case, torch.float32) for case in CASES] + [
    each for dtype in BOUNDS if dtype != torch.float32 for each in one_in(4, [(case, dtype) for case in CASES[1:]])
]


@diagonal(3)
@pytest.mark.parametrize(("case", "dtype"), KINDS, ids=str)
def test_equals_the_gathered_one(case: Case, dtype: torch.dtype):
    q, q_rope, pages, batch = inputs_of(case, dtype)
    found = paged_latent_attention.decode_latents(q, q_rope, pages, batch, scale=0.3, window=case.window)
    assert found.dtype == dtype and found.shape == q.shape
    assert far(found, truth(q, q_rope, pages, batch, case.window)) < BOUNDS[dtype]


@diagonal(2)
@pytest.mark.parametrize(
    ("name", "splits"),
    [
        ("_HEADS_16", 3),
        ("_HEADS_32", 3),
        ("_HEADS_64", 1),
        later("_HEADS_16", 1),
        later("_HEADS_32", 1),
        later("_HEADS_64", 3),
    ],
)
def test_every_blocking_of_heads_computes_the_same(name: str, splits: int, monkeypatch: pytest.MonkeyPatch):
    """On a CPU all in float16, whichever of them a GPU would take for 40 heads."""
    q, q_rope, pages, batch = inputs_of(Case((200, 31), heads=40), torch.float16)
    monkeypatch.setattr(paged_latent_attention, "_blocking", lambda q: getattr(paged_latent_attention, name))
    monkeypatch.setattr(split_kv, "_MAX_SPLITS", splits)
    found = paged_latent_attention.decode_latents(q, q_rope, pages, batch, scale=0.3, window=None)
    assert far(found, truth(q, q_rope, pages, batch, None)) < BOUNDS[torch.float16]


@pytest.mark.parametrize(
    ("heads", "dtype", "name"),
    [(3, torch.float16, "_HEADS_16"), (17, torch.float16, "_HEADS_32"), (16, torch.float32, "_FLOAT32")],
)
def test_blocks_follow_from_the_heads_of_a_rank(heads: int, dtype: torch.dtype, name: str):
    assert paged_latent_attention._blocking(torch.zeros(1, heads, 8, dtype=dtype)) == getattr(
        paged_latent_attention, name
    )


def test_heads_of_two_ranks_are_those_of_one():
    """A tensor-parallel rank has some heads, and pages of its own that are the same."""
    q, q_rope, pages, batch = inputs_of(Case((50, 9), heads=6), torch.float32)
    whole = paged_latent_attention.decode_latents(q, q_rope, pages, batch, scale=0.3, window=None)
    shards = [
        paged_latent_attention.decode_latents(a, b, pages, batch, scale=0.3, window=None)
        for a, b in zip(q.chunk(2, dim=1), q_rope.chunk(2, dim=1), strict=True)
    ]
    torch.testing.assert_close(torch.cat(shards, dim=1), whole, rtol=1e-5, atol=1e-6)


def test_rows_of_others_are_not_read():
    case = Case((20, 7))
    q, q_rope, pages, batch = inputs_of(case, torch.float32)
    before = paged_latent_attention.decode_latents(q, q_rope, pages, batch, scale=0.3, window=None)
    used = set(batch.page_table_NP[0, :2].tolist()) | set(batch.page_table_NP[1, :1].tolist())
    for rows in (pages.latent, pages.rope_key):
        rows[sorted(set(range(rows.shape[0])) - used)] = float("nan")
        rows[int(batch.page_table_NP[1, 0]), 7:] = float("nan")
    assert torch.equal(paged_latent_attention.decode_latents(q, q_rope, pages, batch, scale=0.3, window=None), before)


def test_what_shares_the_batch_changes_no_bit():
    """With as many splits: they follow from the number of sequences."""
    q, q_rope, pages, batch = inputs_of(Case((90, 5, 40)), torch.float32)
    other = replace(batch, lengths_N=batch.lengths_N.clone())
    other.lengths_N[1:] = 1
    whole, changed = (
        paged_latent_attention.decode_latents(q, q_rope, pages, each, scale=0.3, window=None)[0]
        for each in (batch, other)
    )
    assert torch.equal(whole, changed)


def test_latents_too_wide_for_registers_are_gathered():
    q, q_rope, pages, batch = inputs_of(Case((9,), latent=520, rotary=4), torch.float32)
    found = paged_latent_attention.decode_latents(q, q_rope, pages, batch, scale=0.3, window=None)
    same = plain.decode_latents(q, q_rope, pages, replace(batch, computed={}), scale=0.3, window=None)
    assert torch.equal(found, same)


@pytest.mark.parametrize("slots", [torch.int32, torch.int64])
def test_rows_are_stored(slots: torch.dtype):
    found, true = (LatentPages(torch.zeros(4, 4, 12, device=DEVICE), torch.zeros(4, 4, 6, device=DEVICE)) for _ in "ab")
    rows = torch.randn(3, 18, device=DEVICE)  # both are columns of one GEMM's output
    at = torch.tensor([5, 15, 4], device=DEVICE, dtype=slots)
    paged_latent_attention.store_latents(found, rows[:, :12], rows[:, 12:], at)
    plain.store_latents(true, rows[:, :12], rows[:, 12:], at)
    assert torch.equal(found.latent, true.latent) and torch.equal(found.rope_key, true.rope_key)
    assert bool(true.latent.any()) and bool(true.rope_key.any())


def test_rows_of_one_sequence_see_each_other():
    """Drafts: three tokens of one sequence, the last first; each sees those before it, which the same step stores."""
    case, heads, nope, value = Case((40,)), 3, 5, 7
    _, _, pages, batch = inputs_of(case, torch.float32)
    up = LatentUpProjection.of(
        torch.randn(heads * (nope + value), case.latent, device=DEVICE), nope_dim=nope, v_dim=value
    )
    table, lengths = batch.page_table_NP.repeat(3, 1), torch.tensor([40, 39, 38], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([int(table[0, (n - 1) // 16]) * 16 + (n - 1) % 16 for n in lengths.tolist()], device=DEVICE)
    queries = torch.randn(3, heads, nope + case.rotary, device=DEVICE)
    new_latent, new_rope = (rows.flatten(0, 1)[slots] for rows in (pages.latent, pages.rope_key))
    rows = replace(batch, page_rows_T=slots, page_table_NP=table, lengths_N=lengths, num_decodes=3, shares_pages=True)
    both: tuple[PagedLatentKernels, ...] = (plain, paged_latent_attention)
    true, found = (
        plain.paged_latent_attention(
            queries, new_latent, new_rope, pages, replace(rows, computed={}), up=up, visibility=CAUSAL, kernels=kernels
        )
        for kernels in both
    )
    assert far(found, true.double()) < BOUNDS[torch.float32]
