"""All-to-all between sequence shards and head shards (Jacobs et al., DeepSpeed-Ulysses): in between, a rank has all tokens of its
group for its share of the heads, sorted by position, so any attention kernel applies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from petatron.kernels.attention.score_modifiers import ScoreRules
from petatron.mesh import collectives
from petatron.mesh.mesh import Axis
from petatron.models.stage_inputs_outputs import SequenceOrder
from petatron.parallel.context.zigzag import sorted_by_position, sorted_by_rank


@dataclass(frozen=True, slots=True)
class UlyssesAllToAll:
    """Exchanges heads for sequence over an axis; the identity over one rank."""

    axis: Axis
    order: SequenceOrder = "zigzag"

    def scatter_heads_gather_sequence(
        self, q_SBHE: Tensor, k_SBKE: Tensor, v_SBKE: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[S, B, heads, E] of some tokens to [ranks x S, B, heads / ranks, E] of all, in one all-to-all for those of one length."""
        ranks, tensors = self.axis.size, (q_SBHE, k_SBKE, v_SBKE)
        if ranks == 1:
            return tensors
        assert all(x.shape[2] % ranks == 0 for x in tensors), f"{ranks} ranks do not divide the heads they exchange"
        if q_SBHE.shape[0] == k_SBKE.shape[0]:
            q, k, v = self._exchange(tensors)
        else:  # keys of another sequence
            (q,), (k, v) = self._exchange(tensors[:1]), self._exchange(tensors[1:])
        return q, k, v

    def _exchange(self, tensors: tuple[Tensor, ...]) -> list[Tensor]:
        ranks = self.axis.size
        shares = [x.unflatten(2, (ranks, -1)).flatten(3) for x in tensors]
        rows = self._all_to_all(torch.cat(shares, dim=-1).permute(2, 0, 1, 3).flatten(0, 1))
        parts = sorted_by_position(rows, ranks, order=self.order).split([share.shape[-1] for share in shares], dim=-1)
        return [part.unflatten(-1, (-1, x.shape[-1])) for part, x in zip(parts, tensors)]

    def local_rules(self, rules: ScoreRules | None) -> ScoreRules | None:
        """Returns the rules of this rank's share of the heads."""
        if rules is None or self.axis.size == 1:
            return rules
        sinks, bias = (
            None if x is None else x.unflatten(0, (self.axis.size, -1))[self.axis.rank]
            for x in (rules.sinks_H, rules.bias_HD)
        )
        return ScoreRules(rules.softcap, sinks, bias)

    def gather_heads_scatter_sequence(self, out_SBHE: Tensor) -> Tensor:
        """[ranks x S, B, heads / ranks, E] of all tokens to [S, B, heads, E] of this rank's."""
        ranks = self.axis.size
        if ranks == 1:
            return out_SBHE
        rows = self._all_to_all(sorted_by_rank(out_SBHE, ranks, order=self.order))
        return rows.unflatten(0, (ranks, -1)).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def _all_to_all(self, rows: Tensor) -> Tensor:
        sizes = [rows.shape[0] // self.axis.size] * self.axis.size
        return collectives.differentiable_all_to_all(rows, self.axis, send=sizes, receive=sizes)
