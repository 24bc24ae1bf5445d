"""Sparse latent attention (DeepSeek-V3.2's sparse attention): latent attention of each query to the tokens that an indexer selects.

Same as `mla.py` except for top-k token selection. A sequence with at most K tokens runs the attention of `mla.py`, since every token is
selected. A longer one runs absorbed MLA (`kernels/attention/sparse_latent_attention.py`): a query gathers latents, which all heads share.

The indexer's loss compares its scores with the attention weights, summed over all heads: the sums of each rank's heads are all-reduced
over TP. Every TP rank then has the same loss, and attaches 1/TP of it, since the gradients of the gathered indexer vectors are summed over
TP. Context parallelism gathers latents, rotary keys and index keys; a rank computes the loss of its own queries.

S sequence, B batch, D hidden, H heads of this rank, E width of a query head, V of a value head, L tokens of the sequence over all ranks,
K selected tokens of a query, T = S x B queries as rows, A = L x B keys as rows, M = latent and rotary key of a token.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from petatron.kernels.attention.indexer_loss import AttentionTarget, IndexVectors, indexer_loss
from petatron.kernels.attention.paged_latent_attention import LatentPages, LatentUpProjection
from petatron.kernels.attention.paged_sparse_latent_attention import (
    SparseLatentPages,
    TopkSelection,
    paged_sparse_latent_attention,
)
from petatron.kernels.attention.sparse_latent_attention import (
    index_scores,
    row_blocks,
    sparse_latent_attention,
    topk_positions,
)
from petatron.kernels.attention.visibility import Visibility
from petatron.kernels.attention.visible_key_intervals import VisibleKeys
from petatron.kernels.compute_dtype import to_compute_dtype
from petatron.layers.forward_context import ForwardContext, RopeCosSin
from petatron.layers.mla import MlaSpec, MultiLatentAttention
from petatron.layers.moe.load_balancing import attach_aux_loss
from petatron.layers.ops.recompute_output import RecomputableOutput
from petatron.layers.parallel_slots import (
    CommSlot,
    ContextSlot,
    KeysOfAllRanks,
    OneRankKeys,
    TensorRank,
    TensorSlot,
    identity,
)
from petatron.layers.sparse_attention_indexer import Indexer, IndexerSpec
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.generation_state import GenerationStep, PagedState
from petatron.layers.spec.param_spec import ParamSpec, with_prefix

INDEXER_LOSS = "indexer loss"
_POSITION_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMlaSpec(MlaSpec):
    """Latent attention to the top-k tokens that an indexer selects."""

    title = "sparse latent attention"
    without_adapters = ("kv_up", "indexer.q_up", "indexer.k", "indexer.head_weights")

    indexer: IndexerSpec

    @property
    def aux_loss_names(self) -> tuple[str, ...]:
        return (INDEXER_LOSS,) if self.indexer.loss_coeff > 0.0 else ()

    def build(self, layer_index: int) -> SparseLatentAttention:
        return SparseLatentAttention(self, layer_index)

    def _is_sparse(self, length: int) -> bool:
        """Whether a sequence has more tokens than a query keeps."""
        return length > self.indexer.topk

    def _pairs(self, length: int, most: int, *, causal: bool) -> float:
        """Counts (query, key) pairs with at most `most` keys per query."""
        seen = min(self.visibility.window or length, length, most)
        return seen * length - seen * seen / 2 if causal else float(seen * length)

    def mixing_flops(self, seq_length: int, *, causal: bool) -> float:
        """Counts attention to the top-k tokens, index scores of all visible tokens, and the indexer loss.

        These are model FLOPs of all heads, forward and backward, with keys and values in the width of a head. `core_flops` counts what
        one rank's forward executes, with absorbed heads.
        """
        index = self.indexer
        score, attend = 2 * index.num_heads * index.head_dim, 2 * self.num_heads * (self.qk_dim + self.v_dim)
        every = self._pairs(seq_length, seq_length, causal=causal)
        kept = self._pairs(seq_length, index.topk, causal=causal)
        flops = 3 * attend * kept
        if self._is_sparse(seq_length):
            flops += score * every
        if index.loss_coeff > 0.0:
            flops += (2 * self.num_heads * self.qk_dim + 3 * score) * (kept if index.sparse_loss else every)
        return flops

    def saved_bytes(self, shape: ActivationShape, recomputed: Collection[str]) -> int:
        if self.region in recomputed:
            return 0
        index, learns = self.indexer, self.indexer.loss_coeff > 0.0
        saved = 0
        if self._is_sparse(shape.whole_sequence):
            rows, heads = shape.gathered_tokens, self.num_heads // shape.tp
            saved += shape.activation_bytes(rows, heads * (self.qk_dim + self.v_dim)) + self._latent_bytes(shape)
            saved += shape.activation_bytes(shape.batch * shape.whole_sequence, self.kv_rank + self.rotary_dim)
            saved += _POSITION_BYTES * rows * index.topk
            saved += shape.fp8_column_input_bytes(self.q_input_size) + shape.fp8_requantized_bytes(heads * self.v_dim)
        else:
            saved += super(SparseMlaSpec, self).saved_bytes(shape, recomputed)
        if learns:
            grads = shape.gathered_tokens * (index.gathered_width - index.head_dim)
            grads += shape.batch * shape.whole_sequence * index.head_dim
            saved += shape.activation_bytes(1, grads) + index.k_norm.saved_bytes(shape, shape.tokens)
        return saved

    def forward_flops(self, shape: ActivationShape) -> float:
        learns = self.indexer.loss_coeff > 0.0
        projections = (
            shape.tokens * self.indexer.gemm_flops() if learns or self._is_sparse(shape.whole_sequence) else 0.0
        )
        return super(SparseMlaSpec, self).forward_flops(shape) + projections

    def core_flops(self, shape: ActivationShape) -> float:
        """Counts what one rank's forward executes: absorbed MLA if tokens are selected, with keys as wide as latent and rotary key."""
        length, heads, index = shape.whole_sequence, self.num_heads // shape.tp, self.indexer
        absorbed, score = 2 * heads * (2 * self.kv_rank + self.rotary_dim), 2 * index.num_heads * index.head_dim
        flops, learns = super(SparseMlaSpec, self).core_flops(shape), index.loss_coeff > 0.0
        if self._is_sparse(length):
            flops = float(shape.gathered_tokens * (absorbed * index.topk + score * length))
        if learns:
            pairs = shape.gathered_tokens * (min(index.topk, length) if index.sparse_loss else length)
            flops += pairs * (2 * heads * (self.kv_rank + self.rotary_dim) + 3 * score)
        return flops

    def context_parallel_bytes(self, shape: ActivationShape) -> int:
        """Counts gathered latents, rotary keys and index keys, if tokens are selected."""
        if not self._is_sparse(shape.whole_sequence):
            return super(SparseMlaSpec, self).context_parallel_bytes(shape)
        width = self.kv_rank + self.rotary_dim + self.indexer.head_dim
        return shape.activation_bytes(shape.gathered_tokens, width)

    def generation_state(self, tp: int) -> PagedState:
        """Returns pages with the latent, rotary key and index key of each token, which all heads share."""
        rows = (("latent", (self.kv_rank,)), ("rope_key", (self.rotary_dim,)), ("index_key", (self.indexer.head_dim,)))
        return PagedState(rows)

    def params(self) -> Mapping[str, ParamSpec]:
        return {**super(SparseMlaSpec, self).params(), **with_prefix("indexer", self.indexer.params())}


@dataclass(frozen=True, slots=True, eq=False)
class _VisibleTokens:
    """The tokens visible to this rank's queries: positions [S] of the queries, and start of each query's document/window, [B or 1, S]."""

    positions_S: Tensor
    first_BS: Tensor
    length: int

    @classmethod
    def of(cls, visibility: Visibility, keys: KeysOfAllRanks, length: int, device: torch.device) -> _VisibleTokens:
        runs = keys.positions(length)
        positions = torch.cat([torch.arange(run.start, run.stop, device=device) for run in runs])
        interval = VisibleKeys.of(visibility, length, device).interval
        if interval is None:
            return cls(positions, torch.zeros_like(positions).unsqueeze(0), length)
        return cls(positions, interval.first.by_query_BS.to(device).index_select(1, positions), length)

    def mask(self, rows: slice) -> Tensor:
        """Returns which tokens a block of queries sees, [B or 1, block, L]."""
        tokens = torch.arange(self.length, device=self.positions_S.device)
        return (tokens <= self.positions_S[rows, None]) & (tokens >= self.first_BS[:, rows, None])


class SparseLatentAttention(MultiLatentAttention):
    """out(attention of each query to its top-k tokens). The KV up-projection is absorbed and does not run in FP8."""

    fp8_linears = ("q_up", "out")
    absorbed_linears = ()
    tensor_slots: Mapping[str, TensorSlot] = {**MultiLatentAttention.tensor_slots, "tensor_rank": "tensor rank"}
    group_sum_slots: Mapping[str, int] = {"sum_heads": 1}
    context_slots: Mapping[str, ContextSlot] = {"keys_of_ranks": "keys of all ranks"}

    def __init__(self, spec: SparseMlaSpec, layer_index: int) -> None:
        super().__init__(spec, layer_index)
        self.sparse_spec = spec
        self.indexer = Indexer(spec.indexer)
        self.sum_heads: CommSlot = identity
        self.tensor_rank: TensorRank = (0, 1)
        self.keys_of_ranks: KeysOfAllRanks = OneRankKeys()

    def forward(self, x_SBD: Tensor | RecomputableOutput, context: ForwardContext) -> Tensor:
        if context.generation is not None:
            return super().forward(x_SBD, context)
        cos_sin, spec = self._cos_sin(context), self.sparse_spec.indexer
        q_latent, latents = self._query_latent(x_SBD), self._latents(x_SBD)
        q_SBHE, visibility = self._query_heads(q_latent, cos_sin), self._visibility(context)
        length, scale = q_SBHE.shape[0] * self.keys_of_ranks.num_ranks, context.aux_loss_scale
        scale = scale if spec.loss_coeff > 0.0 else None
        out_SBHV = None
        if length <= spec.topk:
            out_SBHV = self.core(q_SBHE, *self._keys_and_values(*latents, cos_sin), visibility)
            if scale is None:
                return self.out(out_SBHV.flatten(-2))
        visible = _VisibleTokens.of(visibility, self.keys_of_ranks, length, q_SBHE.device)
        index, selected_BSK = self._index(x_SBD, q_latent, cos_sin), None
        with torch.set_grad_enabled(out_SBHV is None and torch.is_grad_enabled()):
            keys_LBM = self.keys_of_ranks.gather(torch.cat(self._whole_latents(*latents, cos_sin), dim=-1))
        if out_SBHV is None:
            selected_BSK = self._select(index, visible)
            out_SBHV = self._attend(q_SBHE, keys_LBM, selected_BSK)
        y_SBD = self.out(out_SBHV.flatten(-2))
        if scale is None:
            return y_SBD
        loss = self._loss(index, q_SBHE, keys_LBM, visible, selected_BSK if spec.sparse_loss else None)
        context.router_statistics[INDEXER_LOSS, self.layer_index] = loss.detach().to(torch.float64).reshape(1)
        return attach_aux_loss(y_SBD, loss * scale.to(loss.dtype))

    def _cached_attention(
        self, x_TD: Tensor | RecomputableOutput, cos_sin: RopeCosSin | None, step: GenerationStep
    ) -> Tensor:
        """Stores index keys beside latents, and attends to the top-k tokens of all stored tokens."""
        spec, pages = self.sparse_spec, step.pages[self.layer_index]
        q_latent = self._query_latent(x_TD)
        return paged_sparse_latent_attention(
            self._query_heads(q_latent, cos_sin).squeeze(1),
            self._index(x_TD, q_latent, cos_sin),
            *self._whole_latents(*self._latents(x_TD), cos_sin),
            SparseLatentPages(LatentPages(pages["latent"], pages["rope_key"]), pages["index_key"]),
            step.batch,
            up=self._up_projection(),
            selection=TopkSelection(spec.indexer.topk, spec.visibility.window, spec.indexer.relu),
            kernels=self.latent_kernels,
        )

    def _index(
        self, x: Tensor | RecomputableOutput, q_latent: Tensor | RecomputableOutput, cos_sin: RopeCosSin | None
    ) -> IndexVectors:
        """Returns the indexer's vectors, batch first, with the keys of all context-parallel ranks."""
        q, k, weights = self.indexer(x, q_latent, cos_sin)
        k = self.keys_of_ranks.gather(k)
        return IndexVectors(q.transpose(0, 1), k.transpose(0, 1), weights.transpose(0, 1))

    @torch.no_grad()
    def _select(self, index: IndexVectors, visible: _VisibleTokens) -> Tensor:
        """Returns the positions of the top-k tokens of each query, [B, S, K]; -1 where fewer are visible."""
        q, k, weights = index
        spec, parts = self.sparse_spec.indexer, []
        for rows in row_blocks(q.shape[1], 8 * q.shape[0] * q.shape[2] * k.shape[1]):
            scores = index_scores(q[:, rows], k, weights[:, rows], relu=spec.relu)
            parts.append(topk_positions(scores, visible.mask(rows), spec.topk).to(torch.int32))
        return torch.cat(parts, dim=1)

    def _attend(self, q_SBHE: Tensor, keys_LBM: Tensor, selected_BSK: Tensor) -> Tensor:
        batch = q_SBHE.shape[1]
        sequence_B = torch.arange(batch, device=q_SBHE.device)[:, None, None]
        rows_BSK = torch.where(selected_BSK < 0, -1, selected_BSK * batch + sequence_B.to(torch.int32))
        rows_TK = rows_BSK.transpose(0, 1).flatten(0, 1)
        spec, q_THE, keys_AM = self.spec, q_SBHE.flatten(0, 1), keys_LBM.flatten(0, 1)
        widths = {"nope_dim": spec.nope_dim, "v_dim": spec.v_dim, "scale": spec.qk_dim**-0.5}
        out_THV = sparse_latent_attention(q_THE, keys_AM, rows_TK, self.kv_up.weight, **widths)
        return out_THV.unflatten(0, (-1, batch))

    def _loss(
        self,
        index: IndexVectors,
        q_SBHE: Tensor,
        keys_LBM: Tensor,
        visible: _VisibleTokens,
        selected_BSK: Tensor | None,
    ) -> Tensor:
        """Returns this rank's share of the loss, coefficient included: 1/TP of its queries' loss, so that over TP a query counts once."""
        spec, weight = self.spec, to_compute_dtype(self.kv_up.weight.detach())
        target = AttentionTarget(
            q_BQHE=q_SBHE.detach().transpose(0, 1),
            keys_BLM=keys_LBM.detach().transpose(0, 1),
            up=LatentUpProjection.of(weight, nope_dim=spec.nope_dim, v_dim=spec.v_dim),
            scale=spec.qk_dim**-0.5,
            visible=visible.mask,
            selected_BQK=selected_BSK,
            sum_heads=self.sum_heads,
        )
        total = indexer_loss(index, target, relu=self.sparse_spec.indexer.relu)
        tokens = visible.length * q_SBHE.shape[1]
        return total * (self.sparse_spec.indexer.loss_coeff / (tokens * self.tensor_rank[1]))
