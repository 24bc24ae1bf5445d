"""Causal attention whose bits depend on a token and the tokens before it in its document alone: one function for training and generation.

A token's keys are taken in tiles of `KEY_TILE`, counted from its document's first token, and the tiles are merged one after the other,
each into the maximum, the sum of exponentials and the weighted sum of values so far (FlashAttention's recurrence). So the order of sums
is the same wherever the document is in a packed row, whether its keys are rows of a micro-batch or of pages, and whether its tokens come
all at once, in chunks of a prompt or one by one. A tile in which a token sees no key changes nothing: the maximum stays, so what there
is gets multiplied by one, and zeros are added.

Where keys are stored is a table: key j of a document is row `key_rows[first_key + j]`. What is to be computed is a list of segments, of
consecutive tokens of a document each. These two are an `AttentionPlan`; training makes one of a batch's documents and generation one of its
pages, once for all layers.

The gradients are those of the attention that training has otherwise (`kernels/attention`), which recomputes its own forward pass: they
need to be deterministic, but no other program computes them too.

T tokens, S sequence, B batch, H query heads, K kv heads, E head dim, V width of a value, L rows of keys, N blocks of queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from petatron.base.autograd_op import AutogradOp, first_derivative
from petatron.kernels.attention import attention
from petatron.kernels.attention.document_layout import Documents
from petatron.kernels.attention.paged_attention import KeyValue, PagedAttentionKernels, PagedBatch, store_rows
from petatron.kernels.attention.score_modifiers import ScoreRules
from petatron.kernels.attention.visibility import Visibility, VisibilitySupport
from petatron.kernels.batch_invariant.gemm import batched_matmul
from petatron.kernels.batch_invariant.row_functions import fixed_order_sum
from petatron.kernels.compute_dtype import to_compute_dtype

VISIBILITY = VisibilitySupport.of("causal", window=True, documents=True)
KEY_TILE = 64
QUERY_BLOCK = 16
"""Tokens of one block of the reference; a block with fewer has rows that see nothing."""


class QuerySegment(NamedTuple):
    """Rows first_row ... first_row + num_rows - 1 are the tokens of a document from `first_position` on.

    first_key: where its keys begin in `AttentionPlan.key_rows`.
    """

    first_row: int
    num_rows: int
    first_position: int
    first_key: int


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """What attention computes: segments, and where keys are.

    decodes_N4: segments of one token each, whose positions the device knows; None: there are none.
    """

    key_rows: Tensor
    segments: Sequence[QuerySegment] = ()
    decodes_N4: Tensor | None = None
    computed: dict[int, Tensor] = field(default_factory=dict)

    def blocks(self, size: int) -> Tensor:
        """Returns the segments, in blocks of at most `size` tokens: their four numbers, int32 [N, 4]."""
        if size not in self.computed:
            rows = [
                (row + at, min(size, count - at), position + at, key)
                for row, count, position, key in self.segments
                for at in range(0, count, size)
            ]
            decodes, device = self.decodes_N4, self.key_rows.device
            if decodes is None or rows:  # else nothing comes from the host, and a CUDA graph may hold it
                blocks = torch.tensor(rows, dtype=torch.int32, device=device).view(-1, 4)
                decodes = blocks if decodes is None else torch.cat((decodes, blocks))
            self.computed[size] = decodes
        return self.computed[size]

    @classmethod
    def of_documents(cls, documents: Documents | None, batch: int, length: int, device: torch.device) -> AttentionPlan:
        """Plans a micro-batch, whose row b x S + s is token s of sequence b; once for a batch's documents."""
        cached = {} if documents is None else documents.computed
        name = ("batch-invariant plan", batch, length, device)
        if name not in cached:
            starts = range(0, batch * length + 1, length) if documents is None else documents.cu_seqlens.tolist()
            segments = [QuerySegment(start, stop - start, 0, start) for start, stop in pairwise(starts)]
            cached[name] = cls(torch.arange(batch * length, dtype=torch.int32, device=device), segments)
        return cached[name]

    @classmethod
    def of_pages(cls, batch: PagedBatch, page_size: int) -> AttentionPlan:
        """Plans a step of generation; once for all layers."""
        name = "batch-invariant plan"
        if name not in batch.planned:
            table = batch.page_table_NP
            offsets = torch.arange(page_size, dtype=torch.int32, device=table.device)
            key_rows = (table.unsqueeze(-1) * page_size + offsets).flatten()
            per_sequence, count = table.shape[1] * page_size, batch.num_decodes
            row = torch.arange(count, dtype=torch.int32, device=table.device)
            decodes = torch.stack((row, torch.ones_like(row), batch.lengths_N[:count] - 1, row * per_sequence), dim=1)
            segments = [
                QuerySegment(chunk.start, chunk.stop - chunk.start, chunk.context, chunk.sequence * per_sequence)
                for chunk in batch.chunks
            ]
            batch.planned[name] = cls(key_rows, segments, decodes if count else None)
        return batch.planned[name]


class RowAttentionKernels(Protocol):
    """The interface of this module and its faster implementation."""

    def attend(
        self, q_THE: Tensor, k_LKE: Tensor, v_LKV: Tensor, plan: AttentionPlan, *, window: int | None, key_tile: int
    ) -> Tensor: ...


def attend(
    q_THE: Tensor, k_LKE: Tensor, v_LKV: Tensor, plan: AttentionPlan, *, window: int | None, key_tile: int = KEY_TILE
) -> Tensor:
    """Returns the attention [T, H, V] of the tokens of a plan; zeros in other rows."""
    blocks_N4 = plan.blocks(QUERY_BLOCK).long()
    first_row, count, first_position, first_key = blocks_N4.unbind(dim=1)
    groups, heads = k_LKE.shape[1], q_THE.shape[1]
    per_group = heads // groups
    at_Q = torch.arange(QUERY_BLOCK, device=q_THE.device)
    is_query = at_Q < count.unsqueeze(1)
    row_NQ = torch.where(is_query, first_row.unsqueeze(1) + at_Q, first_row.unsqueeze(1))
    position_NQ = torch.where(is_query, first_position.unsqueeze(1) + at_Q, -1)
    q = to_compute_dtype(q_THE)[row_NQ] * q_THE.shape[-1] ** -0.5
    q = q.unflatten(2, (groups, per_group)).transpose(1, 2).flatten(2, 3)  # [N, K, Q x H/K, E]
    position_NR = position_NQ.repeat_interleave(per_group, dim=1)
    state = _OnlineSoftmax.of(q, v_LKV.shape[-1])
    last_position = first_position + count - 1
    for start in range(0, int(last_position.max()) + 1 if blocks_N4.shape[0] else 0, key_tile):
        number = (last_position >= start).nonzero().squeeze(1)
        key_T = torch.arange(start, start + key_tile, device=q.device)
        exists = key_T <= last_position[number].unsqueeze(1)
        place = torch.where(exists, first_key[number].unsqueeze(1) + key_T, first_key[number].unsqueeze(1))
        rows = plan.key_rows[place].long()
        k, v = (to_compute_dtype(x[rows]).transpose(1, 2) for x in (k_LKE, v_LKV))  # [N, K, tile, E]
        position = position_NR[number].unsqueeze(-1)
        hidden = key_T > position
        if window is not None:
            hidden |= key_T <= position - window
        state.add_tile(number, q[number], k, v.masked_fill(~exists[:, None, :, None], 0.0), hidden.unsqueeze(1))
    out = state.output().unflatten(2, (QUERY_BLOCK, per_group)).transpose(1, 2).flatten(2, 3)
    result = q_THE.new_zeros((*q_THE.shape[:2], v_LKV.shape[-1]))
    result[row_NQ[is_query]] = out[is_query].to(q_THE.dtype)
    return result


@dataclass(slots=True)
class _OnlineSoftmax:
    """The maximum, the sum of exponentials and the weighted sum of values of every row, [N, K, R, ...]."""

    top: Tensor
    denominator: Tensor
    total: Tensor

    @classmethod
    def of(cls, q_NKRE: Tensor, value_width: int) -> _OnlineSoftmax:
        shape = q_NKRE.shape[:3]
        return cls(q_NKRE.new_full(shape, -torch.inf), q_NKRE.new_zeros(shape), q_NKRE.new_zeros((*shape, value_width)))

    def add_tile(self, number: Tensor, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> None:
        """Merges a tile of the keys of some blocks."""
        shape = q.shape[:2]
        scores = batched_matmul(q.flatten(0, 1), k.flatten(0, 1).mT).unflatten(0, shape)
        before = self.top[number]
        top = torch.maximum(before, scores.masked_fill(hidden, -torch.inf).amax(dim=-1))
        finite = top.masked_fill(top == -torch.inf, 0.0)
        weights = (scores - finite.unsqueeze(-1)).masked_fill_(hidden, 0.0).exp_().masked_fill_(hidden, 0.0)
        faded = (before - finite).exp_()
        self.top[number] = top
        self.denominator[number] = self.denominator[number] * faded + fixed_order_sum(weights)
        added = batched_matmul(weights.flatten(0, 1), v.flatten(0, 1)).unflatten(0, shape)
        self.total[number] = self.total[number] * faded.unsqueeze(-1) + added

    def output(self) -> Tensor:
        return self.total / self.denominator.masked_fill(self.denominator == 0.0, 1.0).unsqueeze(-1)


@dataclass(frozen=True, slots=True)
class RowAttention:
    """Attention of training, called as `kernels/attention`'s `attention` is, and attention over pages, called as `paged_attention` is.

    Both have the same key tile, or other bits.
    """

    kernels: RowAttentionKernels
    key_tile: int = KEY_TILE

    def __call__(
        self, q_SBHE: Tensor, k_SBKE: Tensor, v_SBKV: Tensor, visibility: Visibility, **options: Any
    ) -> Tensor:
        if not torch.is_grad_enabled():
            return self.forward(q_SBHE, k_SBKE, v_SBKV, visibility)
        return _RowAttention.apply(q_SBHE, k_SBKE, v_SBKV, visibility, options, self)  # pyright: ignore[reportReturnType]

    def forward(self, q_SBHE: Tensor, k_SBKE: Tensor, v_SBKV: Tensor, visibility: Visibility) -> Tensor:
        assert VISIBILITY.includes(visibility), "checked where the model is built"
        length, batch = q_SBHE.shape[:2]
        plan = AttentionPlan.of_documents(visibility.documents, batch, length, q_SBHE.device)
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q_SBHE, k_SBKE, v_SBKV))
        out = self.kernels.attend(q, k, v, plan, window=visibility.window, key_tile=self.key_tile)
        return out.unflatten(0, (batch, length)).transpose(0, 1)

    def over_pages(
        self,
        q_THE: Tensor,
        new: KeyValue,
        pages: KeyValue,
        batch: PagedBatch,
        *,
        visibility: Visibility,
        kernels: PagedAttentionKernels | None = None,
        rules: ScoreRules | None = None,
    ) -> Tensor:
        """Stores the keys and values of all tokens, and returns the attention of each to its sequence up to itself."""
        assert rules is None and VISIBILITY.includes(visibility), "checked where the model is built"
        store_rows(pages, new, batch.page_rows_T)
        plan = AttentionPlan.of_pages(batch, pages.key.shape[1])
        k, v = (x.flatten(0, 1) for x in pages)
        return self.kernels.attend(q_THE, k, v, plan, window=visibility.window, key_tile=self.key_tile)


class _RowAttention(AutogradOp):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, options: dict[str, Any], op: RowAttention
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.visibility, ctx.options = visibility, options
        return op.forward(q, k, v, visibility)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)
            out = attention(q, k, v, ctx.visibility, **ctx.options)
        return *torch.autograd.grad(out, (q, k, v), grads[0]), None, None, None
