"""Groups the packed rows of a generation step into batches of sequences, for branches that carry a state from token to token.

A step's rows are one token of each sequence that decodes, then chunks of prompts, one after the other. A recurrence wants [S, B, ...],
and the state of each sequence before. Sequences that decode are one group, a view of the first rows: with S = 1 and no padding its
shapes depend on nothing but their number, so it can be in a CUDA graph. Chunks are grouped by length, no one longer than twice another,
and padded after their last token. What a branch does is

    for each group:   x_SBD = group.gather(x_TD);    state_B = group.read(slots)
                      ...                            the recurrence, with padding that leaves the state as it is (`zero_padding`)
                      group.write(slots, new state)
    y_TD = group_outputs(groups, outputs, like_T=x_TD)

A sequence that begins reads zeros, whatever its slot has. Rows that pad the step belong to no sequence, and their outputs are zero.

T rows of the step, S tokens of the longest sequence, B sequences, R tokens that are no padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from petatron.kernels.attention.paged_attention import PagedBatch, PromptChunk


@dataclass(frozen=True, slots=True, eq=False)
class _PaddedChunks:
    """rows_SB: the row of each token; padding has that of the last. tokens_R: which of them, flattened, are no padding.

    lengths_B: tokens of each. fresh_B: whether it begins its sequence.
    """

    rows_SB: Tensor
    tokens_R: Tensor
    lengths_B: Tensor
    fresh_B: Tensor

    @classmethod
    def build(cls, chunks: Sequence[PromptChunk], device: torch.device) -> _PaddedChunks:
        starts = torch.tensor([chunk.start for chunk in chunks])
        lengths = torch.tensor([chunk.stop - chunk.start for chunk in chunks])
        fresh = torch.tensor([chunk.context == 0 for chunk in chunks])
        tokens_S1 = torch.arange(int(lengths.max()))[:, None]
        rows = starts + torch.minimum(tokens_S1, lengths - 1)
        kept = (tokens_S1 < lengths).flatten().nonzero().flatten()
        return cls(*(x.to(device) for x in (rows, kept, lengths, fresh)))


@dataclass(frozen=True, slots=True, eq=False)
class SequenceGroup:
    """Some sequences of a step; slots_B: where their states are. Without `chunks` they decode, and have the first rows."""

    slots_B: Tensor
    chunks: _PaddedChunks | None = None

    @property
    def decodes(self) -> bool:
        """Whether every sequence has one token, after others."""
        return self.chunks is None

    def gather(self, x_T: Tensor) -> Tensor:
        """Returns the rows [T, ...] of these sequences as [S, B, ...]."""
        if self.chunks is None:
            return x_T[: self.slots_B.shape[0]].unsqueeze(0)
        rows_SB = self.chunks.rows_SB
        return x_T.index_select(0, rows_SB.flatten()).unflatten(0, rows_SB.shape)

    def zero_padding(self, x_SB: Tensor) -> Tensor:
        """Returns [S, B, ...] with zeros for padding."""
        if self.chunks is None:
            return x_SB
        padding = torch.arange(x_SB.shape[0], device=x_SB.device)[:, None] >= self.chunks.lengths_B
        return x_SB.masked_fill(padding.view(*padding.shape, *(1,) * (x_SB.dim() - 2)), 0)

    def read(self, slots: Tensor) -> Tensor:
        """Returns the states [B, ...] before the step; zeros for sequences that begin."""
        state = slots.index_select(0, self.slots_B)
        if self.chunks is None:
            return state
        return state.masked_fill(self.chunks.fresh_B.view(-1, *(1,) * (state.dim() - 1)), 0)

    def write(self, slots: Tensor, state_B: Tensor) -> None:
        """Stores the states [B, ...] after the step."""
        slots.index_copy_(0, self.slots_B, state_B.to(slots.dtype))

    def last_tokens(self, window_LB: Tensor, x_SB: Tensor) -> Tensor:
        """Returns the last L tokens [L, B, ...] of each sequence, given the L before these: what a convolution sees next."""
        tokens = torch.cat((window_LB, x_SB))
        if self.chunks is None:
            return tokens[x_SB.shape[0] :]
        tokens_LB = self.chunks.lengths_B + torch.arange(window_LB.shape[0], device=x_SB.device)[:, None]
        index = tokens_LB.view(*tokens_LB.shape, *(1,) * (x_SB.dim() - 2)).expand_as(window_LB)
        return tokens.gather(0, index)

    def scatter(self, y_SB: Tensor, out_T: Tensor) -> None:
        """Writes the outputs [S, B, ...] of these sequences to their rows."""
        if self.chunks is None:
            out_T[: y_SB.shape[1]] = y_SB[0]
            return
        tokens_R = self.chunks.tokens_R
        rows_R = self.chunks.rows_SB.flatten().index_select(0, tokens_R)
        out_T.index_copy_(0, rows_R, y_SB.flatten(0, 1).index_select(0, tokens_R))


def sequence_groups(batch: PagedBatch) -> tuple[SequenceGroup, ...]:
    """Returns the sequences of a step: those that decode, and chunks by length."""
    slots_N = batch.state_slots_N
    assert slots_N is not None, "the step says where states are"
    slots_N = slots_N if slots_N.dtype == torch.int64 else slots_N.long()
    groups = [SequenceGroup(slots_N[: batch.num_decodes])] if batch.num_decodes else []
    by_length: dict[int, list[PromptChunk]] = {}
    for chunk in batch.chunks:
        by_length.setdefault((chunk.stop - chunk.start - 1).bit_length(), []).append(chunk)
    for chunks in by_length.values():
        numbers = torch.tensor([chunk.sequence for chunk in chunks], device=slots_N.device)
        groups.append(SequenceGroup(slots_N[numbers], _PaddedChunks.build(chunks, slots_N.device)))
    return tuple(groups)


def group_outputs(groups: Sequence[SequenceGroup], outputs: Sequence[Tensor], *, like_T: Tensor) -> Tensor:
    """Returns the outputs [S, B, ...] of all groups as rows [T, ...], with the shape and dtype of other rows."""
    if len(groups) == 1 and groups[0].decodes and outputs[0].shape[1] == like_T.shape[0]:
        return outputs[0][0]
    out_T = torch.zeros(like_T.shape, dtype=like_T.dtype, device=like_T.device)
    for group, y_SB in zip(groups, outputs, strict=True):
        group.scatter(y_SB, out_T)
    return out_T
