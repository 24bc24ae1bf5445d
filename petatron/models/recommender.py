"""The module of recommenders: a row-sharded table of items, layers over a history, and a loss over all items or over sampled ones.

The table is used at both ends: for the items of a history and for scores. Untied, each end has its own.

S sequence, B batch, D hidden, T tokens, N candidates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from petatron.config.pipeline_stages import PipelineStage
from petatron.layers.forward_context import StatisticsKey
from petatron.layers.hstu import TIMESTAMPS
from petatron.layers.parallel_slots import CommSlot, TensorSlot, identity
from petatron.layers.vocabulary.item_head import ItemHead
from petatron.layers.vocabulary.row_sharded_table import PADDING_ID, RowShardedTable
from petatron.layers.vocabulary.sampled_softmax import expected_counts, sampled_softmax_losses
from petatron.layers.whole_sequence import WholeSequence
from petatron.models.batch import Batch
from petatron.models.decoder import HIDDEN, Decoder, DecoderParts
from petatron.models.next_item import HAS_TARGET, TARGET_RANKS
from petatron.models.stage_inputs_outputs import StageOutput

FULL_SOFTMAX_LOSS, SAMPLED_SOFTMAX_LOSS = "full softmax loss", "sampled softmax loss"
NEGATIVES, NEGATIVE_SHARES, LABEL_SHARES = "negatives", "negative_shares", "label_shares"
"""Arrays of a batch: items drawn uniformly [B, N], their shares among all targets [B, N], and those of the labels [B, S]."""
LAST_ITEM_WEIGHTS, LAST_WEIGHTS, LAST_TARGETS = "last_item_weights", "last_target_weights", "last_targets"
"""Arrays that the model adds: 1 [B, S] where the last item of a history is, or where the last target is predicted, and that target [B]."""
ITEM_SCORES = "item_scores"
"""The output [B, items]: the scores of all items after the last item of each history."""


class LastState(nn.Module):
    """Selects one hidden state of each sequence by weights, whole on every rank that has a part of it."""

    tensor_slots: Mapping[str, TensorSlot] = {"shard": "sequence shard", "total": "sum of sequence shards"}

    def __init__(self) -> None:
        super().__init__()
        self.shard: CommSlot = identity
        self.total: CommSlot = identity

    def forward(self, x_SBD: Tensor, weights_BS: Tensor) -> Tensor:
        weights_SB = self.shard(weights_BS.t())
        return self.total(torch.einsum("sbd,sb->bd", x_SBD, weights_SB.to(x_SBD.dtype)))


class Recommender(Decoder):
    """Items, layers and scores; or the part of these that one pipeline stage has."""

    def __init__(self, spec: DecoderParts, stage: PipelineStage) -> None:
        super().__init__(spec, stage)
        config = self.config
        sizes = (spec.vocab_size, config.hidden_size)
        self.embedding: RowShardedTable | None = RowShardedTable(*sizes) if stage.has_embedding else None  # pyright: ignore[reportIncompatibleVariableOverride]
        untied = config.untie_embeddings_and_output_weights and stage.has_loss
        self.output_embedding = RowShardedTable(*sizes) if untied else None
        self.head: ItemHead | None = ItemHead(*sizes, tied=True) if stage.has_loss else None  # pyright: ignore[reportIncompatibleVariableOverride]
        self.last_state = LastState() if stage.has_loss else None
        self.whole_sequence = WholeSequence() if stage.has_loss else None

    def outer_modules(self) -> Sequence[Sequence[nn.Module]]:
        ends = [self.norm, self.output_embedding]
        groups = ([self.embedding], [self.position], [self.embedding_norm], ends)
        return [modules for group in groups if (modules := [module for module in group if module is not None])]

    def reused_params(self) -> Iterator[nn.Parameter]:
        return iter(())

    @property
    def item_table(self) -> RowShardedTable:
        """The table that scores are computed with."""
        table = self.output_embedding or self.embedding
        assert table is not None, "a tied table is on the stage with the loss"
        return table

    def forward(
        self,
        batch: Batch,
        inputs: Mapping[str, Tensor] = MappingProxyType({}),
        *,
        aux_loss_scale: Tensor | None = None,
        router_statistics: dict[StatisticsKey, Tensor] | None = None,
        loss_weights: Mapping[str, Tensor] | None = None,
        collect: Collection[str] = (),
    ) -> StageOutput:
        """Runs the stage (see `StageModule`); the last one computes the loss if the batch has labels and nothing is collected.

        It can collect "hidden_states" [B, S, hidden], the output of the last norm, and "item_scores" [B, items] after the last item of
        each history. In evaluation it adds "target_ranks" [B] to the loss: how many items come before the last target.
        """
        x_SBD = inputs[HIDDEN] if self.embedding is None else self._embed(batch.tokens, self._positions(batch))
        times = {TIMESTAMPS: batch[TIMESTAMPS]} if TIMESTAMPS in batch else {}
        context = self._context(
            batch, x_SBD, times, aux_loss_scale, {} if router_statistics is None else router_statistics
        )
        x_SBD = self.run_layers(self._main_layers(), x_SBD, context)
        if self.head is None or self.norm is None:
            return StageOutput({HIDDEN: x_SBD}, {}, {})
        x_SBD = self.norm(x_SBD)
        collected: dict[str, Tensor] = {}
        if "hidden_states" in collect:
            collected["hidden_states"] = self._hidden_states(x_SBD)
        if ITEM_SCORES in collect:
            weights_BS = batch[LAST_ITEM_WEIGHTS] if LAST_ITEM_WEIGHTS in batch else last_items(batch.tokens)
            last_BD = self._last_states(batch, x_SBD, weights_BS)
            collected[ITEM_SCORES] = self.head.item_scores(last_BD, self.item_table.weight)
        if "labels" not in batch or collect:
            return StageOutput({}, {}, collected)
        if TARGET_RANKS not in collect and not torch.is_grad_enabled():
            last_BD = self._last_states(batch, x_SBD, batch[LAST_WEIGHTS])
            collected[TARGET_RANKS] = self.head.target_ranks(last_BD, self.item_table.weight, batch[LAST_TARGETS])
        if self.config.item_loss == "sampled_softmax":
            return StageOutput({}, {SAMPLED_SOFTMAX_LOSS: self._sampled_losses(batch, x_SBD)}, collected)
        weights = None if loss_weights is None else loss_weights[FULL_SOFTMAX_LOSS]
        losses = self.head.losses(x_SBD, self.item_table.weight, batch.labels.t(), loss_weights_SB=weights)
        return StageOutput({}, {FULL_SOFTMAX_LOSS: losses}, collected)

    def _last_states(self, batch: Batch, x_SBD: Tensor, weights_BS: Tensor) -> Tensor:
        """Returns [B, D], whatever part of the sequences this rank has."""
        assert self.last_state is not None
        last_BD, part = self.last_state(x_SBD, weights_BS), batch.sequence_part
        return last_BD if part is None else part.all_reduce(last_BD)

    def _sampled_losses(self, batch: Batch, x_SBD: Tensor) -> Tensor:
        """Returns token losses [S, B]; each rank has the candidates of its micro-batch."""
        assert self.whole_sequence is not None
        counted_SB, labels_SB = batch.loss_mask.t() > 0, batch.labels.t()
        x_TD = self.whole_sequence(x_SBD, labels_SB.shape[0])[counted_SB]
        targets_T = labels_SB[counted_SB]
        drawn, shares, numbers = [], [], {"num_uniform": 0, "num_in_batch": 0}
        if self.config.item_negatives != "in_batch":
            drawn.append(batch[NEGATIVES].flatten())
            shares.append(batch[NEGATIVE_SHARES].flatten())
            numbers["num_uniform"] = drawn[-1].shape[0]
        if self.config.item_negatives != "uniform":
            drawn.append(targets_T)
            shares.append(batch[LABEL_SHARES].t()[counted_SB])
            numbers["num_in_batch"] = targets_T.shape[0]
        candidates_N, places, counts_N = torch.unique(torch.cat(drawn), return_inverse=True, return_counts=True)
        shares_N = torch.zeros(candidates_N.shape, dtype=torch.float64, device=x_TD.device)
        shares_N[places] = torch.cat(shares).double()
        expected_N = expected_counts(shares_N, num_items=self.item_table.vocab_shard.vocab_size, **numbers)
        rows = self.item_table.rows(torch.cat((targets_T, candidates_N)))
        target_rows_TD, candidate_rows_ND = rows.split((targets_T.shape[0], candidates_N.shape[0]))
        log_weights_N = counts_N.double().log() - expected_N.log()
        losses_T = sampled_softmax_losses(
            x_TD, target_rows_TD, targets_T, candidate_rows_ND, candidates_N, log_weights_N
        )
        return losses_T.new_zeros(labels_SB.shape).masked_scatter(counted_SB, losses_T)


def last_items(tokens_BS: Tensor) -> Tensor:
    """Returns 1 where the last item of each history is, [B, S].

    >>> last_items(torch.tensor([[4, 5, -1], [6, -1, -1]]))
    tensor([[0., 1., 0.],
            [1., 0., 0.]])
    """
    is_item = (tokens_BS != PADDING_ID).int()
    return (is_item * torch.arange(1, tokens_BS.shape[1] + 1, device=tokens_BS.device)).argmax(1).unsqueeze(1).eq(
        torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
    ).float() * is_item


def mark_last_items(batch: Batch) -> Batch:
    """Adds where the last item or target of each whole sequence is, and which it is, before context parallelism splits sequences."""
    dims = dict(batch.sequence_dims)
    if "labels" in batch:
        weights_BS = last_items((batch.loss_mask > 0).int() - 1)
        targets_B = (batch.labels * weights_BS.long()).sum(dim=1)
        added = {LAST_WEIGHTS: weights_BS, LAST_TARGETS: targets_B, HAS_TARGET: weights_BS.sum(dim=1)}
        dims |= {LAST_TARGETS: None, HAS_TARGET: None}
    else:
        added = {LAST_ITEM_WEIGHTS: last_items(batch.tokens)}
    return replace(batch, arrays={**batch.arrays, **added}, sequence_dims=dims)
