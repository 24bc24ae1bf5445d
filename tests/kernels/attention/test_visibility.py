"""Everything that a `Visibility` can say, against a dense mask made for every pair of tokens, in float64, with gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from petatron.base.errors import DataError
from petatron.kernels.attention import (
    KERNELS,
    AttentionCall,
    attention,
    block_attention,
    chosen_kernel,
    paged_attention,
)
from petatron.kernels.attention.document_layout import PADDING_DOCUMENT, Documents, KeySpans
from petatron.kernels.attention.paged_attention import KeyValue, PagedBatch, PromptChunk
from petatron.kernels.attention.score_modifiers import ScoreRules
from petatron.kernels.attention.visibility import CAUSAL, EVERYTHING, Visibility, VisibilityKind
from petatron.kernels.attention.visible_key_intervals import BlockMask, VisibleKeys
from tests import reference_attention as reference
from tests.longform import diagonal

S, B, HEADS, GROUPS, E = 18, 2, 4, 2, 4
CPU = torch.device("cpu")
LENGTHS = {
    "none": ([18], [18]),
    "packed": ([5, 1, 12], [11, 7]),
    "padded": ([13, -5], [18]),
    "packed and padded": ([-2, 6, 7, -3], [4, 9, -5]),
}
"""Documents of each row; padding is negative."""
PREFIXES = (4, 9)
"""Tokens of the prefix of every document of a row, at most."""


def segments_of(name: str) -> tuple[Tensor, Tensor]:
    """A number for each document, and which tokens are padding; padding is shorter than what it is cut into."""

    def spread(row: list[int], value: Callable[[int, int], int]) -> list[int]:
        return [value(number, size) for number, size in enumerate(row) for _ in range(abs(size))]

    segments, padding = (
        [spread(row, value) for row in LENGTHS[name]] for value in (lambda n, _: n, lambda _, size: size < 0)
    )
    return torch.tensor(segments), torch.tensor(padding)


def prefix_of(name: str) -> Tensor:
    segments, padding = segments_of(name)
    marks = torch.zeros_like(padding)
    for row, most in enumerate(PREFIXES):
        for i, segment in enumerate(segments[row].tolist()):
            marks[row, i] = i - segments[row].tolist().index(segment) < most and not padding[row, i]
    return marks


def documents_of(name: str, *, prefix: bool = False) -> Documents | None:
    if name == "none" and not prefix:
        return None
    segments, padding = segments_of(name)
    rows = zip(segments.tolist(), padding.tolist())
    starts = [[0 if is_padding else row.index(n) for n, is_padding in zip(row, marks)] for row, marks in rows]
    in_prefix = prefix_of(name).numpy() if prefix else None
    return Documents.build(np.array(starts), is_padding_BS=padding.numpy(), in_prefix_BS=in_prefix)


def inputs(keys: int = S, *, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(S, B, HEADS, E), (keys, B, GROUPS, E), (keys, B, GROUPS, E)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]


def with_gradients(out: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(7))
    return [out, *torch.autograd.grad(out, tensors, grad)]


def check(ours: Tensor, wanted: list[Tensor], tensors: list[Tensor]) -> None:
    for found, true in zip(with_gradients(ours, tensors), wanted, strict=True):
        torch.testing.assert_close(found, true, rtol=0, atol=1e-12)


def tiled(visibility: Visibility, keys: int = S, *, tile: int = 5, keep_positions: bool = False) -> BlockMask:
    visible = VisibleKeys.of(visibility, S, CPU)
    return BlockMask((range(S),), (range(keys),), visible, tile_size=tile, keep_positions=keep_positions)


@cache
def seen(kind: str, packing: str, window: int | None, chunk: int | None, first_k: int) -> Tensor:
    segments, _ = segments_of(packing)
    sizes = {"window": window, "chunk": chunk, "first_k": first_k}
    return reference.visible(kind, segments, **sizes, in_prefix_BS=prefix_of(packing))


@diagonal(3)
@pytest.mark.parametrize("packing", LENGTHS)
@pytest.mark.parametrize("kind", ["causal", "full", "prefix"])
def test_every_combination_is_that_of_the_dense_mask(kind: VisibilityKind, packing: str):
    tensors, documents = inputs(), documents_of(packing, prefix=kind == "prefix")
    for window, chunk, first_k in itertools.product((None, 4), (None, 7), (0, 2)):
        visibility = Visibility(kind, window, chunk, first_k).of_batch(documents)
        wanted = with_gradients(
            reference.masked_attention(*tensors, seen(kind, packing, window, chunk, first_k)), tensors
        )
        check(attention(*tensors, visibility), wanted, tensors)
        check(block_attention(*tensors, tiled(visibility)), wanted, tensors)


@pytest.mark.parametrize("keys", [7, 18, 23])
def test_cross_attention_sees_the_keys_of_another_sequence(keys: int):
    tensors = inputs(keys)
    everything = torch.ones(B, S, keys, dtype=torch.bool)
    wanted = with_gradients(reference.masked_attention(*tensors, everything), tensors)
    check(attention(*tensors, Visibility.cross()), wanted, tensors)
    check(block_attention(*tensors, tiled(Visibility.cross(), keys)), wanted, tensors)


@pytest.mark.parametrize("lengths", [(7, 3), (0, 7), (1, 1)])
def test_cross_attention_to_padded_keys(lengths: tuple[int, int]):
    """A row without keys has zeros as its output, and zero gradients."""
    tensors = inputs(7)
    visibility = Visibility.cross().of_batch(None, KeySpans.of_lengths(torch.tensor(lengths), S))
    visible = torch.arange(7) < torch.tensor(lengths)[:, None, None].expand(B, S, 1)
    wanted = with_gradients(reference.masked_attention(*tensors, visible), tensors)
    check(attention(*tensors, visibility), wanted, tensors)
    check(block_attention(*tensors, tiled(visibility, 7, tile=3)), wanted, tensors)


def test_cross_attention_pairs_packed_documents():
    """The third document of the first row has no keys, and the keys of the second row end with padding."""
    queries = Documents.of(torch.tensor([[0] * 5 + [5] * 6 + [11] * 7, [0] * 10 + [10] * 8]))
    padding = np.array([[False] * 7, [False] * 5 + [True] * 2])
    keys = Documents.build(np.array([[0] * 3 + [3] * 4, [0] * 2 + [2] * 5]), is_padding_BS=padding)
    visible = torch.zeros(B, S, 7, dtype=torch.bool)
    for row, rows, columns in ((0, (0, 5), (0, 3)), (0, (5, 11), (3, 7)), (1, (0, 10), (0, 2)), (1, (10, 18), (2, 5))):
        visible[row, slice(*rows), slice(*columns)] = True
    tensors = inputs(7)
    visibility = Visibility.cross().of_batch(None, KeySpans.of_documents(queries, keys))
    wanted = with_gradients(reference.masked_attention(*tensors, visible), tensors)
    check(attention(*tensors, visibility), wanted, tensors)


@pytest.mark.parametrize("kind", ["causal", "full", "prefix"])
@pytest.mark.parametrize(("softcap", "has_sinks", "distances"), [(None, False, 35), (0.8, True, 35), (None, False, 9)])
def test_biases_by_distance(kind: VisibilityKind, softcap: float | None, has_sinks: bool, distances: int):
    """With gradients of the table; a table of few distances holds for those beyond."""
    generator = torch.Generator().manual_seed(3)
    bias = torch.randn(HEADS, distances, dtype=torch.float64, generator=generator).requires_grad_()
    sinks = torch.randn(HEADS, dtype=torch.float64, generator=generator).requires_grad_() if has_sinks else None
    tensors, documents = inputs(), documents_of("packed", prefix=True)
    leaves = [*tensors, bias, *([] if sinks is None else [sinks])]
    visibility = Visibility(kind, window=7, bias="relative").of_batch(documents)
    rules = ScoreRules(softcap, sinks, bias)
    dense = seen(kind, "packed", 7, None, 0)
    ruled = {"softcap": softcap, "sinks_H": sinks, "bias_HD": bias}
    wanted = with_gradients(reference.masked_attention(*tensors, dense, **ruled), leaves)
    check(attention(*tensors, visibility, rules=rules), wanted, leaves)
    check(block_attention(*tensors, tiled(visibility, keep_positions=True), rules=rules), wanted, leaves)


def test_linear_biases_in_both_directions():
    """ALiBi of an encoder: the slope of a head times the distance, whichever comes first."""
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.7], dtype=torch.float64)
    bias, tensors = -slopes[:, None] * (torch.arange(2 * S - 1) - S + 1).abs(), inputs()
    q, k, v = tensors
    scores = torch.einsum("sbhe,tbhe->bhst", q, k.repeat_interleave(2, dim=2)) * E**-0.5
    scores = scores - slopes[:, None, None] * (torch.arange(S)[:, None] - torch.arange(S)).abs()
    wanted = torch.einsum("bhst,tbhe->sbhe", scores.softmax(-1), v.repeat_interleave(2, dim=2))
    check(
        attention(*tensors, Visibility.full(), rules=ScoreRules(bias_HD=bias)), with_gradients(wanted, tensors), tensors
    )


def test_padding_changes_nothing_for_the_tokens_of_a_sample():
    """A padded sample has the outputs and gradients that it has alone; padding has no gradient if the loss leaves it out."""
    tensors = inputs()
    out = attention(*tensors, Visibility.full().of_batch(Documents.of_lengths(np.array([13, 18]), S)))
    weights = torch.linspace(-1, 1, out[:13, 0].numel(), dtype=out.dtype).view(out[:13, 0].shape)
    grads = torch.autograd.grad((out[:13, 0] * weights).sum(), tensors)
    alone = [x[:13, :1].detach().requires_grad_() for x in tensors]
    wanted = attention(*alone, Visibility.full())
    torch.testing.assert_close(out[:13, :1], wanted, rtol=0, atol=1e-13)
    for found, true in zip(grads, torch.autograd.grad((wanted[:, 0] * weights).sum(), alone), strict=True):
        torch.testing.assert_close(found[:13, :1], true, rtol=0, atol=1e-13)
        assert not found[13:].any()


def test_long_padding_is_cut():
    documents = Documents.of_lengths(np.array([10]), 10 + 2 * PADDING_DOCUMENT + 5)
    assert documents.cu_seqlens.diff().tolist() == [10, PADDING_DOCUMENT, PADDING_DOCUMENT, 5]


def test_padding_inside_of_a_document_is_refused():
    with pytest.raises(DataError, match="Padding is inside of a document"):
        Documents.build(np.zeros((1, 4), np.int64), is_padding_BS=np.array([[False, True, False, False]]))


def test_a_prefix_in_the_middle_is_refused():
    with pytest.raises(DataError, match="not at the beginning"):
        Documents.build(np.zeros((1, 4), np.int64), in_prefix_BS=np.array([[False, True, False, False]]))


def test_documents_move_with_their_prefixes():
    documents = documents_of("packed", prefix=True)
    assert documents is not None and documents.prefix_ends_BS is not None
    moved = documents.to(CPU)
    assert moved.prefix_ends_BS is not None and moved.prefix_ends_BS.equal(documents.prefix_ends_BS)
    room = documents.bounded(9)
    other = documents_of("packed and padded", prefix=True)
    assert other is not None and other.prefix_ends_BS is not None and room.prefix_ends_BS is not None
    room.copy_(other)
    assert room.prefix_ends_BS.equal(other.prefix_ends_BS)


def test_bounds_are_made_once_for_the_layers_of_a_batch():
    documents = documents_of("packed")
    first, second, other = (
        VisibleKeys.of(visibility.of_batch(documents), S, CPU)
        for visibility in (CAUSAL, Visibility(), Visibility(window=3))
    )
    assert first is second and other is not first


def test_the_last_kernel_computes_everything():
    assert KERNELS[-1].visibility == EVERYTHING and KERNELS[-1].takes is None


@pytest.mark.parametrize(
    ("visibility", "name"),
    [
        (CAUSAL, "dense"),
        (Visibility.full(), "dense"),
        (Visibility.cross(), "dense"),
        (Visibility(window=3), "blocks and tiles"),
        (Visibility.full().of_batch(documents_of("padded")), "blocks and tiles"),
        (Visibility.prefix().of_batch(documents_of("none", prefix=True)), "blocks and tiles"),
    ],
)
def test_the_first_kernel_that_can_is_chosen(visibility: Visibility, name: str):
    assert chosen_kernel(AttentionCall(*inputs(), visibility)).name == name


@pytest.mark.parametrize("wrong", [{"window": 4}, {"chunk": 4}, {"first_k": 1}, {"bias": "alibi"}])
def test_keys_of_another_sequence_have_no_distance(wrong: dict):
    with pytest.raises(AssertionError, match="no distance"):
        Visibility("cross", **wrong)


PAGE = 4


def paged_step(first: int, stop: int, *, decodes: bool, one_sequence: bool) -> PagedBatch:
    """Tokens first, ..., stop - 1 of one sequence: a chunk of its prompt, or one token that is decoded. Its pages are in reverse order."""
    pages = torch.arange(-(-S // PAGE), 0, -1, dtype=torch.int32)
    if one_sequence:
        pages = pages.flip(0)
    positions = torch.arange(first, stop)
    chunks = () if decodes else (PromptChunk(0, stop - first, 0, first),)
    return PagedBatch(
        pages[positions // PAGE] * PAGE + positions % PAGE,
        pages[None],
        torch.tensor([stop], dtype=torch.int32),
        max_length=stop if decodes else 0,
        num_decodes=int(decodes),
        chunks=chunks,
        first_page=1 if one_sequence and decodes else None,
    )


@pytest.mark.parametrize("one_sequence", [False, True])
@pytest.mark.parametrize(
    "visibility",
    [
        CAUSAL,
        Visibility(window=4),
        Visibility(chunk=7),
        Visibility(window=4, first_k=2),
        Visibility(window=3, chunk=7, first_k=1),
    ],
)
def test_pages_are_seen_as_whole_sequences_are(visibility: Visibility, one_sequence: bool):
    """A fresh chunk, a continued one, then tokens that are decoded, one by one."""
    q, k, v = (x[:, 0].detach() for x in inputs())
    wanted = attention(*(x.unsqueeze(1) for x in (q, k, v)), visibility).squeeze(1)
    k_pages, v_pages = (torch.zeros(7, PAGE, GROUPS, E, dtype=torch.float64) for _ in range(2))
    parts = []
    for first, stop in [(0, 5), (5, 11), *((position, position + 1) for position in range(11, S))]:
        batch = paged_step(first, stop, decodes=first >= 11, one_sequence=one_sequence)
        rows = slice(first, stop)
        kernels = {"visibility": visibility, "kernels": paged_attention}
        parts.append(
            paged_attention.paged_attention(
                q[rows], KeyValue(k[rows], v[rows]), KeyValue(k_pages, v_pages), batch, **kernels
            )
        )
    torch.testing.assert_close(torch.cat(parts), wanted, rtol=0, atol=1e-12)
