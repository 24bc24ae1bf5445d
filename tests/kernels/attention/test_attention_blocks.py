"""Attention in blocks and tiles: windows, packed documents, merged partial results, dropout, and no dense mask."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from petatron.kernels.attention import attention, block_attention, flash
from petatron.kernels.attention.blockwise_attention import (
    AttentionBackwardInputs,
    PartialAttention,
    block_backward,
    zero_qkv_grads,
)
from petatron.kernels.attention.document_layout import Documents
from petatron.kernels.attention.tile_attention import AttentionDropout, TileRules, tile_backward, tile_forward
from petatron.kernels.attention.visibility import Visibility
from petatron.kernels.attention.visible_key_intervals import (
    BlockMask,
    MaskRectangle,
    VisibleKeys,
    mask_rectangles,
    mask_tiles,
)
from tests import reference_attention as reference

CPU = torch.device("cpu")


def starts_of(*rows: list[int]) -> Tensor:
    """Document starts [B, S] from the lengths of each row's documents."""
    filled = []
    for lengths in rows:
        begin, row = 0, []
        for length in lengths:
            row += [begin] * length
            begin += length
        filled.append(row)
    return torch.tensor(filled)


def inputs(
    length: int, heads: int, groups: int, width: int = 4, *, batch: int = 2, dtype=torch.float64
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length * 100 + heads * 10 + groups)
    shapes = [(length, batch, heads, width), (length, batch, groups, width), (length, batch, groups, width)]
    return [torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for shape in shapes]


def with_gradients(out: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out, *torch.autograd.grad((out * weights).sum(), tensors)]


def assert_same(ours: list[Tensor], wanted: list[Tensor], atol: float = 1e-11) -> None:
    for mine, true in zip(ours, wanted, strict=True):
        torch.testing.assert_close(mine, true, rtol=0, atol=atol)


def visible(mask: BlockMask, starts: Tensor | None, window: int | None) -> Tensor:
    """The dense mask [B, Q, T] that a block stands for, from first principles."""
    q = torch.tensor([p for run in mask.queries for p in run])[:, None]
    k = torch.tensor([p for run in mask.keys for p in run])
    seen = (k <= q)[None]
    if window is not None:
        seen = seen & (k > q - window)
    if starts is not None:
        seen = seen & (k >= starts[:, q.squeeze(1)][:, :, None])
    return seen


def bounds_of(length: int, window: int | None, starts: Tensor | None) -> VisibleKeys:
    documents = None if starts is None else Documents.of(starts)
    return VisibleKeys.of(Visibility(window=window, documents=documents), length, CPU)


@st.composite
def packings(draw: st.DrawFn, length: int) -> Tensor:
    """Two rows of documents."""
    rows = []
    for _ in range(2):
        cuts = draw(st.sets(st.integers(1, max(1, length - 1)), max_size=4)) if length > 1 else set()
        edges = [0, *sorted(cuts), length]
        rows.append([b - a for a, b in itertools.pairwise(edges)])
    return starts_of(*rows)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[BlockMask, Tensor | None, int | None, int]:
    """Any block of a sequence: some disjoint runs of queries, some of keys, any window, any documents, any tile."""
    length = draw(st.integers(1, 40))
    window = draw(st.none() | st.integers(1, length + 3))
    starts = draw(st.none() | packings(length))
    sides = []
    for _ in range(2):
        edges = sorted({0, length, *draw(st.sets(st.integers(0, length), max_size=4))})
        runs = [range(a, b) for a, b in itertools.pairwise(edges)]
        kept = draw(st.lists(st.sampled_from(runs), min_size=1, unique=True))
        sides.append(tuple(kept))
    if draw(st.booleans()):
        sides[1] = sides[0]
    mask = BlockMask(sides[0], sides[1], bounds_of(length, window, starts), tile_size=draw(st.integers(1, 9)))
    return mask, starts, window, length


@settings(max_examples=60, deadline=None)
@given(blocks())
def test_pieces_cover_what_is_seen_once(block):
    mask, starts, window, _ = block
    wanted = visible(mask, starts, window)
    covered = torch.zeros(wanted.shape[-2:], dtype=torch.int64)
    for piece in mask_rectangles(mask):
        part = wanted[:, piece.rows.start : piece.rows.stop, piece.columns.start : piece.columns.stop]
        assert part.any(), "a piece that nobody sees"
        covered[piece.rows.start : piece.rows.stop, piece.columns.start : piece.columns.stop] += 1
        if piece.kind == "full":
            assert part.all()
        elif piece.kind == "causal":
            assert (part == torch.ones(part.shape[-2:], dtype=torch.bool).tril()).all()
    assert covered.max() <= 1
    assert (covered[None].expand_as(wanted)[wanted] == 1).all()


@settings(max_examples=60, deadline=None)
@given(blocks())
def test_tiles_mask_what_is_not_seen(block):
    mask, starts, window, _ = block
    wanted = visible(mask, starts, window)
    batch = wanted.shape[0] if starts is None else starts.shape[0]
    wanted = wanted.expand(batch, -1, -1)
    found = torch.zeros_like(wanted)
    for piece in mask_rectangles(mask):
        for tile in mask_tiles(piece, mask, CPU):
            assert len(tile.rows) <= mask.tile_size and len(tile.columns) <= mask.tile_size
            seen = torch.ones(len(tile.rows), len(tile.columns), dtype=torch.bool)
            seen = seen if tile.masked_out is None else ~tile.masked_out
            found[:, tile.rows.start : tile.rows.stop, tile.columns.start : tile.columns.stop] = seen
    assert torch.equal(found, wanted)


def test_neighboring_full_pieces_are_one_call():
    """The three shapes of a zigzag ring step each cost one kernel call."""
    early, late, other_early, other_late = range(2, 4), range(12, 14), range(2), range(14, 16)
    here, there = (early, late), (other_early, other_late)
    assert mask_rectangles(BlockMask(here, here)) == [MaskRectangle("causal", range(4), range(4), 0, 0)]
    assert [(p.kind, p.rows, p.columns) for p in mask_rectangles(BlockMask(here, there))] == [
        ("full", range(4), range(2))
    ]
    assert [(p.kind, p.rows, p.columns) for p in mask_rectangles(BlockMask(there, here))] == [
        ("full", range(2, 4), range(4))
    ]


@pytest.mark.parametrize("starts", [None, starts_of([7, 23, 1, 9], [20, 20])])
@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("window", [None, 1, 6, 40])
def test_documents_and_windows_equal_reference(heads: int, groups: int, window: int | None, starts: Tensor | None):
    tensors = inputs(40, heads, groups)
    documents = None if starts is None else Documents.of(starts)
    ours = with_gradients(attention(*tensors, Visibility(window=window, documents=documents)), tensors)
    wanted = with_gradients(reference.attention(*tensors, window=window, document_starts_BS=starts), tensors)
    assert_same(ours, wanted)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40).flatmap(
        lambda length: st.tuples(
            st.just(length), st.none() | st.integers(1, length + 2), st.none() | packings(length), st.integers(1, 9)
        )
    ),
    st.sampled_from([(2, 2), (4, 2), (3, 1)]),
)
def test_any_tile_equals_reference(case, heads: tuple[int, int]):
    length, window, starts, tile = case
    tensors = inputs(length, *heads)
    whole = (range(length),)
    mask = BlockMask(whole, whole, bounds_of(length, window, starts), tile_size=tile)
    ours = with_gradients(block_attention(*tensors, mask), tensors)
    assert_same(ours, with_gradients(reference.attention(*tensors, window=window, document_starts_BS=starts), tensors))


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.sets(st.integers(1, 23), max_size=5),
    order=st.randoms(use_true_random=False),
    window=st.none() | st.integers(1, 24),
    starts=st.none() | packings(24),
)
def test_keys_met_in_any_order(cuts: set[int], order, window: int | None, starts: Tensor | None):
    """The result and the gradients over blocks of keys, one after the other, are those over all."""
    q, k, v = tensors = inputs(24, 4, 2)
    bounds = bounds_of(24, window, starts)
    edges = [0, *sorted(cuts), 24]
    runs = [range(a, b) for a, b in itertools.pairwise(edges)]
    order.shuffle(runs)
    partial = PartialAttention(q.detach(), value_width=4)
    for run in runs:
        mask = BlockMask((range(24),), (run,), bounds, tile_size=5)
        partial.attend_block(k.detach()[run.start : run.stop], v.detach()[run.start : run.stop], mask)
    out = reference.attention(*tensors, window=window, document_starts_BS=starts)
    grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    answered = AttentionBackwardInputs.of(
        q.detach(), out_SBHE=partial.out_SBHE, lse_BHS=partial.lse_BHS, grad_SBHE=grad
    )
    dq, dk, dv = zero_qkv_grads(q, k, v)
    order.shuffle(runs)
    for run in runs:
        rows = slice(run.start, run.stop)
        mask = BlockMask((range(24),), (run,), bounds, tile_size=5)
        block_backward(answered, k.detach()[rows], v.detach()[rows], mask, grads=(dq, dk[rows], dv[rows]))
    assert_same([partial.out_SBHE, dq, dk, dv], with_gradients(out, tensors))


def test_a_query_that_sees_nothing_stays_empty():
    q, k, v = (x.detach() for x in inputs(6, 2, 2))
    partial = PartialAttention(q, value_width=4)
    partial.attend_block(k[3:], v[3:], BlockMask((range(6),), (range(3, 6),), bounds_of(6, 2, None), tile_size=2))
    assert partial.lse_BHS[:, :, :3].isneginf().all() and partial.lse_BHS[:, :, 3:].isfinite().all()
    assert (partial.out_SBHE[:3] == 0).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1)])
def test_tile_and_kernel_agree(heads: int, groups: int, causal: bool):
    """PyTorch's kernel and the tile, from an output and a log-sum-exp over more keys than those of the block."""
    torch.manual_seed(1)
    q, grad, out = (torch.randn(2, heads, 9, 8, dtype=torch.float64) for _ in range(3))
    k, v = (torch.randn(2, groups, 9, 8, dtype=torch.float64) for _ in range(2))
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1) if causal else None
    assert flash.supports(q, v)
    theirs, ours = flash.forward(q, k, v, causal=causal), tile_forward(q, k, v, TileRules(hidden))
    assert_same(list(ours), list(theirs))
    lse, delta = ours[1] + 0.5, (grad * out).sum(-1)
    *mine, _ = tile_backward(grad, q, k, v, TileRules(hidden), lse_BHQ=lse, delta_BHQ=delta)
    assert_same(list(mine), list(flash.backward(grad, q, k, v, out=out, lse=lse, causal=causal)))


def test_values_may_have_another_width():
    """No kernel serves that; tiles do, for full and causal pieces too."""
    q, k, _ = inputs(20, 4, 2)
    v = torch.randn(20, 2, 2, 6, dtype=torch.float64, requires_grad=True)
    whole = (range(20),)
    ours = with_gradients(block_attention(q, k, v, BlockMask(whole, whole, tile_size=6)), [q, k, v])
    assert_same(ours, with_gradients(reference.attention(q, k, v), [q, k, v]))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 3e-6), (torch.bfloat16, 0.03)])
def test_lower_precisions(dtype: torch.dtype, bound: float):
    """Sums are kept in float32, so bfloat16 errs by its own rounding only."""
    starts = starts_of([7, 23, 1, 33], [30, 34])
    exact = [x.detach().to(dtype).to(torch.float64).requires_grad_() for x in inputs(64, 4, 2, 8)]
    rounded = [x.detach().to(dtype).requires_grad_() for x in exact]
    mask = BlockMask((range(64),), (range(64),), bounds_of(64, 20, starts), tile_size=7)
    ours = with_gradients(block_attention(*rounded, mask), rounded)
    wanted = with_gradients(reference.attention(*exact, window=20, document_starts_BS=starts), exact)
    for mine, true in zip(ours, wanted):
        assert mine.dtype == dtype
        assert (mine.to(torch.float64) - true).abs().max() <= bound * true.abs().max()


class TestDropout:
    """Weights are dropped in tiles, with masks drawn again in the backward pass."""

    def attend(self, tensors: list[Tensor], rate: float = 0.3, tile: int = 5) -> Tensor:
        mask = BlockMask((range(16),), (range(16),), bounds_of(16, 11, starts_of([9, 7], [16])), tile_size=tile)
        return block_attention(*tensors, mask, dropout=rate)

    def test_gradients_belong_to_the_weights_that_were_kept(self):
        tensors = inputs(16, 4, 2)

        def again(*values: Tensor) -> Tensor:
            torch.manual_seed(3)
            return self.attend(list(values))

        assert torch.autograd.gradcheck(again, tensors, fast_mode=True)

    def test_seed_decides(self):
        tensors = inputs(16, 4, 2)
        torch.manual_seed(3)
        first, second = self.attend(tensors), self.attend(tensors)
        torch.manual_seed(3)
        assert torch.equal(self.attend(tensors), first)
        assert not torch.equal(first, second)

    def test_each_weight_is_dropped_alone_and_as_often_as_asked(self):
        """With v the identity, the output of a query is its row of dropped weights."""
        length, batch, rate = 8, 1500, 0.3
        q, k = (torch.zeros(length, batch, 1, length, dtype=torch.float64) for _ in range(2))
        v = torch.eye(length, dtype=torch.float64)[:, None, None].expand(length, batch, 1, length)
        dropout, partial = AttentionDropout(rate, seed=0), PartialAttention(q, value_width=length)
        for run in (range(4), range(4, 8)):  # as blocks of keys come around a ring, in tiles of the same shape
            mask = BlockMask((range(length),), (run,), tile_size=2)
            partial.attend_block(k[run.start : run.stop], v[run.start : run.stop], mask, dropout=dropout)
        out = partial.out_SBHE[:, :, 0].transpose(0, 1)
        sees = torch.ones(length, length).tril().bool()
        dropped = (out == 0)[:, sees].to(torch.float64)
        assert (dropped.mean(0) - rate).abs().max() < 0.06
        kept = (out * torch.arange(1, length + 1)[:, None])[:, sees]
        torch.testing.assert_close(kept[kept != 0].mean(), torch.tensor(1 / (1 - rate), dtype=torch.float64))
        together = torch.corrcoef(dropped.t()) - torch.eye(dropped.shape[1], dtype=torch.float64)
        assert together.abs().max() < 0.15

    def test_none_is_drawn_without_a_rate(self):
        before = torch.get_rng_state()
        assert AttentionDropout.draw(0.0) is None
        assert torch.equal(torch.get_rng_state(), before)


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation has produced."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(x.numel() for x in _tensors(result))])
        return result


def _tensors(result: object) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple | list):
        for part in result:
            yield from _tensors(part)


@pytest.mark.parametrize(("window", "documents"), [(300, False), (None, True), (300, True), (None, False)])
def test_no_tensor_is_square_in_the_sequence(window: int | None, documents: bool):
    length = 4096
    tensors = [x.detach().to(torch.float32).requires_grad_() for x in inputs(length, 1, 1, 8, batch=1)]
    packed = Documents.of(starts_of([1000, 96, 1500, 1500])) if documents else None
    saved = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += tensor.numel()
        return tensor

    with Largest() as largest:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = attention(*tensors, Visibility(window=window, documents=packed))
        out.sum().backward()
    assert largest.elements <= 512 * 512, "larger than a tile"
    assert saved <= 4 * length * 8 + length + 2 * length


def test_work_follows_what_is_visible():
    """A window of 1/16 of the sequence costs a small part of it, and documents of 1/8 likewise."""
    length = 16384
    area = {
        name: sum(len(p.rows) * len(p.columns) / (2 if p.kind == "causal" else 1) for p in mask_rectangles(mask))
        for name, mask in {
            "all": BlockMask((range(length),), (range(length),)),
            "window": BlockMask((range(length),), (range(length),), bounds_of(length, 1024, None)),
            "documents": BlockMask((range(length),), (range(length),), bounds_of(length, None, starts_of([2048] * 8))),
        }.items()
    }
    assert area["window"] < 0.2 * area["all"]
    assert area["documents"] < 0.13 * area["all"]
