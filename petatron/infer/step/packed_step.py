"""The tokens of one step, packed on the host: what each row is, where it is stored, and which rows have logits."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from petatron.infer.kv_cache_pages import SCRATCH_PAGE, SCRATCH_SLOT
from petatron.infer.scheduler import ScheduledSequence
from petatron.kernels.attention.paged_attention import PagedBatch, PromptChunk

StepInputs = tuple[Tensor, Tensor, PagedBatch, Tensor]
"""Ids, positions, where they are stored, and the rows whose logits are wanted."""
StepOutputs = tuple[Tensor, Tensor]
RunStep = Callable[[StepInputs], StepOutputs]


class CacheLocations(NamedTuple):
    """Where each sequence of a step has its rows: its pages, and the slot of its recurrent states."""

    page_lists: Many[list[int]]
    state_slots: Many[int]


class ScheduledTokens(NamedTuple):
    """Tokens of a sequence at positions from `start` on. decodes: each is a row by itself, which attends through pages; else a chunk.

    state_slot: that of its recurrent states. is_long: the sequence is beyond the original context of LongRoPE, and its positions p
    are ~p in the packed rows (`layers/rope.py`). position_offset: what is added to positions.
    """

    tokens: Many[int]
    start: int
    pages: list[int]
    decodes: bool
    state_slot: int = SCRATCH_SLOT
    is_long: bool = False
    position_offset: int = 0

    @classmethod
    def of(cls, work: ScheduledSequence) -> ScheduledTokens:
        sequence, end = work.sequence, work.start + work.count - len(work.drafts)
        tokens = [*sequence.tokens[work.start : end], *work.drafts]
        return cls(
            tokens, work.start, sequence.pages, work.decodes, sequence.slot, sequence.is_long, sequence.position_offset
        )


@dataclass(frozen=True, slots=True, eq=False)
class PackedStep:
    """The host's side of a step: ids, positions and page rows of all rows, and the rows whose logits are wanted.

    The page row of a token is where its keys and values are stored: page x page size + offset.
    sequences, lengths: of every row that decodes, and then of every chunk. shares_pages: several rows are of one sequence.
    """

    rows_3T: np.ndarray
    sequences: CacheLocations
    lengths: list[int]
    num_decodes: int
    chunks: tuple[PromptChunk, ...]
    logit_rows: list[int]
    shares_pages: bool = False

    @property
    def first_page(self) -> int | None:
        """The first page of the only sequence that decodes, if its pages follow each other."""
        if self.num_decodes != 1:
            return None
        pages = self.sequences.page_lists[0]
        return pages[0] if pages == list(range(pages[0], pages[0] + len(pages))) else None


def pack_rows(
    sequences: Many[ScheduledTokens],
    logit_rows: Many[Many[int]],
    *,
    page_size: int,
    multiple: int = 1,
    least: int = 1,
) -> PackedStep:
    """Packs the tokens of sequences, decodes first, padded to at least `least` rows, and to a multiple.

    `logit_rows` count from each sequence's first row.
    """
    decodes: tuple[list[int], list[int], list[int]] = ([], [], [])
    parts: list[np.ndarray] = []
    chunks: list[PromptChunk] = []
    page_tables: list[list[int]] = []
    state_slots: list[int] = []
    lengths: list[int] = []
    wanted: list[int] = []
    begin = 0
    for (tokens, start, pages, decoded, state_slot, is_long, offset), rows in zip(sequences, logit_rows):
        end = begin + len(tokens)
        state_slots += [state_slot] * (len(tokens) if decoded else 1)
        wanted += [begin + row for row in rows]
        if decoded:
            assert not chunks, "decodes come first"
            for at, token in enumerate(tokens, start):
                page_row = pages[at // page_size] * page_size + at % page_size
                for column, value in zip(decodes, (token, ~at if is_long else at + offset, page_row)):
                    column.append(value)
                page_tables.append(pages)
                lengths.append(at + 1)
        else:
            positions = np.arange(start, start + len(tokens))
            page_rows = np.array(pages)[positions // page_size] * page_size + positions % page_size
            parts.append(np.stack([np.array(tokens), ~positions if is_long else positions + offset, page_rows]))
            chunks.append(PromptChunk(begin, end, len(page_tables), start))
            page_tables.append(pages)
            lengths.append(start + len(tokens))
        begin = end
    count = max(begin, least)
    padding = count + -count % multiple - begin
    if padding:
        parts.append(np.array([[0] * padding, [0] * padding, [SCRATCH_PAGE * page_size] * padding]))
    return PackedStep(
        np.concatenate([np.array(decodes, dtype=np.int64), *parts], axis=1),
        CacheLocations(page_tables, state_slots),
        lengths,
        len(decodes[0]),
        tuple(chunks),
        wanted,
        shares_pages=any(sequence.decodes and len(sequence.tokens) > 1 for sequence in sequences),
    )
