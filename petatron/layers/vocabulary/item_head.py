"""The output head over a row-sharded table of items: token losses over all items, the rank of an item, and the best items.

A rank has a part of the items and the tokens of its own samples. It all-gathers the activations of all ranks, which are few beside the
table, and computes the scores of its items for the tokens of all: then the loss is that of an output head whose vocabulary is split, and
a rank uses the losses of its own tokens. In backward the gradients of activations are reduce-scattered, and that of the table is this
rank's: nothing of the table is communicated.

S sequence, B batch, D hidden, V items on this rank, T tokens of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from petatron.layers.parallel_slots import TensorSlot
from petatron.layers.vocabulary.output_head import OutputHead


class TokensOfRanks(Protocol):
    """The ranks with other tokens, which share a table. Tensors are concatenated along their first dimension."""

    def gather(self, x_S: Tensor) -> Tensor:
        """Concatenates what ranks have; not differentiable."""
        ...

    def gather_activations(self, x_SBD: Tensor) -> Tensor:
        """Concatenates activations; the gradients that ranks have of them are summed, and each gets its own."""
        ...

    def local_part(self, losses_SB: Tensor) -> Tensor:
        """Returns the part of this rank; every rank gets the gradients of all parts."""
        ...


class OwnTokens:
    """`TokensOfRanks` of one rank."""

    def gather(self, x_S: Tensor) -> Tensor:
        return x_S

    def gather_activations(self, x_SBD: Tensor) -> Tensor:
        return x_SBD

    def local_part(self, losses_SB: Tensor) -> Tensor:
        return losses_SB


class ItemHead(OutputHead):
    """Maps hidden states to losses over all items, the ranks of targets and the best items."""

    tensor_slots: Mapping[str, TensorSlot] = {"input_comm": "whole sequence", "vocab_shard": "vocabulary shard"}

    def __init__(self, num_items: int, hidden_size: int, *, tied: bool) -> None:
        super().__init__(num_items, hidden_size, tied=tied)
        self.tokens_of_ranks: TokensOfRanks = OwnTokens()

    def losses(
        self,
        x_SBD: Tensor,
        embedding_weight: Tensor | None,
        targets_SB: Tensor,
        *,
        loss_weights_SB: Tensor | None = None,
    ) -> Tensor:
        """Returns token losses [S, B] of this rank's tokens, over all items (see `OutputHead.losses`)."""
        tokens = self.tokens_of_ranks
        x_TBD = tokens.gather_activations(self.input_comm(self._scaled(x_SBD)))
        weights_TB = None if loss_weights_SB is None else tokens.gather(loss_weights_SB)
        return tokens.local_part(
            self.gathered_losses(x_TBD, embedding_weight, tokens.gather(targets_SB), loss_weights_SB=weights_TB)
        )

    @torch.no_grad()
    def target_ranks(self, x_BD: Tensor, embedding_weight: Tensor | None, targets_B: Tensor) -> Tensor:
        """Returns how many items come before the target of each row [B]: those with a higher score, or the same and a lower id."""
        shard, targets_T = self.vocab_shard, self.tokens_of_ranks.gather(targets_B)
        scores_TV = self._scores(x_BD, embedding_weight)
        ids_V = shard.first_id + torch.arange(shard.num_ids, device=targets_T.device)
        is_target_TV = ids_V == targets_T.unsqueeze(1)
        target_T1 = self._sum(scores_TV.masked_fill(~is_target_TV, 0).sum(dim=1, keepdim=True))
        before_TV = (scores_TV > target_T1) | ((scores_TV == target_T1) & (ids_V < targets_T.unsqueeze(1)))
        return self.tokens_of_ranks.local_part(self._sum(before_TV.sum(dim=1)))

    @torch.no_grad()
    def item_scores(self, x_BD: Tensor, embedding_weight: Tensor | None) -> Tensor:
        """Returns the scores [B, items] of all items, on every rank."""
        scores_VT = self._scores(x_BD, embedding_weight).t().contiguous()
        padding = self.used_weight(embedding_weight).shape[0] - self.vocab_shard.num_ids
        scores_VT = torch.nn.functional.pad(scores_VT, (0, 0, 0, padding))
        scores_TV = self.vocab_shard.all_gather_logits(scores_VT)[: self.vocab_shard.vocab_size].t()
        return self.tokens_of_ranks.local_part(scores_TV)

    def _scores(self, x_BD: Tensor, embedding_weight: Tensor | None) -> Tensor:
        """Returns the scores [T, V] of this rank's items for the rows of all ranks, in at least float32."""
        weight_VD = self.used_weight(embedding_weight)[: self.vocab_shard.num_ids]
        wide = torch.promote_types(x_BD.dtype, torch.float32)
        return self.tokens_of_ranks.gather(self._scaled(x_BD)).to(wide) @ weight_VD.t().to(wide)

    def _sum(self, x: Tensor) -> Tensor:
        """Sums over all ranks that have a part of the items."""
        shard = self.vocab_shard
        return x if shard.all_reduce_max_sum is None else shard.all_reduce_max_sum[1](x)
