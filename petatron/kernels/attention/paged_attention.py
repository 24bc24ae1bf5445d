"""Attention over keys and values in pages, for the packed tokens of many sequences: the reference.

The key/value cache of a layer is a tensor of pages; a sequence has a list of them, in any order. One step has two kinds of
sequences: those that *decode* one token each, and *chunks* of prompts. Its tokens are packed without padding:

    rows      decode 0 | decode 1 | ... | fresh chunk | fresh chunk | ... | continued chunk | ...

A fresh chunk begins its sequence, so its keys are all in the step. Several are attended to as training attends to packed documents
where a kernel takes unequal lengths, and else one by one, each by the dense kernel. A continued chunk also sees what its sequence
has in pages.

What does not depend on the layer (the pages that are read, the mask) is computed once a step. A single sequence whose pages follow each
other is read where it is; others are gathered, padded to the longest.

T tokens, N sequences, H query heads, K kv heads, E head dim, P pages of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.attention import attention, block_attention
from petatron.kernels.attention.document_layout import Documents
from petatron.kernels.attention.flash import supports_varlen, widens
from petatron.kernels.attention.score_modifiers import NO_RULES, ScoreRules, capped_
from petatron.kernels.attention.visibility import Visibility, VisibilitySupport
from petatron.kernels.attention.visible_key_intervals import BlockMask, VisibleKeys
from petatron.kernels.compute_dtype import compute_dtype, to_compute_dtype

VISIBILITY = VisibilitySupport.of("causal", window=True)
"""What the functions of `PagedAttentionKernels` compute of sequences in pages; the rest is computed here, in plain PyTorch."""


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Rows `start` to `stop` are tokens of the sequence with row `sequence` of the page table, after `context` tokens in pages."""

    start: int
    stop: int
    sequence: int
    context: int


class ChunkBounds(NamedTuple):
    """The chunks of prompts where only the device knows them, as in a CUDA graph.

    starts_M1: the first row of each after those that decode, and one after the last row of all; contexts_M: its tokens in pages
    before. Both int32. A chunk may have no rows, and rows after the last are padding.
    """

    starts_M1: Tensor
    contexts_M: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PagedBatch:
    """The tokens of one step.

    page_rows_T: where each token is stored: page x page size + offset. Padding is stored in page 0, which no sequence has.
    page_table_NP: the pages of each sequence, those that decode first; page 0 after its last. int32.
    lengths_N: its tokens, this step's included; int32. max_length: the longest that decodes.
    num_decodes: how many of the first rows decode: one token of a sequence each, or consecutive tokens of one; each has a row of the
    page table.
    shares_pages: they may be tokens of one sequence, so all are stored before one attends.
    chunks: of prompts, fresh ones first. documents: the boundaries of the fresh ones, where there are several.
    first_page: of the only sequence that decodes, where its pages follow each other in memory.
    state_slots_N: where each sequence has its recurrent states; None: the model has none. Padding of decodes has slot 0.
    chunk_bounds: instead of `chunks` and `documents`, those that the device knows.
    """

    page_rows_T: Tensor
    page_table_NP: Tensor
    lengths_N: Tensor
    max_length: int
    num_decodes: int
    chunks: tuple[PromptChunk, ...] = ()
    documents: Documents | None = None
    first_page: int | None = None
    shares_pages: bool = False
    state_slots_N: Tensor | None = None
    chunk_bounds: ChunkBounds | None = None
    computed: dict[str, Tensor] = field(default_factory=dict)
    """What the reference computes once for all layers."""
    planned: dict[str, Any] = field(default_factory=dict)
    """What batch-invariant attention does (`kernels/batch_invariant/attention.py`)."""


class KeyValue(NamedTuple):
    """Keys and values: those of some tokens [T, K, E], or the pages of a layer [pages, page size, K, E]."""

    key: Tensor
    value: Tensor


class PagedAttentionKernels(Protocol):
    """The interface of this module and its faster implementations."""

    def store_key_value(self, pages: KeyValue, new: KeyValue, page_rows_T: Tensor) -> None: ...
    def decode_attention(self, q_NHE: Tensor, pages: KeyValue, batch: PagedBatch, *, window: int | None) -> Tensor: ...
    def store_and_decode(
        self, q_NHE: Tensor, new: KeyValue, pages: KeyValue, batch: PagedBatch, *, window: int | None
    ) -> Tensor:
        """Stores the rows of one token of each sequence, and returns its attention."""
        ...

    def chunk_attention(
        self, q_THE: Tensor, pages: KeyValue, batch: PagedBatch, out_THE: Tensor, *, window: int | None
    ) -> None:
        """Writes the attention of the rows of chunks, all stored before, by the bounds that the device knows."""


PagedAttentionOp = Callable[..., Tensor]
"""`paged_attention`, or a function that is called as it is."""


def fresh_documents(chunks: Sequence[PromptChunk], device: torch.device) -> Documents | None:
    """Returns the boundaries of the prompts that begin, where there are several."""
    fresh = [chunk for chunk in chunks if chunk.context == 0]
    if len(fresh) < 2:
        return None
    starts = [np.full(chunk.stop - chunk.start, chunk.start - fresh[0].start) for chunk in fresh]
    return Documents.build(np.concatenate(starts)[None].astype(np.int64)).to(device)


def paged_attention(
    q_THE: Tensor,
    new: KeyValue,
    pages: KeyValue,
    batch: PagedBatch,
    *,
    visibility: Visibility,
    kernels: PagedAttentionKernels,
    rules: ScoreRules | None = None,
) -> Tensor:
    """Stores the keys and values of all tokens, and returns the attention of each to what it sees of its sequence up to itself.

    With rules of scores, decoding is in plain PyTorch, whichever kernels there are; so it is with chunks and first tokens.
    """
    window, fused = visibility.window, VISIBILITY.includes(visibility, score_rules=rules is not None)
    if not batch.chunks and batch.num_decodes == q_THE.shape[0] and fused and not batch.shares_pages:
        return kernels.store_and_decode(q_THE, new, pages, batch, window=window)
    kernels.store_key_value(pages, new, batch.page_rows_T)
    out = torch.zeros((*q_THE.shape[:2], new.value.shape[-1]), dtype=q_THE.dtype, device=q_THE.device)
    decodes = slice(batch.num_decodes)
    if batch.num_decodes and not fused:
        with_rules = {"visibility": visibility, "rules": rules or NO_RULES}
        out[decodes] = decode_with_rules(q_THE[decodes], pages, batch, **with_rules)
    elif batch.num_decodes:
        out[decodes] = kernels.decode_attention(q_THE[decodes], pages, batch, window=window)
    if batch.chunk_bounds is not None:
        assert fused, "attention with rules of scores, chunks or first tokens reads its bounds on the host"
        queries, written = q_THE[batch.num_decodes :], out[batch.num_decodes :]
        kernels.chunk_attention(queries, pages, batch, written, window=window)
    fresh = [chunk for chunk in batch.chunks if chunk.context == 0]
    if fresh:
        rows = slice(fresh[0].start, fresh[-1].stop)
        k, v = new.key[rows], new.value[rows]
        out[rows] = fresh_chunks_attention(q_THE[rows], k, v, batch, fresh, visibility=visibility, rules=rules)
    for prompt in batch.chunks[len(fresh) :]:
        rows, table = slice(prompt.start, prompt.stop), batch.page_table_NP[prompt.sequence]
        out[rows] = _continued_chunk(q_THE[rows], pages, table, prompt, visibility, rules)
    return out


def fresh_chunks_attention(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    batch: PagedBatch,
    fresh: Sequence[PromptChunk],
    *,
    visibility: Visibility,
    rules: ScoreRules | None = None,
) -> Tensor:
    """Attends within prompts that begin, whose rows these are: together where a kernel takes unequal lengths, else one by one."""
    q, k, v = (x.unsqueeze(1) for x in (q_THE, k_TKE, v_TKE))
    if batch.documents is None or supports_varlen(q_THE, v_TKE):
        lengths, documents = [q.shape[0]], batch.documents
    else:
        lengths, documents = [chunk.stop - chunk.start for chunk in fresh], None
    attend = partial(attention, visibility=visibility.of_batch(documents), rules=rules, lengths_vary=True)
    parts = [attend(*part) for part in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).squeeze(1)


def _continued_chunk(
    q_THE: Tensor,
    pages: KeyValue,
    page_table_P: Tensor,
    chunk: PromptChunk,
    visibility: Visibility,
    rules: ScoreRules | None,
) -> Tensor:
    length = chunk.context + chunk.stop - chunk.start
    k, v = (first_rows(x, page_table_P, length).unsqueeze(1) for x in pages)
    visible = VisibleKeys.of(visibility, length, q_THE.device)
    keeps = rules is not None and rules.bias_HD is not None
    mask = BlockMask((range(chunk.context, length),), (range(length),), visible, keep_positions=keeps)
    return block_attention(q_THE.unsqueeze(1), k, v, mask, rules=rules).squeeze(1)


def chunk_attention(q_THE: Tensor, pages: KeyValue, batch: PagedBatch, out_THE: Tensor, *, window: int | None) -> None:
    """Writes the attention of the rows of chunks, all stored before. The host waits for the device's bounds: a graph cannot have it."""
    assert batch.chunk_bounds is not None
    starts, contexts = (x.tolist() for x in batch.chunk_bounds)
    for number, (start, stop, context) in enumerate(zip(starts, starts[1:], contexts)):
        if start < stop:
            chunk = PromptChunk(start, stop, batch.num_decodes + number, context)
            rows, table = slice(start, stop), batch.page_table_NP[chunk.sequence]
            out_THE[rows] = _continued_chunk(q_THE[rows], pages, table, chunk, Visibility(window=window), None)


def first_rows(pages: Tensor, page_table: Tensor, length: int) -> Tensor:
    """Returns the first `length` rows of one sequence, [L, K, E]."""
    count = -(-length // pages.shape[1])
    return pages.index_select(0, page_table[:count]).flatten(0, 1)[:length]


def store_key_value(pages: KeyValue, new: KeyValue, page_rows_T: Tensor) -> None:
    """Writes the rows of every token to its slot."""
    store_rows(pages, new, page_rows_T)


def store_rows(pages: Iterable[Tensor], rows: Iterable[Tensor], page_rows_T: Tensor) -> None:
    """Writes some rows of every token to its slot in their pages."""
    slots = page_rows_T if page_rows_T.dtype == torch.int64 else page_rows_T.long()
    for into, new in zip(pages, rows):
        into.flatten(0, 1).index_copy_(0, slots, new)


def decode_attention(q_NHE: Tensor, pages: KeyValue, batch: PagedBatch, *, window: int | None) -> Tensor:
    """Returns the attention of one token of each sequence to all its rows in pages, its own included; at most `window`."""
    k, v, mask = _rows_of_decodes(pages, batch, Visibility(window=window))
    # The query heads of one kv head are rows of one sequence: nothing is repeated.
    q = q_NHE.reshape(batch.num_decodes, k.shape[1], -1, q_NHE.shape[-1])
    if not widens(q):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).flatten(1, 2)
    q, k, v = map(to_compute_dtype, (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).flatten(1, 2).to(q_NHE.dtype)


def decode_with_rules(
    q_NHE: Tensor, pages: KeyValue, batch: PagedBatch, *, visibility: Visibility, rules: ScoreRules
) -> Tensor:
    """Returns what `decode_attention` does, with rules of scores, chunks and first tokens."""
    k, v, mask = _rows_of_decodes(pages, batch, visibility)
    q = to_compute_dtype(q_NHE.reshape(batch.num_decodes, k.shape[1], -1, q_NHE.shape[-1]))
    k, v = to_compute_dtype(k), to_compute_dtype(v)
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    if rules.bias_HD is not None:
        scores = scores + _bias_of_rows(rules.bias_HD, batch, rows=k.shape[2]).view(*scores.shape[:2], -1, k.shape[2])
    scores = scores if rules.softcap is None else capped_(scores, rules.softcap)
    scores = scores if mask is None else scores + mask
    if rules.sinks_H is not None:
        sinks = rules.sinks_H.to(scores.dtype).view(k.shape[1], -1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(dim=-1)
    return (weights[..., : k.shape[2]] @ v).flatten(1, 2).to(q_NHE.dtype)


def _bias_of_rows(bias_HD: Tensor, batch: PagedBatch, *, rows: int) -> Tensor:
    """Returns the bias [N, H, L] of the last token of each sequence that decodes to its rows, by their distance."""
    lengths_N = batch.lengths_N[: batch.num_decodes].long()
    first = batch.max_length - rows if batch.first_page is not None else 0  # a window leaves the first rows out
    distances_NL = torch.arange(first, first + rows, device=bias_HD.device) - (lengths_N[:, None] - 1)
    last = bias_HD.shape[1] - 1
    columns = (distances_NL + last // 2).clamp_(0, last)
    return bias_HD[:, columns].transpose(0, 1).to(compute_dtype(bias_HD.dtype))


def _rows_of_decodes(
    pages: KeyValue, batch: PagedBatch, visibility: Visibility
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the keys and values of the sequences that decode, and the mask of their scores, where they need one."""
    if batch.first_page is None or visibility.first_k:
        k, v = _gather_padded("keys", pages.key, batch), _gather_padded("values", pages.value, batch)
        return k, v, added_mask(batch, pages.key, visibility)
    window = visibility.last_tokens(batch.max_length)
    k, v = (rows_of_only_sequence(x, batch, window).transpose(0, 1).unsqueeze(0) for x in pages)
    return k, v, None


def rows_of_only_sequence(pages: Tensor, batch: PagedBatch, window: int | None) -> Tensor:
    """Returns what the only sequence sees, whose pages follow each other, [L, ...], without a copy."""
    assert batch.first_page is not None and batch.num_decodes == 1
    count = batch.max_length if window is None else min(window, batch.max_length)
    begin = batch.first_page * pages.shape[1] + batch.max_length - count
    return pages.flatten(0, 1).narrow(0, begin, count)


def _gather_padded(name: str, pages: Tensor, batch: PagedBatch) -> Tensor:
    """Returns a copy of every sequence's pages, [N, K, L, E], with as many as the longest has; all layers share its memory."""
    read, name = pages_to_read(batch, pages.shape[1]), f"{name} {tuple(pages.shape[2:])}"
    if name in batch.computed:
        gathered = torch.index_select(pages, 0, read, out=batch.computed[name])
    else:
        gathered = batch.computed[name] = pages.index_select(0, read)
    return gathered.view(batch.num_decodes, -1, *pages.shape[2:]).transpose(1, 2)


def store_and_decode(q_NHE: Tensor, new: KeyValue, pages: KeyValue, batch: PagedBatch, *, window: int | None) -> Tensor:
    """Stores the rows of one token of each sequence, and returns its attention."""
    store_key_value(pages, new, batch.page_rows_T)
    return decode_attention(q_NHE, pages, batch, window=window)


def pages_to_read(batch: PagedBatch, page_size: int) -> Tensor:
    """Returns the pages that the longest sequence needs, of every sequence."""
    if "pages" not in batch.computed:
        table = batch.page_table_NP[: batch.num_decodes, : -(-batch.max_length // page_size)]
        batch.computed["pages"] = table.flatten()
    return batch.computed["pages"]


def added_mask(batch: PagedBatch, pages: Tensor, visibility: Visibility) -> Tensor:
    """Returns what is added to scores, [N, 1, 1, L]: 0 where a sequence sees a row, minus infinity elsewhere.

    In the precision that attention is computed in: of a mask of truth values every layer would make this one anew.
    """
    window, chunk, first_k = visibility.window, visibility.chunk, visibility.first_k
    name, size = f"mask {window} {chunk} {first_k}", pages.shape[1]
    if name not in batch.computed:
        position = torch.arange(-(-batch.max_length // size) * size, device=pages.device)
        lengths = batch.lengths_N[: batch.num_decodes, None, None, None]
        start = 0 if chunk is None else (lengths - 1) // chunk * chunk
        hidden = position >= lengths
        if window is not None:
            outside = position < lengths - window
            hidden |= outside if not first_k else outside & (position >= start + first_k)
        if chunk is not None:
            hidden |= position < start
        dtype = compute_dtype(pages.dtype) if widens(pages) else pages.dtype
        mask = torch.zeros(hidden.shape, dtype=dtype, device=pages.device)
        batch.computed[name] = mask.masked_fill_(hidden, -torch.inf)
    return batch.computed[name]
